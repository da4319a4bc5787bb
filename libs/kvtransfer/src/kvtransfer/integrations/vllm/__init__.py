"""vLLM: `IsthmusConnector` in `connector`, for kv_connector_module_path. Only that module imports vLLM."""

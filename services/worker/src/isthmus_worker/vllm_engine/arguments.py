"""The configuration of a worker as arguments of vLLM. Pure: nothing of vLLM is imported."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from isthmus_core.errors import ConfigError
from isthmus_worker.engine_process.bouncing import bounce_settings
from isthmus_worker.vllm_engine.adapters import adapter_arguments

if TYPE_CHECKING:
    from isthmus_core.config import IsthmusConfig
    from isthmus_worker.vllm_engine.model import ModelIdentity

_ROLES = {"context": "kv_producer", "generation": "kv_consumer"}
# What the worker decides itself, and where the user says it instead.
_OURS = {
    "model": "model.path",
    "served_model_name": "model.name",
    "dtype": "model.dtype",
    "max_model_len": "engine.max_model_len",
    "enable_prefix_caching": "engine.prefix_caching",
    "skip_tokenizer_init": "nothing: a worker speaks token ids",
    "kv_transfer_config": "worker.role and transfer",
    "kv_events_config": "nothing: the worker follows vLLM's events itself",
    "disable_log_stats": "nothing: the load of the instance is read from them",
}


def set_elsewhere(name: str) -> str | None:
    """Where an argument of vLLM is said that the worker decides itself; None for the others."""
    return _OURS.get(name)


def engine_arguments(config: IsthmusConfig, identity: ModelIdentity, events_endpoint: str) -> dict[str, Any]:
    """Keyword arguments of AsyncEngineArgs: `engine.vllm` untouched, and what the worker itself decides.

    Raises ConfigError when engine.vllm sets something of the latter, or an arena is too small.
    """
    given = config.engine.vllm
    if config.model.path is None:
        raise ConfigError("model.path is not set: engine.kind = vllm needs the folder of a model")
    for name in sorted(_OURS.keys() & given.keys()):
        raise ConfigError(f"engine.vllm.{name} = {given[name]!r}: set {_OURS[name]} instead")
    arguments: dict[str, Any] = {
        **adapter_arguments(identity.adapters),
        **given,
        "model": str(config.model.path),
        "served_model_name": config.model.served_name,
        "dtype": config.model.dtype,
        "max_model_len": config.engine.max_model_len,
        "enable_prefix_caching": config.engine.prefix_caching,
        "skip_tokenizer_init": True,
        "disable_log_stats": False,
    }
    if config.engine.prefix_caching:
        arguments["kv_events_config"] = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events_endpoint,
        }
    if config.worker.role in _ROLES:
        arguments["kv_transfer_config"] = {
            "kv_connector": "IsthmusConnector",
            "kv_connector_module_path": "kvtransfer.integrations.vllm.connector",
            "kv_role": _ROLES[config.worker.role],
            "kv_load_failure_policy": config.transfer.on_transfer_failure,
            "kv_connector_extra_config": {
                "fingerprint": {
                    "weights": identity.weights_digest.hex(),
                    "attention": identity.attention_digest.hex(),
                },
                **bounce_settings(config).words,
            },
        }
    return arguments

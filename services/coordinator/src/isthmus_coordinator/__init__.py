"""The coordinator: who is there, how loaded, which pairs work, where a request goes."""

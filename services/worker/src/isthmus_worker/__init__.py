"""The worker: a hub process that serves the API and hands caches off, and the engine process that it parents."""

"""The hub: a worker's front process. Torch-free, one event loop, parent of the engine process."""

from isthmus_worker.hub.hub import SERVICE, Hub, build_hub

__all__ = ["SERVICE", "Hub", "build_hub"]

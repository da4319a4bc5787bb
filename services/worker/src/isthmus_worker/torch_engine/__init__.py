"""The reference engine's model: Llama in plain torch over a paged, slot-major KV pool."""

from isthmus_worker.torch_engine.model_config import ModelUnusable as ModelUnusable
from isthmus_worker.torch_engine.runner import TorchRunner as TorchRunner

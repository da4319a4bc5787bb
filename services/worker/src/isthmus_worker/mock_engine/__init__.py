"""A model without a model: its KV bytes and its tokens are hashes, and its tokens depend on every cached byte."""

from isthmus_worker.mock_engine.runner import MockRunner as MockRunner
from isthmus_worker.mock_engine.vocabulary import vocabulary as vocabulary

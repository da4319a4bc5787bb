"""Chunks of tokens in messages between the legs of a request. Conversions of one: `isthmus_core.generation`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from isthmus_core.generation import Tokens, chunk_to_pb
from isthmus_core.generation import first_tokens_from_bytes as first_tokens_from_bytes
from isthmus_core.generation import first_tokens_to_bytes as first_tokens_to_bytes

if TYPE_CHECKING:
    from isthmus.v1 import generation_pb2


def chunks_to_pb(chunks: Iterable[Tokens]) -> list[generation_pb2.TokenChunk]:
    """In the same order."""
    return [chunk_to_pb(one) for one in chunks]

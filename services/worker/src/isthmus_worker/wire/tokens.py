"""Chunks of tokens in messages between the legs of a request. Conversions of one: `isthmus_core.generation`."""

from __future__ import annotations

from collections.abc import Iterable

from google.protobuf.message import DecodeError
from isthmus.v1 import generation_pb2

from isthmus_core.generation import Tokens, chunk_from_pb, chunk_to_pb


def chunks_to_pb(chunks: Iterable[Tokens]) -> list[generation_pb2.TokenChunk]:
    """In the same order."""
    return [chunk_to_pb(one) for one in chunks]


def first_tokens_to_bytes(chunks: Iterable[Tokens]) -> bytes:
    """What a context leg says to a generation leg that waits for it: FirstTokensPayload."""
    return generation_pb2.FirstTokensPayload(first_tokens=chunks_to_pb(chunks)).SerializeToString()


def first_tokens_from_bytes(payload: bytes) -> tuple[Tokens, ...]:
    """Raises ValueError for bytes that are none, and as `chunk_from_pb`."""
    try:
        pb = generation_pb2.FirstTokensPayload.FromString(payload)
    except DecodeError as error:
        raise ValueError(f"no FirstTokensPayload: {error}") from error
    return tuple(chunk_from_pb(one) for one in pb.first_tokens)

"""Chunks of tokens and how they are chosen: `TokenChunk` and `SamplingParams`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from google.protobuf.message import DecodeError
from isthmus.v1 import common_pb2, generation_pb2

from isthmus_core import token_ids
from isthmus_worker.engine import FinishReason, Sampling, TokenLogprobs, Tokens


def chunk_to_pb(chunk: Tokens) -> generation_pb2.TokenChunk:
    """New tokens of one answer."""
    return generation_pb2.TokenChunk(
        sample=chunk.sample,
        tokens=common_pb2.TokenIds(le_uint32=token_ids.pack(chunk.ids)),
        logprobs=[_logprobs_to_pb(one) for one in chunk.logprobs],
        finish_reason=cast("generation_pb2.FinishReason", 0 if chunk.reason is None else chunk.reason.value),
    )


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


def chunk_from_pb(pb: generation_pb2.TokenChunk) -> Tokens:
    """Raises ValueError for ids that are no list of tokens, for an unknown reason, and unless there are as many log
    probabilities as tokens, or none."""
    ids = token_ids.unpack(pb.tokens.le_uint32)
    if pb.logprobs and len(pb.logprobs) != len(ids):
        raise ValueError(f"{len(pb.logprobs)} log probabilities for {len(ids)} tokens")
    reason = FinishReason(int(pb.finish_reason)) if pb.finish_reason else None
    return Tokens(ids, pb.sample, tuple(_logprobs_from_pb(one) for one in pb.logprobs), reason)


def _logprobs_to_pb(logprobs: TokenLogprobs) -> generation_pb2.TokenLogprobs:
    return generation_pb2.TokenLogprobs(
        logprob=logprobs.logprob,
        top_tokens=common_pb2.TokenIds(le_uint32=token_ids.pack(token for token, _ in logprobs.top)),
        top_logprobs=[value for _, value in logprobs.top],
    )


def _logprobs_from_pb(pb: generation_pb2.TokenLogprobs) -> TokenLogprobs:
    top = zip(token_ids.unpack(pb.top_tokens.le_uint32), pb.top_logprobs, strict=True)
    return TokenLogprobs(pb.logprob, tuple(top))


def sampling_to_pb(sampling: Sampling) -> generation_pb2.SamplingParams:
    """Every field explicit."""
    return generation_pb2.SamplingParams(
        max_tokens=sampling.max_tokens,
        stop_token_ids=sampling.stop_token_ids,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        seed=sampling.seed,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        logit_bias=[generation_pb2.LogitBias(token_id=token, bias=bias) for token, bias in sampling.logit_bias],
        n=sampling.n,
        logprobs=sampling.logprobs,
    )


def sampling_from_pb(pb: generation_pb2.SamplingParams) -> Sampling:
    """Absent fields get their defaults; whether the values make sense is the engine's to judge."""
    return Sampling(
        max_tokens=pb.max_tokens,
        stop_token_ids=tuple(pb.stop_token_ids),
        min_tokens=pb.min_tokens,
        temperature=pb.temperature,
        top_p=pb.top_p if pb.HasField("top_p") else 1.0,
        top_k=pb.top_k,
        min_p=pb.min_p,
        seed=pb.seed,
        presence_penalty=pb.presence_penalty,
        frequency_penalty=pb.frequency_penalty,
        repetition_penalty=pb.repetition_penalty if pb.HasField("repetition_penalty") else 1.0,
        logit_bias=tuple((one.token_id, one.bias) for one in pb.logit_bias),
        n=pb.n or 1,
        logprobs=pb.logprobs if pb.HasField("logprobs") else None,
    )

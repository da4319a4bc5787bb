"""What router and workers say about an answer: how tokens are chosen, and chunks of them, with their messages."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

from google.protobuf.message import DecodeError
from isthmus.v1 import common_pb2, generation_pb2

from isthmus_core import token_ids


class FinishReason(Enum):
    """Why an answer ended. Values are those of `isthmus.v1.FinishReason`."""

    STOP = 1
    LENGTH = 2


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen and when an answer stops, as `isthmus.v1.SamplingParams`; every field is explicit.

    `temperature` 0 is greedy. `top_p` 1, `top_k` 0, `min_p` 0, penalties 0 and `repetition_penalty` 1 do nothing.
    `logit_bias`: (token id, bias) pairs. `n` answers. `logprobs`: None = none, k = the chosen token's and the k best.
    `resumed`: so many tokens at the end of the prompt are output of an earlier try; `first_sample`: index of answer 0
    in random numbers (both need n = 1).
    """

    max_tokens: int
    stop_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    n: int = 1
    logprobs: int | None = None
    resumed: int = 0
    first_sample: int = 0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one position: of the chosen token, and (token id, log probability) of the best ones."""

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Tokens:
    """New tokens of answer `sample` in [0, n). `logprobs`: one per token when asked for. `reason`: on the last chunk.

    A generation leg does not repeat the context leg's first tokens. `drafts`: with first tokens, what may come next.
    """

    ids: tuple[int, ...]
    sample: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    reason: FinishReason | None = None
    drafts: tuple[int, ...] = ()


def joined(first: Tokens, second: Tokens) -> Tokens | None:
    """Two chunks that follow each other as one; None when they can not be: of different answers, or with drafts."""
    if first.sample != second.sample or first.reason is not None or first.drafts or second.drafts:
        return None
    return Tokens(first.ids + second.ids, first.sample, first.logprobs + second.logprobs, second.reason)


def singles(chunk: Tokens) -> Sequence[Tokens]:
    """A chunk token by token; the reason comes with the last one."""
    if len(chunk.ids) < 2:
        return (chunk,)
    last = len(chunk.ids) - 1
    return [
        Tokens((token,), chunk.sample, chunk.logprobs[at : at + 1], chunk.reason if at == last else None)
        for at, token in enumerate(chunk.ids)
    ]


def chunk_to_pb(chunk: Tokens) -> generation_pb2.TokenChunk:
    """New tokens of one answer."""
    return generation_pb2.TokenChunk(
        sample=chunk.sample,
        tokens=common_pb2.TokenIds(le_uint32=token_ids.pack(chunk.ids)),
        logprobs=[_logprobs_to_pb(one) for one in chunk.logprobs],
        finish_reason=cast("generation_pb2.FinishReason", 0 if chunk.reason is None else chunk.reason.value),
        draft_tokens=common_pb2.TokenIds(le_uint32=token_ids.pack(chunk.drafts)) if chunk.drafts else None,
    )


def chunk_from_pb(pb: generation_pb2.TokenChunk) -> Tokens:
    """Raises ValueError for ids that are no list of tokens, for an unknown reason, and unless there are as many log
    probabilities as tokens, or none."""
    ids = token_ids.unpack(pb.tokens.le_uint32)
    if pb.logprobs and len(pb.logprobs) != len(ids):
        raise ValueError(f"{len(pb.logprobs)} log probabilities for {len(ids)} tokens")
    reason = FinishReason(int(pb.finish_reason)) if pb.finish_reason else None
    drafts = token_ids.unpack(pb.draft_tokens.le_uint32)
    return Tokens(ids, pb.sample, tuple(_logprobs_from_pb(one) for one in pb.logprobs), reason, drafts)


def first_tokens_to_bytes(chunks: Iterable[Tokens]) -> bytes:
    """What a context leg says to a generation leg that waits for it: FirstTokensPayload."""
    return generation_pb2.FirstTokensPayload(first_tokens=[chunk_to_pb(one) for one in chunks]).SerializeToString()


def first_tokens_from_bytes(payload: bytes) -> tuple[Tokens, ...]:
    """Raises ValueError for bytes that are none, and as `chunk_from_pb`."""
    try:
        pb = generation_pb2.FirstTokensPayload.FromString(payload)
    except DecodeError as error:
        raise ValueError(f"no FirstTokensPayload: {error}") from error
    return tuple(chunk_from_pb(one) for one in pb.first_tokens)


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
        resumed_tokens=sampling.resumed,
        first_sample=sampling.first_sample,
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
        resumed=pb.resumed_tokens,
        first_sample=pb.first_sample,
    )

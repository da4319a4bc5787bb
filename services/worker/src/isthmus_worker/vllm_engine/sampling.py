"""Sampling of a leg as arguments of vLLM's SamplingParams. Pure.

What vLLM does otherwise than the reference engine: its random numbers are its own, so that a seed gives other tokens;
and a generation leg has the first token in its prompt, which the presence and frequency penalties do not look at.
"""

from __future__ import annotations

from typing import Any

from isthmus_core.errors import InvalidRequest
from isthmus_worker.engine import EngineRequest, RequestType

# Odd, so that all positions of a seed differ: 2^64 / golden ratio.
_STEP = 0x9E3779B97F4A7C15


def position_seed(seed: int, position: int) -> int:
    """A seed for the tokens from a position on: vLLM begins to count at the first token of a leg, and two legs of one
    request must not draw the same numbers."""
    return (seed + position * _STEP) % (1 << 63)


def sampling_arguments(request: EngineRequest) -> dict[str, Any]:
    """Keyword arguments of SamplingParams. Raises InvalidRequest for what vLLM can not do."""
    sampling, first = request.sampling, first_tokens(request)
    split = request.request_type is not RequestType.CONTEXT_AND_GENERATION
    if split and sampling.n > 1:
        remedy = "instances of vLLM hand off one answer; send one request for each, or use unsplit instances"
        raise InvalidRequest("sampling.n", str(sampling.n), remedy)
    context = request.request_type is RequestType.CONTEXT_ONLY
    greedy = sampling.temperature == 0
    arguments: dict[str, Any] = {
        "n": sampling.n,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": None if greedy else position_seed(sampling.seed, len(request.prompt) + len(first)),
        "max_tokens": 1 if context else sampling.max_tokens - len(first),
        "min_tokens": min(1, sampling.min_tokens) if context else max(0, sampling.min_tokens - len(first)),
        "stop_token_ids": list(sampling.stop_token_ids),
        # The router names every token that ends an answer.
        "ignore_eos": True,
        "detokenize": False,
    }
    if sampling.logprobs is not None:
        arguments["logprobs"] = sampling.logprobs
    if sampling.logit_bias:
        arguments["logit_bias"] = dict(sampling.logit_bias)
    return arguments


def first_tokens(request: EngineRequest) -> tuple[int, ...]:
    """What the context leg has sampled: a generation leg goes on behind it."""
    phase = request.context_phase
    return () if phase is None else phase.first_tokens[0].ids


def hands_off(request: EngineRequest) -> bool:
    """True when a context leg computes more than the whole answer."""
    return request.request_type is RequestType.CONTEXT_ONLY and request.sampling.max_tokens > 1

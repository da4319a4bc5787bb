"""Sampling of a leg as arguments of vLLM's SamplingParams. Pure.

What vLLM does otherwise than the reference engine: its random numbers are its own, so that a seed gives other tokens;
and a generation leg has the first token in its prompt, which the presence and frequency penalties do not look at.
"""

from __future__ import annotations

from typing import Any

from isthmus_worker.engine import EngineRequest, RequestType
from kvtransfer.integrations.vllm.params import DecodeLeg, PrefillLeg, decode_params, prefill_params

# Odd, so that all positions of a seed differ: 2^64 / golden ratio.
_STEP = 0x9E3779B97F4A7C15


def position_seed(seed: int, position: int) -> int:
    """A seed for the tokens from a position on: vLLM begins to count at the first token of a leg, and two legs of one
    request must not draw the same numbers."""
    return (seed + position * _STEP) % (1 << 63)


def sampling_arguments(request: EngineRequest, answer: int = 0) -> dict[str, Any]:
    """Keyword arguments of SamplingParams, for one answer."""
    sampling, made = request.sampling, _made(request, answer)
    context = request.request_type is RequestType.CONTEXT_ONLY
    greedy = sampling.temperature == 0
    arguments: dict[str, Any] = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "repetition_penalty": sampling.repetition_penalty,
        "seed": None if greedy else position_seed(sampling.seed + answer, len(request.prompt) + made),
        # Nothing is left of one token; then the leg ends when that has come.
        "max_tokens": 1 if context else max(1, sampling.max_tokens - made),
        "min_tokens": min(1, sampling.min_tokens) if context else max(0, sampling.min_tokens - made),
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


def prompts(request: EngineRequest) -> dict[int, list[int]]:
    """What vLLM is asked to go on from, by answer: the prompt, and behind it what the context leg has sampled (where
    that is not known yet the connector adds it). Each is a request of its own: vLLM refuses several greedy answers."""
    if request.context_phase is not None:
        first = request.context_phase.first_tokens
        return {one.sample: [*request.prompt, *one.ids] for one in first if one.reason is None}
    return {answer: list(request.prompt) for answer in range(request.sampling.n)}


def _made(request: EngineRequest, answer: int) -> int:
    """Tokens that the context leg has sampled, or will: a generation leg goes on behind them."""
    phase = request.context_phase
    return int(request.context is not None) if phase is None else len(phase.first_tokens[answer].ids)


def hands_off(request: EngineRequest) -> bool:
    """True when a context leg computes more than the whole answer."""
    return request.request_type is RequestType.CONTEXT_ONLY and request.sampling.max_tokens > 1


def transfer_params(request: EngineRequest, answer: int) -> dict[str, Any] | None:
    """What the connector has to know of a leg; None: nothing is handed off."""
    phase, context = request.context_phase, request.context
    if phase is not None:
        return decode_params(DecodeLeg(request.key, phase.holder, phase.prompt_tokens, request.trace))
    if context is not None:
        return decode_params(DecodeLeg(request.key, context, len(request.prompt), request.trace, True, answer))
    if request.generation_waits or hands_off(request):
        return prefill_params(PrefillLeg(request.key, request.sampling.n if request.generation_waits else 0))
    return None

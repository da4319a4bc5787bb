"""Which values of `Sampling` make sense. Everything else is refused before a request takes a place in a queue."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from isthmus_core.errors import InvalidRequest

if TYPE_CHECKING:
    from isthmus_worker.engine import Sampling

# The range of OpenAI's API. At 2 most of the text is noise already: more is a mistake, a percentage for example.
MAX_TEMPERATURE = 2.0
# The range of OpenAI's API, for presence and frequency.
MAX_PENALTY = 2.0
# At 10 a token with a positive logit is as good as banned once it was said.
MAX_REPETITION_PENALTY = 10.0
# The range and the number of entries that OpenAI's API and vLLM take.
MAX_BIAS = 100.0
MAX_BIAS_ENTRIES = 300
# Each is a stream, a sequence and blocks of its own.
MAX_ANSWERS = 16
# OpenAI's top_logprobs.
MAX_LOGPROBS = 20
# Ends of sequence, and some more: all are looked at with every token.
MAX_STOP_TOKENS = 256
# Longer than any prompt: whether the prompt is that long is the engine's to judge.
MAX_RESUMED = 1 << 24
_SEEDS = 1 << 64


def check_sampling(sampling: Sampling, vocab_size: int, field: str = "sampling") -> None:
    """Raises InvalidRequest for the first value that is out of range or no number; `field` begins its name."""
    for name, low, high in (
        ("temperature", 0.0, MAX_TEMPERATURE),
        ("min_p", 0.0, 1.0),
        ("presence_penalty", -MAX_PENALTY, MAX_PENALTY),
        ("frequency_penalty", -MAX_PENALTY, MAX_PENALTY),
    ):
        value = getattr(sampling, name)
        # Comparisons with NaN are false: it is refused here and below.
        if not low <= value <= high:
            raise InvalidRequest(f"{field}.{name}", f"{value:g}", f"use {low:g} to {high:g}")
    for name, high in (("top_p", 1.0), ("repetition_penalty", MAX_REPETITION_PENALTY)):
        value = getattr(sampling, name)
        if not 0.0 < value <= high:
            raise InvalidRequest(f"{field}.{name}", f"{value:g}", f"use more than 0 and at most {high:g} (1 = off)")
    if sampling.top_k < 0:
        raise InvalidRequest(f"{field}.top_k", str(sampling.top_k), "use at least 0 (0 = off)")
    if not 0 <= sampling.seed < _SEEDS:
        raise InvalidRequest(f"{field}.seed", str(sampling.seed), "use an unsigned 64-bit number")
    if not 1 <= sampling.n <= MAX_ANSWERS:
        raise InvalidRequest(f"{field}.n", str(sampling.n), f"use 1 to {MAX_ANSWERS}")
    if sampling.logprobs is not None and not 0 <= sampling.logprobs <= MAX_LOGPROBS:
        raise InvalidRequest(f"{field}.logprobs", str(sampling.logprobs), f"use 0 to {MAX_LOGPROBS}, or leave it out")
    _check_lengths(sampling, field)
    _check_stop_tokens(sampling, vocab_size, field)
    _check_bias(sampling.logit_bias, vocab_size, f"{field}.logit_bias")


def _check_lengths(sampling: Sampling, field: str) -> None:
    if sampling.max_tokens < 1:
        raise InvalidRequest(f"{field}.max_tokens", str(sampling.max_tokens), "use at least 1")
    most = sampling.resumed + sampling.max_tokens
    if not 0 <= sampling.min_tokens <= most:
        raise InvalidRequest(f"{field}.min_tokens", str(sampling.min_tokens), f"use 0 to max_tokens, which is {most}")
    for name, most in (("resumed", MAX_RESUMED), ("first_sample", MAX_ANSWERS - 1)):
        value = getattr(sampling, name)
        if not 0 <= value <= most:
            raise InvalidRequest(f"{field}.{name}", str(value), f"use 0 to {most}")
        if value and sampling.n > 1:
            raise InvalidRequest(f"{field}.{name}", f"set with n = {sampling.n}", "resume each answer by itself")


def _check_stop_tokens(sampling: Sampling, vocab_size: int, field: str) -> None:
    stop = sampling.stop_token_ids
    if len(stop) > MAX_STOP_TOKENS:
        raise InvalidRequest(f"{field}.stop_token_ids", f"{len(stop)} entries", f"use at most {MAX_STOP_TOKENS}")
    for token in stop:
        _check_token(f"{field}.stop_token_ids", token, vocab_size)
    if sampling.min_tokens and len(set(stop)) == vocab_size:
        raise InvalidRequest(
            f"{field}.stop_token_ids", "every token of the model", f"with min_tokens {sampling.min_tokens} none is left"
        )


def _check_bias(bias: tuple[tuple[int, float], ...], vocab_size: int, name: str) -> None:
    if len(bias) > MAX_BIAS_ENTRIES:
        raise InvalidRequest(name, f"{len(bias)} entries", f"use at most {MAX_BIAS_ENTRIES}")
    seen: set[int] = set()
    for token, value in bias:
        _check_token(name, token, vocab_size)
        if not math.isfinite(value) or abs(value) > MAX_BIAS:
            raise InvalidRequest(f"{name}[{token}]", f"{value:g}", f"use {-MAX_BIAS:g} to {MAX_BIAS:g}")
        if token in seen:
            raise InvalidRequest(f"{name}[{token}]", "given twice", "give each token once")
        seen.add(token)


def _check_token(name: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(name, f"token {token}", f"token ids must lie in [0, {vocab_size})")

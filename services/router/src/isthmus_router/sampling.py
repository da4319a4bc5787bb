"""From what a client asks of sampling to what a worker needs: defaults filled in, every value checked by name."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from isthmus_core.errors import ConfigError, InvalidRequest
from isthmus_router.ports import Sampling

# name -> (least, most): within what workers take, so that a client reads of its own field names.
RANGES: Mapping[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (1e-6, 1),
    "top_k": (0, (1 << 31) - 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0.01, 10),
    "n": (1, 16),
    "logprobs": (0, 20),
}
# Below it a softmax over float32 overflows; so little is greedy in all but name.
LEAST_TEMPERATURE = 1e-3
BIAS_LIMIT = 100
MAX_BIASES = 300
MAX_STOP_IDS = 128
MAX_STOPS = 4
MAX_STOP_CHARS = 1024


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """Values of generation_config.json for requests that name none; None where it says nothing."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """What a client asked for; None = not said. `prefix` and `logprobs_field` make the client's names of fields, for
    error messages."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    n: int = 1
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    prefix: str = ""
    logprobs_field: str = "logprobs"

    def where(self, name: str) -> str:
        """The client's name of a field."""
        if name in ("stop", "stop_token_ids"):
            return name
        return self.prefix + (self.logprobs_field if name == "logprobs" else name)


def check(options: SamplingOptions, vocab_size: int) -> None:
    """Everything that needs no token budget. Raises InvalidRequest naming the first wrong field."""
    for name in RANGES:
        value = getattr(options, name)
        if value is not None:
            _check_range(options.where(name), name, value)
    _check_count(options, "logit_bias", len(options.logit_bias), MAX_BIASES)
    seen: set[int] = set()
    for token, bias in options.logit_bias:
        where = f"{options.where('logit_bias')}[{token}]"
        if token in seen:
            raise InvalidRequest(where, "given twice", "give each token once")
        seen.add(token)
        _check_token(where, token, vocab_size)
        if not -BIAS_LIMIT <= bias <= BIAS_LIMIT:
            raise InvalidRequest(where, str(bias), f"use -{BIAS_LIMIT} to {BIAS_LIMIT}")
    _check_count(options, "stop_token_ids", len(options.stop_token_ids), MAX_STOP_IDS)
    for index, token in enumerate(options.stop_token_ids):
        _check_token(f"{options.where('stop_token_ids')}[{index}]", token, vocab_size)
    _check_count(options, "stop", len(options.stop), MAX_STOPS)
    for index, text in enumerate(options.stop):
        if not 1 <= len(text) <= MAX_STOP_CHARS:
            where = f"{options.where('stop')}[{index}]"
            raise InvalidRequest(where, f"{len(text)} characters", f"use 1 to {MAX_STOP_CHARS} characters")


def resolve(
    options: SamplingOptions, defaults: SamplingDefaults, eos_ids: tuple[int, ...], max_tokens: int, seed: int
) -> Sampling:
    """The worker's parameters. `options` must have passed `check`; `seed` is for a request that names none.

    Raises InvalidRequest when min_tokens is more than `max_tokens`.
    """
    if not 0 <= options.min_tokens <= max_tokens:
        raise InvalidRequest(
            options.where("min_tokens"), str(options.min_tokens), f"use 0 to max_tokens, which is {max_tokens}"
        )
    temperature = _float32(_first(options.temperature, defaults.temperature, 1.0))
    eos = () if options.ignore_eos else eos_ids
    return Sampling(
        max_tokens=max_tokens,
        stop_token_ids=(*eos, *(token for token in options.stop_token_ids if token not in eos)),
        min_tokens=options.min_tokens,
        temperature=temperature if temperature >= LEAST_TEMPERATURE else 0.0,
        top_p=_first(options.top_p, defaults.top_p, 1.0),
        top_k=int(_first(options.top_k, defaults.top_k, 0)),
        min_p=_first(options.min_p, defaults.min_p, 0.0),
        seed=(seed if options.seed is None else options.seed) % (1 << 64),
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
        repetition_penalty=_first(options.repetition_penalty, defaults.repetition_penalty, 1.0),
        logit_bias=options.logit_bias,
        n=options.n,
        logprobs=options.logprobs,
    )


def read_defaults(generation: Mapping[str, Any], path: Path) -> SamplingDefaults:
    """The defaults in a generation_config.json, read from `path`. Raises ConfigError naming what can not be used."""
    found: dict[str, Any] = {}
    for name in SamplingDefaults.__dataclass_fields__:
        value = generation.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{path}: {name} = {value!r} is no number")
        try:
            _check_range(name, name, value)
        except InvalidRequest as error:
            raise ConfigError(f"{path}: {error.message}") from error
        found[name] = int(value) if name == "top_k" else float(value)
    return SamplingDefaults(**found)


def _first(asked: float | None, default: float | None, otherwise: float) -> float:
    if asked is not None:
        return asked
    return otherwise if default is None else default


def _float32(value: float) -> float:
    """As the wire carries it."""
    return struct.unpack("<f", struct.pack("<f", value))[0]


def _check_range(where: str, name: str, value: float) -> None:
    least, most = RANGES[name]
    # Written so that NaN fails.
    if not least <= value <= most:
        raise InvalidRequest(where, str(value), f"use {least:g} to {most:g}")


def _check_count(options: SamplingOptions, name: str, count: int, most: int) -> None:
    if count > most:
        raise InvalidRequest(options.where(name), f"{count} entries", f"send at most {most}")


def _check_token(where: str, token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise InvalidRequest(where, str(token), f"token ids are 0 to {vocab_size - 1}")

"""What is asked, and when: a pure function of the options and a seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from isthmus_core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: `at` seconds after the start, a prompt of random token ids, and the output length to ask for."""

    at: float
    prompt: tuple[int, ...]
    max_tokens: int


Draw = Callable[[random.Random], int]


def parse_length(text: str, option: str) -> Draw:
    """`512`, `uniform:LOW-HIGH`, `normal:MEAN,DEVIATION` or `lognormal:MEDIAN,SIGMA`. Raises ConfigError."""
    kind, _, rest = text.rpartition(":")
    try:
        match kind:
            case "":
                fixed = int(rest)
                if fixed >= 1:
                    return lambda draw: fixed
            case "uniform":
                low, high = (int(part) for part in rest.split("-"))
                if 1 <= low <= high:
                    return lambda draw: draw.randint(low, high)
            case "normal":
                mean, deviation = (float(part) for part in rest.split(","))
                if mean >= 1 and deviation >= 0:
                    return lambda draw: max(1, round(draw.gauss(mean, deviation)))
            case "lognormal":
                median, sigma = (float(part) for part in rest.split(","))
                if median >= 1 and sigma >= 0:
                    return lambda draw: max(1, round(median * draw.lognormvariate(0, sigma)))
            case _:
                pass
    except ValueError:
        pass
    forms = "512, uniform:100-900, normal:512,100 or lognormal:512,0.5"
    raise ConfigError(f"{option} {text}: write {forms}, in tokens, at least 1")


def plan_workload(
    *,
    requests: int,
    rate: float,
    prompt: Draw,
    output: Draw,
    vocabulary: range,
    shared_prefix: int = 0,
    seed: int = 0,
) -> list[Planned]:
    """`requests` requests. `rate` a second with exponential gaps (Poisson arrivals); 0: all at once.

    Token ids are drawn from `vocabulary`; the first `shared_prefix` of each prompt are the same in all of them.
    """
    draw = random.Random(seed)
    prefix = tuple(draw.choices(vocabulary, k=shared_prefix))
    planned: list[Planned] = []
    at = 0.0
    for _ in range(requests):
        if rate > 0:
            at += draw.expovariate(rate)
        length = prompt(draw)
        own = tuple(draw.choices(vocabulary, k=max(0, length - shared_prefix)))
        planned.append(Planned(at, (prefix + own)[: max(length, 1)], output(draw)))
    return planned

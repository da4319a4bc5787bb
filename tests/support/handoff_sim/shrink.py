"""Makes a failing script small: leaves out faults and requests, instances and options, as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from . import campaign
from .script import Script, generate
from .shapes import TP

Fails = Callable[[Script], bool]
# Other delays may be needed once something is left out.
WEATHERS = 6


def shrink(script: Script, fails: Fails, tries: int = 600) -> Script:
    """The smallest script found with at most `tries` runs. `fails` says whether a script still shows the failure."""
    left = tries
    smaller = True
    while smaller and left > 0:
        smaller = False
        for candidate in _smaller(script):
            for weather in range(WEATHERS):
                left -= 1
                changed = replace(candidate, seed=script.seed + weather * 1_000_003)
                if left >= 0 and fails(changed):
                    script, smaller = changed, True
                    break
            if smaller or left <= 0:
                break
    return script


def _smaller(script: Script) -> Iterator[Script]:
    """Everything that is one piece smaller, the largest pieces first."""
    if script.shapes != (TP, TP):
        yield replace(script, shapes=(TP, TP))
    if script.flaky:
        yield replace(script, flaky=0.0)
    if script.wire:
        yield replace(script, wire=False)
    for index in range(len(script.requests)):
        rest = script.requests[:index] + script.requests[index + 1 :]
        if rest:
            yield replace(script, requests=rest)
    for index in range(len(script.faults)):
        yield replace(script, faults=script.faults[:index] + script.faults[index + 1 :])
    if script.contexts > 1 and all(one.context == "c0" for one in script.requests):
        yield replace(script, contexts=1)
    if script.generations > 1 and all(one.generation == "g0" for one in script.requests):
        yield replace(script, generations=1)
    for index, request in enumerate(script.requests):
        for simpler in (replace(request, attempts=1), replace(request, blocks=1, reused=0)):
            if simpler != request:
                yield replace(script, requests=(*script.requests[:index], simpler, *script.requests[index + 1 :]))


def explain(seed: int, lines: int = 200) -> str:
    """What goes wrong with a seed, made small; empty when nothing does. To be called while plans are made once."""
    script = generate(seed)
    _, problem = campaign.attempt(script)
    if not problem:
        return ""
    # The same failure: the same exception from the same line.
    where = (problem.split(":")[0], problem.rsplit("(", 1)[1])

    def fails(candidate: Script) -> bool:
        _, found = campaign.attempt(candidate)
        return bool(found) and (found.split(":")[0], found.rsplit("(", 1)[1]) == where

    small = shrink(script, fails)
    schedule, found = campaign.attempt(small)
    parts = [f"seed {seed}: {problem}", f"smallest: {small}", f"fails with: {found}"]
    if schedule is not None:
        parts.append(schedule.world.trace(lines))
    return "\n".join([*parts, f"again: PYTHONPATH=tests/support .venv/bin/python -m handoff_sim --seed {seed}"])

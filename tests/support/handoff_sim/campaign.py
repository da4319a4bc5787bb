"""Many seeds over all cores. Workers are spawned: they share nothing, so a seed does the same alone."""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from statistics import median

import pytest

from .coverage import Coverage, recorded_transitions
from .plans import plans_made_once
from .planted import every_bug
from .schedule import Schedule
from .script import Script, generate

# A worker is told what to do in pieces of this many seeds.
CHUNK = 40


@dataclass
class Result:
    """`steps`: events of each schedule. `failures`: seed and what was wrong."""

    steps: list[int] = field(default_factory=list[int])
    failures: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    coverage: Coverage = field(default_factory=Coverage)
    seconds: float = 0.0

    def merge(self, other: Result) -> None:
        """Adds a piece."""
        self.steps += other.steps
        self.failures += other.failures
        self.coverage.merge(other.coverage)

    def __str__(self) -> str:
        rate = len(self.steps) / self.seconds if self.seconds else 0.0
        broken = f"first failing seed {min(self.failures)[0]}" if self.failures else "every invariant held"
        return (
            f"{len(self.steps)} schedules in {self.seconds:.0f} s, {rate:.0f} schedules/s, {sum(self.steps)} events, "
            f"median {median(self.steps or [0]):.0f}, {len(self.failures)} failures, {broken}"
        )


def attempt(script: Script, coverage: Coverage | None = None) -> tuple[Schedule | None, str]:
    """Runs a script. What was wrong, empty when nothing was: whatever is raised is a failure."""
    schedule = None
    try:
        schedule = Schedule(script, coverage)
        schedule.run()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return schedule, f"{type(error).__name__}: {error} ({os.path.basename(where.filename)}:{where.lineno})"
    return schedule, ""


_worker = ExitStack()
_met = Coverage()


def _start() -> None:
    """Once per worker."""
    # The machines warn and report errors, as they should.
    logging.disable(logging.CRITICAL)
    _worker.enter_context(plans_made_once())
    _worker.enter_context(recorded_transitions(_met))
    # Garbage is looked for when a schedule is over: see _outcome.
    gc.freeze()
    gc.disable()


def _outcome(script: Script, coverage: Coverage | None = None) -> tuple[int, str]:
    """Events of a script, and what was wrong."""
    schedule, problem = attempt(script, coverage)
    steps = 0 if schedule is None else schedule.world.steps
    # A schedule is a bag of cycles that dies as a whole: looking at it while it lives costs a tenth of running it.
    del schedule
    gc.collect(0)
    return steps, problem


def _piece(first: int, number: int) -> Result:
    result = Result()
    for seed in range(first, first + number):
        steps, problem = _outcome(generate(seed), result.coverage)
        result.steps.append(steps)
        if problem:
            result.failures.append((seed, problem))
    result.coverage.merge(_met)
    return result


def _hunt(name: str, first: int, limit: int) -> tuple[int, str]:
    bug = every_bug()[name]
    for number in range(limit):
        script = generate(first + number)
        with pytest.MonkeyPatch.context() as patch:
            bug(patch)
            _, problem = _outcome(script)
        # What fails without the bug as well does not show it.
        if problem and not _outcome(script)[1]:
            return number + 1, problem
    return limit, ""


def hunt(first: int, limit: int, workers: int = 0) -> dict[str, tuple[int, str]]:
    """Plants every bug alone and runs seeds from `first` on until one shows it, at most `limit`. Schedules it took and
    what was seen, empty when it survived."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers or os.cpu_count() or 1, context, _start) as pool:
        found = {name: pool.submit(_hunt, name, first, limit) for name in every_bug()}
        return {name: future.result() for name, future in found.items()}


def table(found: dict[str, tuple[int, str]]) -> str:
    """What `hunt` returns, readable: bug, schedules it took, how it showed."""
    rows = found.items()
    return "\n".join(f"{name:46}{taken:6}  {problem[:120] or 'SURVIVED'}" for name, (taken, problem) in rows)


def every(seconds: float, tell: Callable[[Result], None]) -> Callable[[Result], None]:
    """`tell`, but at most so often."""
    due = time.monotonic() + seconds

    def told(result: Result) -> None:
        nonlocal due
        if time.monotonic() >= due:
            due = time.monotonic() + seconds
            tell(result)

    return told


def run(
    first: int,
    *,
    seconds: float = float("inf"),
    schedules: float = float("inf"),
    workers: int = 0,
    told: Callable[[Result], None] = lambda _: None,
) -> Result:
    """Seeds from `first` on, for a time or a number of schedules, whichever ends first, or to the first failure.
    `told`: of what there is, after every piece."""
    began, total = time.monotonic(), Result()
    processes = workers or os.cpu_count() or 1
    pool = ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), _start)
    starts = count(first, CHUNK)
    open_pieces: set[Future[Result]] = set()
    with pool:
        while True:
            time_left = time.monotonic() - began < seconds and len(total.steps) < schedules and not total.failures
            while time_left and len(open_pieces) < processes + 1:
                open_pieces.add(pool.submit(_piece, next(starts), CHUNK))
            if not open_pieces:
                break
            done = wait(open_pieces, return_when=FIRST_COMPLETED).done
            open_pieces -= done
            for piece in done:
                total.merge(piece.result())
            total.seconds = time.monotonic() - began
            told(total)
            if not time_left:
                for piece in open_pieces:
                    piece.cancel()
                open_pieces = {piece for piece in open_pieces if not piece.cancelled()}
    total.seconds = time.monotonic() - began
    return total

"""What a schedule consists of, as values: everything that can be left out when a failing one is made smaller.

    seed ─ generate ─▶ Script(requests, faults, weather) ─ Schedule.run ─▶ nothing, or a Violation

Delays inside a run come from `Script.seed`; what happens to whom is in the script.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from enum import Enum

from .shapes import PAIRS, TP, Shape

PAGES_PER_NODE = 8


class FaultKind(Enum):
    """What can be done to a running hand-off."""

    # The stream ends; each side learns of it in its own time.
    BREAK = "break"
    # A second stream of the same hub is opened while the first still stands.
    DUPLICATE_CONNECT = "duplicate connect"
    # Nothing passes between two hubs for a while and no stream can be opened; neither is told.
    PARTITION = "partition"
    # The generation leg is cancelled.
    CANCEL = "cancel"
    # The context leg is cancelled.
    WITHDRAW = "withdraw"
    # A context rank is killed; its parent reports.
    CONTEXT_RANK_DIES = "context rank dies"
    GENERATION_RANK_DIES = "generation rank dies"
    # The hub dies and its ranks with it; a successor starts on the host.
    CONTEXT_RESTARTS = "context restarts"
    GENERATION_RESTARTS = "generation restarts"
    # The ranks end, their exits are reported, the hub says goodbye and ends; a successor starts.
    CONTEXT_STOPS = "context stops"
    GENERATION_STOPS = "generation stops"
    # The coordinator takes the context instances out of the list and puts them back.
    LEAVE = "leave"
    # A context rank does not run for a while; what it posted goes on.
    STALL = "stall"
    # A rank says that its part of a cache is damaged, or says nothing.
    RANK_DISAGREES = "rank disagrees"
    RANK_SILENT = "rank silent"
    # A write ends half-way.
    WRITE_FAILS = "write fails"
    # A write takes seconds.
    WRITE_LATE = "write late"
    # The bytes land, and the agent never says so.
    COMPLETION_LOST = "completion lost"


# Faults that happen to one write: armed on a rank, taken by its next post.
WRITE_FAULTS = (FaultKind.WRITE_FAILS, FaultKind.WRITE_LATE, FaultKind.COMPLETION_LOST)


@dataclass(frozen=True, slots=True)
class RequestPlan:
    """One request of the router. `blocks` of prompt, of which the generation side has `reused` already. `asks_after`:
    seconds from the offer to the generation leg. `attempts` at most. With `chunked` the pages are offered block by
    block while later ones are computed. With `generation_first` both legs are started at once."""

    number: int
    at: float
    context: str
    generation: str
    blocks: int
    reused: int
    asks_after: float
    attempts: int
    chunked: bool = False
    generation_first: bool = False


@dataclass(frozen=True, slots=True)
class Fault:
    """`target` in [0, 1) picks among whatever can be hit at the time, `length` in seconds where it lasts."""

    kind: FaultKind
    at: float
    target: float
    length: float


@dataclass(frozen=True, slots=True)
class Script:
    """`flaky`: share of writes that end half-way. `retries`: of a failed receive, on fresh pages. `wire`: every message
    goes through its protobuf form. `shapes` of the context and of the generation instances."""

    seed: int
    contexts: int
    generations: int
    requests: tuple[RequestPlan, ...]
    faults: tuple[Fault, ...]
    flaky: float = 0.0
    retries: int = 1
    wire: bool = False
    shapes: tuple[Shape, Shape] = (TP, TP)


def generate(seed: int) -> Script:
    """The script of a seed."""
    rng = random.Random(seed)
    contexts, generations = rng.choice(((1, 1), (1, 1), (2, 1), (1, 2)))
    if seed % 48 == 0:
        # Crowded, with chunks: one context instance between two.
        contexts, generations = 1, 2
    requests = tuple(_request(rng, number, contexts, generations) for number in range(rng.randint(3, 6)))
    if crowded(seed):
        requests = tuple(replace(one, at=one.at * 0.15) for one in requests)
        if generations > 1:
            requests = _two_take_all_room(requests)
        if contexts > 1:
            requests = _two_share_room(requests)
    kinds = list(FaultKind)
    faults: list[Fault] = []
    for _ in range(rng.choice((0, 1, 2, 2, 3, 3, 4, 6))):
        at = rng.random() * 2.5
        # Every second one comes close to another: faults that meet are the interesting ones.
        if faults and rng.random() < 0.5:
            at = rng.choice(faults).at + rng.random() * 0.15
        length = rng.choice((0.05, 0.3, 0.8, 2.0, 2.0, 8.0))
        faults.append(Fault(rng.choice(kinds), at, rng.random(), length))
    if chunk_units(seed):
        faults += _faults_under_chunks(rng, seed, requests, generations)
    faults.sort(key=lambda one: one.at)
    flaky, retries = rng.choice((0.0, 0.0, 0.05, 0.3)), rng.choice((0, 1, 1, 2))
    shapes = rng.choice(PAIRS)
    wire = seed % 31 == 30
    return Script(seed, contexts, generations, requests, tuple(faults), flaky, retries, wire=wire, shapes=shapes)


def chunk_units(seed: int) -> int:
    """Units in a chunk of a seed's hand-offs; 0 when they do not go through chunks."""
    if seed % 6:
        return 0
    return 2 if seed // 6 % 3 == 2 or seed // 6 % 4 == 3 else 1


def _two_take_all_room(requests: tuple[RequestPlan, ...]) -> tuple[RequestPlan, ...]:
    """The first two have as many chunks for one generation instance as a context rank has room for; others follow."""
    first = [replace(one, at=0.0, generation="g0", blocks=2, reused=0, generation_first=False) for one in requests[:2]]
    rest = [replace(one, at=one.at + 0.2, generation="g1", blocks=min(one.blocks, 2)) for one in requests[2:]]
    return (*first, *(replace(one, reused=min(one.reused, one.blocks)) for one in rest))


def _two_share_room(requests: tuple[RequestPlan, ...]) -> tuple[RequestPlan, ...]:
    """The first takes all but what is kept for another context instance, and a large chunk of that one comes: it is
    granted less than it asks for."""
    first, second = (replace(one, blocks=3, reused=0, generation_first=False, chunked=False) for one in requests[:2])
    second = replace(second, at=first.at + 0.15, context="c1")
    return (replace(first, context="c0"), second, *requests[2:])


def slow_scatters(seed: int) -> bool:
    """Chunks of a seed take long to be copied into the cache: there is time for other things to happen meanwhile."""
    return not seed % 6 and seed // 6 % 2 == 1


def crowded(seed: int) -> bool:
    """The requests of a seed come almost at once: more chunks than there is room for."""
    return not seed % 6 and seed // 6 % 4 in (0, 3)


def _faults_under_chunks(
    rng: random.Random, seed: int, requests: tuple[RequestPlan, ...], generations: int
) -> list[Fault]:
    """What is seldom by chance, soon after a request has come: a rank that dies while a chunk is scattered, streams
    that end while chunks wait for room, a peer that is cut off while they take up the room that others need."""
    kinds = (FaultKind.BREAK, FaultKind.DUPLICATE_CONNECT)
    # From the request on, in seconds.
    earliest, within = 0.15, 0.5
    if slow_scatters(seed):
        kinds, earliest, within = (FaultKind.GENERATION_RANK_DIES,), 0.3, 1.0
    elif generations > 1 and crowded(seed):
        # The first of either side, while the first two ask for room.
        return [Fault(FaultKind.PARTITION, 0.05 + rng.random() * 0.3, 0.0, 2.0)]
    return [
        Fault(rng.choice(kinds), one.at + earliest + rng.random() * within, rng.random(), 0.0)
        for one in requests
        if rng.random() < 0.9
    ]


def _request(rng: random.Random, number: int, contexts: int, generations: int) -> RequestPlan:
    blocks = rng.choice((1, 2, 2, 3))
    reused = rng.choice((0, 0, 0, 1, blocks))
    return RequestPlan(
        number=number,
        at=rng.random() * 2.0,
        context=f"c{rng.randrange(contexts)}",
        generation=f"g{rng.randrange(generations)}",
        blocks=blocks,
        reused=min(reused, blocks),
        asks_after=5.0 if rng.random() < 0.04 else 0.02 + rng.random() * 0.05,
        attempts=rng.choice((1, 2, 3)),
        chunked=rng.random() < 0.4,
        generation_first=rng.random() < 0.4,
    )

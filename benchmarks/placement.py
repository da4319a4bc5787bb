"""Policies on a multi-turn trace: prompt tokens that need not be computed, balance, time to the first token.

    python benchmarks/placement.py [--quick] [--json FILE] [--svg FILE]

The coordinator's own code places the requests of `placement_trace`; instances are simulated: a context instance
computes 10,000 tokens/s, one prompt after the other, and keeps 4,096 blocks of 16 tokens, the least recently used leave
first; the coordinator hears of its blocks 50 ms later. 8 context and 8 generation instances.

Balance is the busiest context instance's share of the work over the mean (1 = even).
"""

from __future__ import annotations

import heapq
import itertools
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from bar_plot import draw
from placement_trace import Arrival, make_trace
from report import Row, argument_parser, at_least, at_most, figure, show

from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.membership import Instance, Member, Role
from isthmus_coordinator.pairs import Pair, PairState
from isthmus_coordinator.placement import Choice, Question
from isthmus_coordinator.policies import Policy
from isthmus_core.block_keys import Keying, chain
from isthmus_core.ids import MIN_GLOBAL_ID
from isthmus_core.keys import RequestKey

KEYING = Keying(b"weights", b"attention", "bfloat16", 16)
INSTANCES = 8
PREFILL_PER_S, DECODE_S = 10_000.0, 0.02
CACHE_BLOCKS, NEWS_S = 4096, 0.05


@dataclass
class Engine:
    """A context instance: when it is free, what it keeps, what it has computed."""

    member: Member
    free_at: float = 0.0
    computed: int = 0
    cache: OrderedDict[bytes, None] = field(default_factory=OrderedDict[bytes, None])

    def prefill(self, keys: list[bytes], tokens: int) -> tuple[int, list[bytes], list[bytes]]:
        """Cached tokens, new keys, keys that left."""
        hits = next((at for at, key in enumerate(keys) if key not in self.cache), len(keys))
        cached = min(hits * KEYING.tokens_per_block, tokens - 1)
        new = [key for key in keys if key not in self.cache]
        for key in reversed(keys):  # the first block is the most recently used: chains lose their ends
            self.cache[key] = None
            self.cache.move_to_end(key)
        gone = [self.cache.popitem(last=False)[0] for _ in range(len(self.cache) - CACHE_BLOCKS)]
        self.computed += tokens - cached
        return cached, new, gone


@dataclass(frozen=True)
class Outcome:
    """Of one policy on one trace. `first_s`: seconds to the first token of each request."""

    saved: int
    balance: float
    first_s: tuple[float, ...]


class Site:
    """A coordinator, its instances and a clock."""

    def __init__(self, policy: Policy) -> None:
        self.cluster = Cluster(policy)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = itertools.count()
        members = [self._join(role, at) for role in (Role.CONTEXT, Role.GENERATION) for at in range(INSTANCES)]
        self.engines = {one.instance.instance_id: Engine(one) for one in members if one.role is Role.CONTEXT}
        for member in members[INSTANCES:]:
            self.cluster.announced(member, self.cluster.peers(member))
            for engine in self.engines.values():
                self.cluster.report(member, engine.member.instance.start, Pair(PairState.READY))
        self.saved = 0
        self.first_s: list[float] = []

    def _join(self, role: Role, number: int) -> Member:
        name = f"{role.name.lower()}-{number}"
        one = Instance(name, bytes(15) + bytes([number]), f"{name}:1", role, "m", 1 << 20, 16, "mock", 2, 8192, KEYING)
        return self.cluster.join(one)[0]

    def later(self, at: float, do: Callable[[float], None]) -> None:
        """Do something at a time."""
        heapq.heappush(self._events, (at, next(self._order), do))

    def run(self) -> None:
        """Until nothing is left to do."""
        while self._events:
            at, _, do = heapq.heappop(self._events)
            do(at)

    def arrive(self, number: int, one: Arrival, now: float) -> None:
        """Place a request and let its context instance compute it."""
        keys = chain(KEYING.root(b""), one.tokens().tobytes(), KEYING.tokens_per_block)
        question = Question(
            RequestKey(MIN_GLOBAL_ID + number, 0),
            "m",
            one.prompt_tokens,
            one.answer_tokens,
            {KEYING.keying_id: b"".join(keys)},
            affinity=one.conversation.to_bytes(16, "little"),
        )
        choice = self.cluster.select(1, question)
        engine = self._engine(choice)
        engine.free_at = max(now, engine.free_at)
        cached, new, gone = engine.prefill(keys, one.prompt_tokens)
        self.saved += cached
        engine.free_at += (one.prompt_tokens - cached) / PREFILL_PER_S
        done = engine.free_at
        self.first_s.append(done - now)
        self.later(done, lambda _: self._prefilled(question.key))
        self.later(done + NEWS_S, lambda _: self._news(engine, new, gone))
        self.later(done + one.answer_tokens * DECODE_S, lambda _: self._finish(question.key))

    def _engine(self, choice: Choice) -> Engine:
        context = choice.placement.context
        if context is None:
            raise RuntimeError("every placement here has a context instance")
        return self.engines[context.instance_id]

    def _prefilled(self, key: RequestKey) -> None:
        self.cluster.prefilled(1, key)

    def _finish(self, key: RequestKey) -> None:
        self.cluster.finish(1, key)

    def _news(self, engine: Engine, new: list[bytes], gone: list[bytes]) -> None:
        self.cluster.index.remove(engine.member.number, b"".join(gone))
        self.cluster.index.store(engine.member.number, b"".join(new))


def play(policy: Policy, trace: list[Arrival]) -> Outcome:
    """A trace under a policy."""
    site = Site(policy)
    for number, one in enumerate(trace):
        site.later(one.at, lambda now, number=number, one=one: site.arrive(number, one, now))
    site.run()
    site.cluster.check()
    work = [engine.computed for engine in site.engines.values()]
    return Outcome(site.saved, max(work) * len(work) / sum(work), tuple(site.first_s))


def main() -> None:
    """Play the trace under every policy, at three rates, and show."""
    parser = argument_parser(__doc__)
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw the figures")
    arguments = parser.parse_args()
    rates = (4.0,) if arguments.quick else (2.0, 4.0, 6.0)
    conversations = 300 if arguments.quick else 1000
    rows: list[Row] = []
    outcomes: dict[float, dict[Policy, Outcome]] = {}
    totals: dict[float, int] = {}
    for rate in rates:
        trace = make_trace(conversations, rate)
        found = outcomes[rate] = {policy: play(policy, trace) for policy in Policy}
        total = totals[rate] = sum(one.prompt_tokens for one in trace)
        plain, aware = found[Policy.ROUND_ROBIN], found[Policy.KV_AWARE]
        name = f"{rate:g} conversations/s"
        rows.append(at_least(f"{name}: kv_aware, prompt tokens saved", aware.saved, "tokens", plain.saved, 2))
        rows.append(at_most(f"{name}: kv_aware, balance", aware.balance, "max/mean", plain.balance, 1.1))
        for policy, outcome in found.items():
            rows.append(figure(f"{name}: {policy.value}, saved", 100 * outcome.saved / total, "%"))
            first = np.percentile(outcome.first_s, [50, 99]) * 1e3
            rows.append(figure(f"{name}: {policy.value}, first token p50", float(first[0]), "ms"))
            rows.append(figure(f"{name}: {policy.value}, first token p99", float(first[1]), "ms"))
    show("Placement", rows, arguments.json)
    if arguments.svg is not None:
        bars = {
            f"{rate:g} conversations/s": {
                policy.value: 100 * found[policy].saved / totals[rate]
                for policy in (Policy.ROUND_ROBIN, Policy.LEAST_LOAD, Policy.AFFINITY, Policy.KV_AWARE)
            }
            for rate, found in outcomes.items()
        }
        draw("Prompt tokens that need not be computed", bars, "%", arguments.svg)


if __name__ == "__main__":
    main()

"""How much slower than the better of direct and bounced each gate's choice is, at random sizes and fragment counts.

    for every fragment size: a pair of processes ─▶ random bytes ─▶ 7 rounds of direct, bounced, ours ─▶ medians

A gate is charged what the way that it chooses took; ours is charged the way that it chose in most rounds.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from transfer_cases import HEAD_BYTES, Case, Side
from transfer_half import Setting
from transfer_pair import Pair

from kvtransfer.cost.book import HOST
from kvtransfer.cost.model import Shape
from kvtransfer.cost.policies import ChunkLimits, StagingPolicy, decide

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from report import Row

KIB, MIB = 1 << 10, 1 << 20
ROUNDS = 7
# Beyond this a direct write takes longer than everything else together, and nobody would choose it.
MOST_FRAGMENTS = 30_000
LIMITS = ChunkLimits(MIB, 128 * MIB)


@dataclass(frozen=True, slots=True)
class Point:
    """Medians in seconds of both ways, and what ours chose, in the end for what reason."""

    nbytes: int
    fragments: int
    blocks: int
    direct: float
    bounced: float
    chose_bounced: bool
    why: str

    def regret(self, bounce: bool) -> float:
        """Of 0.1: ten per cent slower than the better way."""
        return (self.bounced if bounce else self.direct) / min(self.direct, self.bounced) - 1

    def gate(self, policy: StagingPolicy) -> bool:
        """What a fixed gate would choose."""
        shape = Shape(self.nbytes, self.fragments, self.fragments, self.blocks)
        return decide(policy, HOST, shape, LIMITS).bounce


def measure(
    devices: tuple[int | None, int | None], points: int, seed: int = 0, told: Callable[[Point], None] | None = None
) -> list[Point]:
    """`points` of them, the same for the same seed."""
    rng = np.random.default_rng(seed)
    # Powers of two of a token's bytes: one head and one layer, so that a block is one fragment for K and one for V.
    smallest, largest, most = (1, 11, 512 * MIB) if None not in devices else (0, 10, 32 * MIB)
    sizes = [HEAD_BYTES << exponent for exponent in range(smallest, largest + 1)]
    share: list[int] = np.bincount(rng.integers(0, len(sizes), points), minlength=len(sizes)).tolist()
    found: list[Point] = []
    for size, count in zip(sizes, share, strict=True):
        for one in _of_size(devices, size, count, most, rng):
            found.append(one)
            if told is not None:
                told(one)
    return found


def _of_size(
    devices: tuple[int | None, int | None], size: int, count: int, most: int, rng: np.random.Generator
) -> Iterator[Point]:
    block = size // HEAD_BYTES
    most = min(most, size * MOST_FRAGMENTS)
    side = Side(heads=1, block=block)
    pair = Pair(Case(f"{size} bytes", side, side, 1, layers=1), most, devices, 512 * MIB)
    try:
        least = max(64 * KIB, 2 * size)
        for _ in range(count):
            nbytes = int(least * (most / least) ** rng.random())
            pair.resize(max(1, nbytes // (2 * size)) * block)
            yield _point(pair)
    finally:
        pair.close()


def _point(pair: Pair) -> Point:
    took: dict[str, list[float]] = {"never": [], "always": []}
    for way in took:
        pair.run(Setting(way))
    ours, why = list[bool](), ""
    for _ in range(ROUNDS):
        for way, seconds in took.items():
            seconds.append(pair.run(Setting(way))[0])
        stats = pair.run(Setting("cost"))[1].stats
        ours.append(stats.bounced > 0)
        why = stats.why
    medians = [statistics.median(seconds) for seconds in took.values()]
    chose = sum(ours) * 2 > len(ours)
    return Point(pair.nbytes, pair.fragments, len(pair.lists[1]), medians[0], medians[1], chose, why)


def rows(points: list[Point]) -> list[Row]:
    """The table: ours first, against its aims, then the worst of each fixed gate."""
    from report import below, figure

    table: list[Row] = []
    for policy in StagingPolicy:
        ours = policy is StagingPolicy.COST
        chosen = [one.chose_bounced if ours else one.gate(policy) for one in points]
        regrets = [100 * one.regret(bounce) for one, bounce in zip(points, chosen, strict=True)]
        p95, worst = float(np.percentile(regrets, 95)), max(regrets)
        name = f"{policy.value}: regret over {len(points)} points"
        table.append(below(f"{name}, p95", p95, "%", 10) if ours else figure(f"{name}, p95", p95, "%"))
        table.append(below(f"{name}, max", worst, "%", 25) if ours else figure(f"{name}, max", worst, "%"))
    return table

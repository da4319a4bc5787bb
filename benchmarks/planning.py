"""Planning a KV transfer: made once for a peer, then addresses for every request, against two baselines.

    python benchmarks/planning.py [--quick] [--json FILE]

Blocks are random permutations on either side, so that nothing is joined by luck. The baselines write every run out, one
with a loop over blocks and one with plain numpy; both make no plan, so their time is all request. Times are medians of
CPU time (nothing here waits, and a busy machine does not blur it), all variants of a case interleaved. `factored` is
what a gather kernel starts from: runs x pieces, not multiplied out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import numpy as np
from planning_baselines import Half, per_block_loop, plain_numpy
from planning_cases import CASES, Case, instance
from report import Row, argument_parser, below, figure, interleaved, show

from kvtransfer import relation, storage_check
from kvtransfer.page_table import AttentionGroup
from kvtransfer.peer_plan import PeerPlan, build_rank_plans
from kvtransfer.ports import TokenRange
from kvtransfer.rank_info import InstanceInfo, InstanceRole, RankInfo

# Runs beyond this are counted, not written out: 24 bytes each, and 48 more in the agent.
MOST_RUNS = 1 << 20
LOOP_TOKENS = 8 << 10
BUILD_AIM_MS = 5.0


def main() -> None:
    """All cases, one table."""
    args = argument_parser(__doc__).parse_args()
    logging.getLogger("kvtransfer").setLevel(logging.ERROR)
    rows: list[Row] = []
    for case in CASES:
        rows += measure(case, rounds=5 if args.quick else 31)
    show("planning", rows, args.json)


def measure(case: Case, rounds: int) -> list[Row]:
    """Every figure of one case."""
    context = instance(case, case.src, InstanceRole.CONTEXT)
    generation = instance(case, case.dst, InstanceRole.GENERATION)
    plans = build(context, generation)
    plan = plans[0]
    src, dst = lists(case, context.ranks[0], 7), lists(case, generation.ranks[plan.dst_rank], 8)
    tokens = TokenRange(0, case.tokens)
    transfer = plan.resolve(src, dst, tokens)
    runs: dict[str, Callable[[], object]] = {
        "plan": lambda: build(context, generation),
        "factored": lambda: plan.resolve(src, dst, tokens),
    }
    halves = Half(context.ranks[0], src[0]), Half(generation.ranks[plan.dst_rank], dst[0])
    # Of what several ranks hold, a rank writes its share of the layers.
    layers = [
        layer
        for i in plan.intervals
        if (i.layer_group, i.view) == (0, 0)
        for layer in range(i.layer_begin, i.layer_end)
    ]
    if transfer.fragments <= MOST_RUNS:
        runs["request"] = lambda: plan.instantiate(src, dst, tokens)
        runs["numpy"] = lambda: plain_numpy(*halves, layers, case.tokens, case.src.kind)
    loop_tokens = min(case.tokens, LOOP_TOKENS)
    runs["loop"] = lambda: per_block_loop(*halves, layers, loop_tokens, case.src.kind)
    slow = {"loop": 1} if case.tokens > LOOP_TOKENS else {}
    times = interleaved({name: timed(run) for name, run in runs.items() if name not in slow}, rounds)
    times |= interleaved({name: timed(runs[name]) for name in slow}, 1)
    # The loop is linear in tokens: a long prompt is extrapolated.
    times["loop"] *= case.tokens / loop_tokens
    return report(case, times, len(plans), transfer.fragments, transfer.nbytes)


def report(case: Case, times: dict[str, float], peers: int, fragments: int, nbytes: int) -> list[Row]:
    """Milliseconds, with the baselines."""
    name, loop = case.name, times["loop"]
    rows = [
        figure(f"{name}: plans of a rank for {peers} peers", times["plan"], "ms"),
        below(f"{name}: plan of a peer", times["plan"] / peers, "ms", BUILD_AIM_MS),
        against(f"{name}: request, factored", times["factored"], loop, None),
    ]
    if "request" in times:
        rows.append(against(f"{name}: request, every run", times["request"], loop, case.aim_ms))
        rows.append(against(f"{name}: request, every run / numpy", times["request"], times["numpy"], None))
    rows.append(figure(f"{name}: runs", fragments, "runs"))
    rows.append(figure(f"{name}: bytes", nbytes / 2**20, "MiB"))
    # Source and destination address here (lengths are shared when equal), two Nx3 arrays in the agent.
    rows.append(figure(f"{name}: memory of the runs", fragments * (24 + 48) / 2**20, "MiB"))
    return rows


def against(name: str, value: float, baseline: float, aim_ms: float | None) -> Row:
    """`ratio`: how many times faster than the baseline."""
    aim, ok = ("", None) if aim_ms is None else (f"< {aim_ms:g} ms", value < aim_ms)
    return Row(name, value, "ms", baseline, baseline / value, aim, ok)


def build(context: InstanceInfo, generation: InstanceInfo) -> tuple[PeerPlan, ...]:
    """Everything a rank does when it meets a peer instance, nothing remembered: checks, election, runs."""
    relation.forget_all()
    storage_check.forget_all()
    return build_rank_plans(context.ranks[0], generation, context.ranks)


def lists(case: Case, rank: RankInfo, seed: int) -> dict[int, np.ndarray[tuple[int], np.dtype[np.int32]]]:
    """Blocks of the prompt, permuted; one slot of a recurrent group."""
    rng = np.random.default_rng(seed)
    found: dict[int, np.ndarray[tuple[int], np.dtype[np.int32]]] = {}
    for number, group in enumerate(rank.page_table.groups):
        if isinstance(group, AttentionGroup):
            count = -(-case.tokens // group.tokens_per_block)
            found[number] = rng.permutation(rank.page_table.num_blocks(number))[:count].astype(np.int32)
        else:
            found[number] = np.array([3], np.int32)
    return found


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """CPU milliseconds of one call, after one that is not counted: the case before has left the caches to others."""

    def once() -> float:
        run()
        began = time.thread_time()
        run()
        return (time.thread_time() - began) * 1e3

    return once


if __name__ == "__main__":
    main()

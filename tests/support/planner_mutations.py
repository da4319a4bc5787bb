"""Breaks the planner on purpose, one way at a time, and demands that the oracle notices.

`python tests/support/planner_mutations.py` runs all of them.

Each mutation replaces one piece of source text in a copy of `kvtransfer`; a piece that does not occur exactly once is
an error, so that the list follows the code. An exit status of `run_oracle_case.FAILED` means: caught by a case.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import kvtransfer
from run_oracle_case import FAILED

CASES = 200
PACKAGE = Path(kvtransfer.__file__).parent
SUPPORT = Path(__file__).parent


@dataclass(frozen=True)
class Mutation:
    """`old` occurs once in `file`."""

    name: str
    file: str
    old: str
    new: str


MUTATIONS = (
    Mutation(
        "tp and cp swapped in the flat rank",
        "rank_info.py",
        "self.tp_rank * self.cp_size + self.cp_rank",
        "self.cp_rank * self.tp_size + self.tp_rank",
    ),
    Mutation(
        "head off by one",
        "mappers/nhd.py",
        "src_bits=(pairs.lo - pairs.src.lo) * bits",
        "src_bits=(pairs.lo - pairs.src.lo - (pairs.lo > pairs.src.lo)) * bits",
    ),
    Mutation(
        "head counted from the peer's first",
        "mappers/hnd.py",
        "dst_bits=(head - heads.dst.lo)",
        "dst_bits=(head - heads.src.lo)",
    ),
    Mutation("one writer too many", "election.py", "return atoms.take(order[first + turn % replicas])", "return atoms"),
    Mutation("layer left out of the election", "election.py", "turn + dst.layer[row] +", "turn +"),
    Mutation(
        "section border shifted",
        "holdings.py",
        "offset += section.nbytes",
        "offset += section.nbytes + section.unit_bytes",
    ),
    Mutation(
        "layers found by the average size",
        "holdings.py",
        "base + local * stride + offset",
        "base + local * stride + offset.mean().astype(np.int64)",
    ),
    Mutation("source phase ignored", "instantiate.py", "(rest.src_phase * one.src_step >> 3)", "0"),
    Mutation("destination phase ignored", "instantiate.py", "(rest.dst_phase * one.dst_step >> 3)", "0"),
    Mutation(
        "window one token short", "windows.py", "prompt - group.sliding_window + 1", "prompt - group.sliding_window + 2"
    ),
    Mutation(
        "middle chunks send partial blocks",
        "windows.py",
        "return src.position(local // block * block, prompt)",
        "return position",
    ),
    Mutation(
        "window sent with every chunk",
        "windows.py",
        "if not chunk.is_last:\n            return NOTHING\n        seen",
        "seen",
    ),
    Mutation(
        "zigzag without the way back",
        "sharding.py",
        "return (2 * self.count - 1 - self.index) * size",
        "return (self.count + self.index) * size",
    ),
    Mutation(
        "shards rounded down",
        "sharding.py",
        "return grain * -(-prompt // (pieces * grain))",
        "return grain * max(1, prompt // (pieces * grain))",
    ),
    Mutation(
        "registered regions ignored",
        "buffer_pairs.py",
        "return np.where(end <= ends[found], found, -1)",
        "return found * 0",
    ),
    Mutation(
        "reused prefix of the destination ignored",
        "instantiate.py",
        "return max(chunk.prompt.begin, (begins or {}).get(group, 0))",
        "return chunk.prompt.begin",
    ),
    Mutation("unwanted blocks written", "instantiate.py", "wanted = dst != NO_BLOCK", "wanted = dst != NO_BLOCK - 1"),
    Mutation(
        "blocks joined by the source alone",
        "instantiate.py",
        "(full.src[1:] - full.src[:-1] != 1) | (full.dst[1:] - full.dst[:-1] != 1)",
        "full.src[1:] - full.src[:-1] != 1",
    ),
    Mutation(
        "token step of the other layout",
        "mappers/convert.py",
        "dst_step=(heads.dst.hi - heads.dst.lo) * dst_step",
        "dst_step=(heads.src.hi - heads.src.lo) * dst_step",
    ),
    Mutation(
        "last block rounded to the larger side",
        "pieces.py",
        "end = min(-(-end // src_block)",
        "end = max(-(-end // src_block)",
    ),
    Mutation(
        "k and v in the wrong order",
        "buffer_pairs.py",
        "left = _side(src, atoms.src_row[which], a[which] + nth, tables[0])",
        "left = _side(src, atoms.src_row[which], a[which] + src.count[atoms.src_row][which] - 1 - nth, tables[0])",
    ),
    Mutation(
        "second rows of a state forgotten",
        "mappers/sectioned.py",
        "expand(np.zeros_like(pairs.src.tokens), pairs.src.tokens)",
        "expand(np.zeros_like(pairs.src.tokens), np.ones_like(pairs.src.tokens))",
    ),
    Mutation(
        "layers that are not there reported",
        "peer_plan.py",
        "layer[1:] - layer[:-1] <= 1",
        "layer[1:] - layer[:-1] <= 2",
    ),
    Mutation(
        "packed by block, not in the order of the destination",
        "packed.py",
        "token_major = np.outer(row, pieces.begin + pieces.before) + prefix[:, None]",
        "token_major = np.outer(row, pieces.begin + pieces.before)[:, ::-1] + prefix[:, None]",
    ),
    Mutation(
        "complete before everything is there",
        "manifest.py",
        "self._missing -= sum(area(extent) for extent in fresh)",
        "self._missing = max(0, self._missing - sum(area(extent) + 1 for extent in fresh))",
    ),
)


def mutate(mutation: Mutation | None, folder: Path) -> None:
    """A copy of the package in `folder`, with one mutation."""
    shutil.copytree(PACKAGE, folder / "kvtransfer", ignore=shutil.ignore_patterns("__pycache__"))
    if mutation is None:
        return
    file = folder / "kvtransfer" / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise LookupError(
            f"{mutation.name}: {mutation.old!r} occurs {text.count(mutation.old)} times in {mutation.file}"
        )
    file.write_text(text.replace(mutation.old, mutation.new))


def first_failure(mutation: Mutation | None, cases: int = CASES) -> str | None:
    """What the oracle says first about a planner with this mutation, None when all cases pass."""
    with tempfile.TemporaryDirectory() as folder:
        mutate(mutation, Path(folder))
        environment = dict(
            os.environ, PYTHONPATH=f"{folder}:{SUPPORT}", OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1"
        )
        command = [sys.executable, str(SUPPORT / "run_oracle_case.py"), "0", str(cases), "--first"]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, FAILED):
        raise RuntimeError(f"{mutation}: the cases did not run: {done.stderr[-2000:]}")
    return done.stdout.splitlines()[-1] if done.returncode == FAILED else None


def main() -> int:
    """Exit status 1 when a mutation survives, or when the planner fails without one."""
    print(f"unchanged: {first_failure(None) or 'passes'}")
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(first_failure, MUTATIONS))
    for mutation, problem in zip(MUTATIONS, found, strict=True):
        print(f"{'caught  ' if problem else 'SURVIVED'}  {mutation.name}: {(problem or '')[:140]}")
    survived = sum(problem is None for problem in found)
    print(f"{len(found) - survived} of {len(found)} mutations caught")
    return 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())

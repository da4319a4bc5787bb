"""Runs schedules of the hand-off; one that fails is shown as the smallest one that fails in the same way.

python -m handoff_sim --seed N                                              repeat this one
python -m handoff_sim --first N --schedules 1000000 --workers 64            as many as that, on so many processes
python -m handoff_sim --first N --seconds 3600                              for an hour; seeds from N on
python -m handoff_sim --bugs 2000                                           plant every bug
"""

from __future__ import annotations

import argparse
import sys

from . import campaign
from .plans import plans_made_once
from .shrink import explain


def main() -> int:
    """Exit status 1 when something fails."""
    parser = argparse.ArgumentParser(
        prog="handoff_sim", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, help="repeat this one")
    parser.add_argument("--bugs", type=int, metavar="LIMIT", help="plant every bug; schedules that each may survive")
    parser.add_argument("--first", type=int, default=0, help="first seed of a campaign")
    parser.add_argument("--seconds", type=float, help="length of a campaign; without --schedules: 240")
    parser.add_argument("--schedules", type=float, default=float("inf"), help="end of a campaign")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0: as many as there are cores")
    parser.add_argument("--report", type=float, default=30.0, metavar="S", help="a line of progress so often")
    chosen = parser.parse_args()
    if chosen.seconds is None:
        chosen.seconds = 240.0 if chosen.schedules == float("inf") else float("inf")
    if chosen.bugs is not None:
        found = campaign.hunt(chosen.first, chosen.bugs, chosen.workers)
        print(campaign.table(found))
        return int(not all(problem for _, problem in found.values()))
    failed: int | None = chosen.seed
    if failed is None:
        result = campaign.run(
            chosen.first,
            seconds=chosen.seconds,
            schedules=chosen.schedules,
            workers=chosen.workers,
            told=campaign.every(chosen.report, lambda so_far: print(so_far, flush=True)),
        )
        print(result)
        print("\n".join(["not met:", *(result.coverage.missing() or ["nothing: all that can meet has met"])]))
        if not result.failures:
            return 0
        failed = min(result.failures)[0]
    with plans_made_once():
        told = explain(failed)
    print(told or f"seed {failed} holds")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())

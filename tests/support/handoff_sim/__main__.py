"""`python -m handoff_sim --seed N` repeats a schedule and shows the smallest one that fails in the same way."""

from __future__ import annotations

import argparse
import sys

from . import campaign
from .plans import plans_made_once
from .shrink import explain


def main() -> int:
    """Exit status 1 when something fails."""
    parser = argparse.ArgumentParser(prog="handoff_sim", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeat this one")
    parser.add_argument("--bugs", type=int, metavar="LIMIT", help="plant every bug; schedules that each may survive")
    parser.add_argument("--first", type=int, default=0, help="first seed of a campaign")
    parser.add_argument("--seconds", type=float, default=240.0, help="length of a campaign")
    parser.add_argument("--schedules", type=float, default=float("inf"), help="end of a campaign")
    chosen = parser.parse_args()
    if chosen.bugs is not None:
        found = campaign.hunt(chosen.first, chosen.bugs)
        print(campaign.table(found))
        return int(not all(problem for _, problem in found.values()))
    failed: int | None = chosen.seed
    if failed is None:
        result = campaign.run(chosen.first, seconds=chosen.seconds, schedules=chosen.schedules)
        print(result)
        print("\n".join(["not met:", *result.coverage.missing()]))
        if not result.failures:
            return 0
        failed = min(result.failures)[0]
    with plans_made_once():
        told = explain(failed)
    print(told or f"seed {failed} holds")
    return 1 if told else 0


if __name__ == "__main__":
    sys.exit(main())

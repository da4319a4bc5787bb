"""Checks drawn cases by seed: `python tests/support/run_oracle_case.py SEED [COUNT] [--first]`.

One case is described, several are summed up. Exit status 0 when all pass, FAILED when one does not.
"""

from __future__ import annotations

import argparse
import sys

from kv_oracle.check import CaseFailed, check_case
from kv_oracle.coverage import Coverage
from kv_oracle.draw import seeded_case
from kv_oracle.request import describe

FAILED = 3  # not 1, which is also what an import that fails gives


def main() -> int:
    """Runs the cases that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("seed", type=int)
    parser.add_argument("count", type=int, nargs="?", default=1)
    parser.add_argument("--first", action="store_true", help="stop at the first failure")
    options = parser.parse_args()
    coverage, failed = Coverage(), 0
    for seed in range(options.seed, options.seed + options.count):
        case = seeded_case(seed)
        if options.count == 1:
            print(describe(case))
        try:
            coverage.add(check_case(case, other_forms=True, digests=options.count == 1 or seed % 8 == 0))
        except CaseFailed as problem:
            failed += 1
            print(f"seed {seed}: {problem.problem}")
            if options.first:
                return FAILED
    if options.count > 1:
        print(coverage.table())
    print(f"{failed} of {options.count} failed")
    return FAILED if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""What a hand-off costs the processors of both sides, and how that grows with tokens, layers and ranks.

    python benchmarks/transfer_growth.py [--quick] [--json FILE] [--plot FOLDER]

Processor time of all threads of the two processes of a pair (transfer_pair.py), from the request until the cache is
there, verification left out; the copy itself is in it, since CMA copies in the writer's kernel. More ranks: each pair
of ranks is a hand-off of its own with its share of the heads, so that a rank of TP8 is measured with an eighth of them.
"""

from __future__ import annotations

import os
import platform
import statistics
import sys
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

# A rank's thread sleeps when nothing is to be done; one that looks all the time would be all that is seen.
os.environ["PAIR_SPIN"] = "0"

from bar_plot import draw
from report import Row, argument_parser, figure, show
from transfer_cases import CASES, HEAD_BYTES, Case, Side
from transfer_half import Setting
from transfer_pair import Pair

ROUNDS = 15
COLOURS = {"context": "#5b8def", "generation": "#2e9e6b"}
TOKENS, LAYERS, HEADS = (512, 2048, 8192), (8, 32, 80), (8, 4, 1)
USUAL = (2048, 16, 8)


def measure(case: Case, tokens: int, rounds: int) -> tuple[float, float]:
    """Microseconds of processor time of a hand-off: context side, generation side. Medians."""
    nbytes = 2 * case.layers * case.moved_heads * HEAD_BYTES * tokens
    pair = Pair(case, nbytes, (None, None), 64 << 20)
    seen: list[list[float]] = []
    try:
        for number in range(rounds + 2):
            pair.run(Setting("cost"))
            if number >= 2:
                seen.append(pair.processor)
    finally:
        pair.close()
    context, generation = (statistics.median(side) * 1e6 for side in zip(*seen, strict=True))
    return context, generation


def cases(kind: str) -> dict[str, list[tuple[str, Case, int]]]:
    """What grows, and its points: (name, case, tokens)."""
    (base,) = [one for one in CASES if one.name == kind]
    tokens, layers, heads = USUAL

    def made(layers: int, heads: int) -> Case:
        few = {"layers": layers, "moved_heads": heads}
        if kind == "permuted, slot-major":
            return replace(base, src=Side(order="slot", heads=heads), dst=Side(order="slot", heads=heads), **few)
        # Two ranks of the source feed one of the destination, which has twice the heads.
        return replace(base, src=replace(base.src, heads=heads), dst=replace(base.dst, heads=2 * heads), **few)

    return {
        "tokens": [(f"{one:,} tokens", made(layers, heads), one) for one in TOKENS],
        "layers": [(f"{one} layers", made(one, heads), tokens) for one in LAYERS],
        "ranks": [(f"TP{HEADS[0] // one}", made(layers, one), tokens) for one in HEADS],
    }


def main() -> int:
    """The command."""
    parser = argument_parser(__doc__)
    parser.add_argument("--plot", type=Path, metavar="FOLDER", help="draw the SVG files there")
    options = parser.parse_args()
    rows: list[Row] = []
    for kind in ("permuted, slot-major", "HND, TP2 to TP1"):
        for what, points in cases(kind).items():
            bars: dict[str, dict[str, float]] = {}
            for name, case, tokens in points[:: 2 if options.quick else 1]:
                context, generation = measure(case, tokens, 3 if options.quick else ROUNDS)
                bars[name] = {"context": context, "generation": generation}
                rows += [figure(f"{kind}, {name}: {side}", value, "us") for side, value in bars[name].items()]
            if options.plot is not None:
                title = f"{kind}: processor time of a hand-off, microseconds, by {what}"
                file = options.plot / f"transfer-{kind.split(',')[0].lower()}-{what}.svg"
                draw(title, bars, "", file, COLOURS)
    machine = f"{os.cpu_count()} cores, Python {platform.python_version()}, numpy {version('numpy')}"
    show(f"processor time of a hand-off, {machine}", rows, options.json)
    return 0


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    # NIXL's libraries do not leave in good order.
    os._exit(code)

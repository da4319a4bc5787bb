"""From single requests to the figures people compare."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from isthmus_client.load.measure import Measured

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Targets:
    """Service levels, in seconds; None: none."""

    first_token: float | None = None
    per_token: float | None = None

    def met(self, one: Measured) -> bool:
        """True when a request kept every target."""
        return (
            not one.error
            and (self.first_token is None or one.first_token <= self.first_token)
            and (self.per_token is None or one.per_token <= self.per_token)
        )


def percentile(values: Sequence[float], share: float) -> float:
    """Nearest rank; 0 for nothing."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -(-len(ordered) * int(share * 10) // 1000) - 1))]


def summarise(measured: Sequence[Measured], targets: Targets) -> dict[str, Any]:
    """Plain numbers: seconds, tokens, rates a second. `attainment`: share of all requests that met the targets;
    `goodput`: those a second."""
    good = [one for one in measured if not one.error]
    begin = min((one.sent for one in measured), default=0.0)
    end = max((one.sent + one.total for one in good), default=begin)
    span = max(end - begin, 1e-9)
    kept = sum(targets.met(one) for one in measured)
    times: dict[str, list[float]] = {
        "ttft": [one.first_token for one in good],
        "tpot": [one.per_token for one in good if one.output_tokens > 1],
        "itl": [gap for one in good for gap in one.gaps],
        "latency": [one.total for one in good],
    }
    return {
        "requests": len(measured),
        "failed": len(measured) - len(good),
        "errors": dict(Counter(one.error.partition(":")[0] for one in measured if one.error)),
        "seconds": span,
        "requests_per_s": len(good) / span,
        "prompt_tokens_per_s": sum(one.prompt_tokens for one in good) / span,
        "output_tokens_per_s": sum(one.output_tokens for one in good) / span,
        "attainment": kept / len(measured) if measured else 0.0,
        "goodput": kept / span,
        **{
            name: {f"p{share}": percentile(values, share) for share in PERCENTILES}
            | {"mean": sum(values) / len(values) if values else 0.0}
            for name, values in times.items()
        },
    }

"""Which ranks of two instances hold parts of the same cache.

Equal topologies only: rank r holds the same layers and heads on both sides, so it meets rank r and nobody else, and the
election of a writer has one candidate.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.errors import PlanError

if TYPE_CHECKING:
    from kvtransfer.rank_info import Topology


def destination_ranks(writer: Topology, peer: Topology) -> tuple[int, ...]:
    """Flat ranks of the peer instance that `writer` must write to. `peer`: topology of any of its ranks.

    Raises PlanError when the sizes differ; `check_compatible` says so with both values before it comes to that.
    """
    if writer.sizes != peer.sizes:
        raise PlanError(f"topologies (pp, tp, cp, dp) {writer.sizes} and {peer.sizes} differ")
    return (writer.flat_rank,)

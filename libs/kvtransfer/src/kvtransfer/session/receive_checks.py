"""Questions about one receive that need nothing but values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.errors import ManifestError, PlanError
from kvtransfer.ports import WriterOutcome

if TYPE_CHECKING:
    from collections.abc import Sequence

    from kvtransfer.manifest import Manifest
    from kvtransfer.messages import TransferLimits
    from kvtransfer.peer_plan import PeerPlan
    from kvtransfer.ports import ReceiveRequest, TransferNotice


def check_request(
    request: ReceiveRequest, limits: TransferLimits, plans: Sequence[PeerPlan], open_requests: int
) -> None:
    """Raises PlanError when the holder could not serve the request: ranks, block lists, limits. `plans`: from the
    holder's attention-dp group to the request's own."""
    name, group = request.holder.instance_id, request.holder.dp_rank
    if not plans:
        text = f"attention-dp group {group} of instance {name} writes nothing to group {request.dp_rank} of this one"
        raise PlanError(f"{text}: one of the two does not exist")
    missing = {blocks.rank for blocks in request.destinations} - {plan.dst_rank for plan in plans}
    if missing:
        raise PlanError(f"nobody of group {group} writes to ranks {sorted(missing)}, not in group {request.dp_rank}")
    for plan in plans:
        lists = {one.layer_group: one.blocks for one in request.destinations if one.rank == plan.dst_rank}
        begins = {one.layer_group: one.begin for one in request.destinations if one.rank == plan.dst_rank}
        plan.check_destination(lists, request.tokens, begins)
    ids = sum(len(one.blocks) for one in request.destinations)
    if ids > limits.max_block_ids:
        raise PlanError(f"{ids} blocks, instance {name} takes at most {limits.max_block_ids} at once")
    if open_requests >= limits.max_open_requests:
        raise PlanError(f"{open_requests} requests are open, instance {name} takes {limits.max_open_requests}")


def take_notice(manifest: Manifest, notice: TransferNotice) -> str:
    """Adds what a writer delivered to the manifest. Says what is wrong with it, empty when nothing is."""
    if notice.outcome is not WriterOutcome.DELIVERED:
        return notice.reason or f"rank {notice.src_rank} did not write everything"
    try:
        manifest.add(notice.src_rank, notice.dst_rank, notice.extents)
    except ManifestError as error:
        return str(error)
    return ""

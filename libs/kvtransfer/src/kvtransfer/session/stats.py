"""What several writers, or several chunks of one writer, have cost together."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.ports import TransferStats

if TYPE_CHECKING:
    from collections.abc import Sequence

# Reasons that a sum names.
_WHYS = 4


def total_stats(parts: Sequence[TransferStats]) -> TransferStats:
    """Sums of bytes and descriptors, maxima of times, every path that was used."""
    if len(parts) == 1:
        return parts[0]
    return TransferStats(
        bytes=sum(one.bytes for one in parts),
        descriptors=sum(one.descriptors for one in parts),
        path=", ".join(sorted({one.path for one in parts if one.path})),
        queue=max((one.queue for one in parts), default=0.0),
        plan=max((one.plan for one in parts), default=0.0),
        post=max((one.post for one in parts), default=0.0),
        wire=max((one.wire for one in parts), default=0.0),
        bounced=sum(one.bounced for one in parts),
        predicted=max((one.predicted for one in parts), default=0.0),
        credit=max((one.credit for one in parts), default=0.0),
        gather=max((one.gather for one in parts), default=0.0),
        scatter=max((one.scatter for one in parts), default=0.0),
        why="; ".join(sorted({one.why for one in parts if one.why})[:_WHYS]),
    )

"""One of every message that a peer may say, and what they are made of."""

from __future__ import annotations

import numpy as np

from kv_storage import LAYOUTS, Shape, Storage, instance, rank_info
from kvtransfer.messages import (
    Bind,
    Cancel,
    Capability,
    ExitReport,
    FenceWriter,
    FirstTokens,
    Goodbye,
    Hello,
    KvIntent,
    NotBound,
    Ping,
    Pong,
    ReceiveKey,
    Reconcile,
    ReconcileReply,
    Reject,
    TransferLimits,
    Welcome,
)
from kvtransfer.ports import (
    Extent,
    Incompatibility,
    RankBlocks,
    RequestKey,
    TokenRange,
    TraceContext,
    TransferNotice,
    TransferStats,
    WriterOutcome,
)

KEY = RequestKey(1 << 40, 3)
TRACE = TraceContext(bytes(range(16)), bytes(range(8)), 1)
SOME_ID, OTHER_ID = b"i" * 16, b"j" * 16
INSTANCE = instance(
    *(rank_info(Storage(Shape(), LAYOUTS[r], 6, 1).page_table(), r, 2) for r in (0, 1)), incarnation=SOME_ID
)
NOTICE = TransferNotice(
    KEY,
    1,
    2,
    WriterOutcome.DELIVERED,
    (Extent(0, 1, TokenRange(0, 70), 3, 9),),
    "because",
    TransferStats(123, 4, "nixl/ucx cma", 0.5, 1e-6, 0.25, 2.125),
    receive=1 << 50,
)
REASON = Incompatibility("field", "a", "b", "make them equal")
LIMITS = TransferLimits(10, 1000)
BLOCKS = (
    RankBlocks(0, 0, np.array([5, -1, 2**31 - 1], np.int32), begin=7),
    RankBlocks(1, 0, np.array([], np.int32)),
)
BODIES = [
    Hello(1, 1, frozenset({Capability.RECONCILE}), LIMITS, ("future",), INSTANCE, 7),
    Welcome(1, frozenset(), LIMITS, INSTANCE, b"d" * 16, 7),
    Reject((REASON, REASON)),
    NOTICE,
    Cancel(KEY, 7),
    Reconcile((ReceiveKey(KEY, 1), ReceiveKey(RequestKey((1 << 63) - 1), 1 << 40))),
    ReconcileReply((ReceiveKey(KEY, 3),), (NOTICE,)),
    FenceWriter((ReceiveKey(KEY, 1),), "silent"),
    ExitReport((0, 3), "signal 9"),
    Goodbye("asked to stop"),
    KvIntent(KEY, TRACE),
    KvIntent(KEY),
    Bind(KEY, 2),
    NotBound(KEY, "aborted"),
    FirstTokens(KEY, b"opaque"),
    Ping(2**64 - 1),
    Pong(0),
]


def same_blocks(left: tuple[RankBlocks, ...], right: tuple[RankBlocks, ...]) -> bool:
    def plain(lists: tuple[RankBlocks, ...]):
        return [(one.rank, one.layer_group, one.begin, one.blocks.tolist(), one.blocks.dtype) for one in lists]

    return plain(left) == plain(right)

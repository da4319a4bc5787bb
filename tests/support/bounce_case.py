"""Pairs of storages of different layouts for tests of the bounced way: what a part of a chunk must move."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from kv_storage import GUARD, Shape, Storage, rank_info
from kvtransfer import packing
from kvtransfer.peer_plan import build_plan
from kvtransfer.ports import TokenRange

if TYPE_CHECKING:
    from kvtransfer.bounce.copying import Copier

I32 = np.int32
# name: (shape and layout of the source, first head; the same of the destination; tokens)
PAIRS = {
    "equal": ((Shape(), "slot_major", 0), (Shape(), "layer_major", 0), 8),
    "partial block": ((Shape(), "slot_major_gaps", 0), (Shape(), "layer_major", 0), 7),
    "fewer heads": ((Shape(heads=2, unit=16), "slot_major", 0), (Shape(heads=4, unit=16), "layer_major", 0), 11),
    "more heads": ((Shape(heads=4, unit=8), "layer_major", 0), (Shape(heads=2, unit=8), "slot_major_gaps", 2), 12),
    "larger blocks": ((Shape(unit=16), "slot_major", 0), (Shape(unit=16, tokens_per_block=16), "layer_major", 0), 21),
    "odd sizes": ((Shape(heads=3, unit=5), "slot_major", 0), (Shape(heads=3, unit=5), "layer_major", 0), 10),
}
BLOCKS = 8


class BounceCase:
    """Two ranks and one request between them, block lists in no order. `storage`: where their memory is."""

    def __init__(self, name: str, seed: int = 0, storage: type[Storage] = Storage) -> None:
        (shape, layout, head), (other, other_layout, other_head), tokens = PAIRS[name]
        self.src, self.dst = storage(shape, layout, BLOCKS), storage(other, other_layout, BLOCKS)
        rng = np.random.default_rng(seed)
        self.src.memory[:] = rng.integers(0, 256, len(self.src.memory), np.uint8)
        self.plan = build_plan(rank_info(self.src.page_table(head)), rank_info(self.dst.page_table(other_head)))
        self.tokens = TokenRange(0, tokens)
        self.lists = [
            {0: rng.permutation(BLOCKS)[: -(-tokens // one.tokens_per_block)].astype(I32)} for one in (shape, other)
        ]
        self.source = packing.pack_source(self.plan, self.lists[0], self.lists[1], self.tokens)
        self.target = packing.pack_destination(self.plan, self.lists[1], self.tokens)

    def expected(self) -> bytes:
        """The destination after a direct write, by plain copies."""
        pairs = self.plan.instantiate(self.lists[0], self.lists[1], self.tokens)
        after = self.dst.memory.copy()
        begins = (pairs.src - self.src.base + GUARD).tolist(), (pairs.dst - self.dst.base + GUARD).tolist()
        for src, dst, length in zip(*begins, pairs.lengths.tolist(), strict=True):
            after[dst : dst + length] = self.src.memory[src : src + length]
        return after.tobytes()

    def bounce(self, copier: Copier, parts: int) -> bytes:
        """The destination after the packed bytes went through a chunk, in `parts` parts cut at any byte."""
        cuts = [self.source.nbytes * part // parts for part in range(parts + 1)]
        for begin, end in itertools.pairwise(cuts):
            if begin < end:
                chunk = np.zeros(end - begin, np.uint8)
                at = int(chunk.ctypes.data)
                assert copier.gather(self.source, begin, end, at).done()
                assert copier.scatter(self.target, begin, end, at).done()
        return self.dst.memory.tobytes()

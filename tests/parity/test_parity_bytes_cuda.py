"""bf16 on a GPU, both sides cut alike: the bytes of the cache are the same in the memory of both processes.

No process can look into another one's device memory: each rank writes its pages to a third rank, in the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from engine_pair import EnginePair
from engine_process import EngineUnderTest, Settings, engines
from isthmus_core.keys import RequestKey
from kvtransfer.agents import make_agent
from kvtransfer.page_table import PageTable
from kvtransfer.ports import (
    LoadPeer,
    PeerLoaded,
    RankBlocks,
    ReceiveRequest,
    TokenRange,
    TransferNotice,
    WriteOrder,
    WriterOutcome,
)
from kvtransfer.rank_info import InstanceInfo, InstanceRole, Topology
from kvtransfer.transceiver.rank import RankTransceiver
from parity_models import llama as make_llama

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.integration,
    pytest.mark.timeout(300),
]
# The last block of a prompt is whole, partly filled, and holds one token.
LENGTHS = (16, 75, 145)
BLOCK, BLOCKS = 16, 64


class Reader:
    """A rank with a cache like that of an engine, in this process; what is written there can be looked at."""

    def __init__(self, like: PageTable, pair: EnginePair) -> None:
        (region,) = like.regions
        self.memory = torch.zeros(region.size_bytes, dtype=torch.uint8, device="cuda:0")
        shift = self.memory.data_ptr() - region.base_address
        table = replace(
            like,
            regions=(replace(region, base_address=self.memory.data_ptr()),),
            pools=tuple(replace(one, base_address=one.base_address + shift) for one in like.pools),
        )
        self._rank = RankTransceiver(table, 0, Topology(), make_agent("nixl", "reader"), [].append)
        self._rank.start()
        role = InstanceRole.GENERATION
        self.info = InstanceInfo("reader", b"r" * 16, "127.0.0.1:3", role, pair.peer.model, (self._rank.info,))
        self._number = 1 << 41
        for engine in (pair.context, pair.generation):
            engine.order(LoadPeer(self.info))
            loaded = engine.rank_event()
            assert isinstance(loaded, PeerLoaded)
            assert not loaded.incompatibilities

    def read(self, engine: EngineUnderTest, pages: tuple[RankBlocks, ...], tokens: TokenRange) -> torch.Tensor:
        """A copy of this memory after the engine's rank has written these tokens, and nothing else, into it."""
        self.memory.zero_()
        torch.cuda.synchronize()
        self._number += 1
        target = (RankBlocks(0, 0, np.arange(len(pages[0].blocks), dtype=np.int32)),)
        who = self.info.instance_id, self.info.incarnation
        engine.order(WriteOrder(RequestKey(self._number), *who, tokens, pages, target))
        notice = engine.rank_event()
        assert isinstance(notice, TransferNotice)
        assert notice.outcome is WriterOutcome.DELIVERED, notice.reason
        torch.cuda.synchronize()
        return self.memory.clone()


@pytest.fixture(name="pair", scope="module", params=["block_table", "radix"])
def _pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnginePair]:
    engine: dict[str, Any] = {"kind": "torch", "device": "cuda:0", "num_blocks": BLOCKS, "max_batch_tokens": 96}
    config: Settings = {
        "engine": {**engine, "prefix_caching": False, "attention": "sdpa"},
        "model": {"path": str(make_llama(tmp_path_factory.mktemp("models"))), "name": "llama", "dtype": "bfloat16"},
        "cache": {"manager": request.param},
        "logging": {"level": "WARNING"},
    }
    with engines() as make:
        yield EnginePair(make, config)


def test_bytes(pair: EnginePair) -> None:
    reader = Reader(pair.ranks[0].page_table, pair)
    for length in LENGTHS:
        prompt = np.random.default_rng(length).integers(4, 8192, length).tolist()
        leg, offer = pair.prefill(prompt, 16, length)
        pair.generation.send(leg)
        wanted = pair.generation.next_of(ReceiveRequest)
        notice = pair.write(offer, wanted)
        assert notice.outcome is WriterOutcome.DELIVERED, notice.reason
        tokens = TokenRange(0, length)
        sent = reader.read(pair.context, offer.sources, tokens)
        arrived = reader.read(pair.generation, wanted.destinations, tokens)
        # 8 layers, K and V, 4 heads of 32 elements of two bytes: hardly any of these bytes is 0.
        assert int((sent != 0).sum()) > 0.9 * 8 * 2 * 4 * 32 * 2 * length
        assert torch.equal(sent, arrived)
        pair.settle(leg, notice)

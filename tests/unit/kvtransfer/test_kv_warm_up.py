"""A pair is not ready before a write has gone over it: the first request finds a connection that is warm."""

from __future__ import annotations

import pytest

from kv_storage import Shape, Storage, instance
from kvtransfer.agents.loopback import LoopbackAgent, LoopbackFabric
from kvtransfer.bounce.policy import BouncePolicy
from kvtransfer.cost.book import HOST, CostBook
from kvtransfer.ports import LoadPeer, PairProbe, PeerLoaded, RankToHub
from kvtransfer.rank_info import Topology
from kvtransfer.transceiver.probing import SMALL_BYTES, ProbePolicy, host_scratch
from kvtransfer.transceiver.rank import RankTransceiver


@pytest.mark.parametrize("known", [False, True])
def test_the_pair_is_ready_when_bytes_have_gone_over_it(known: bool):
    fabric, events, written = LoopbackFabric(), list[RankToHub](), list[int]()
    book = CostBook(HOST)
    if known:
        book.probed(PairProbe(0, 0, "loopback", 1 << 20, 1e-3, 1e-5, 1e-3, 1e-6))
    (mine, keep), (theirs, also) = host_scratch(), host_scratch()
    agent, storage = LoopbackAgent("c", fabric), Storage(Shape(), "slot_major", 4)
    rank = RankTransceiver(
        storage.page_table(),
        0,
        Topology(),
        agent,
        events.append,
        probing=ProbePolicy(mine),
        bouncing=BouncePolicy(book=book),
    )
    rank.start()
    other = Storage(Shape(), "layer_major", 4)
    peer = RankTransceiver(
        other.page_table(), 0, Topology(), LoopbackAgent("g", fabric), [].append, probing=ProbePolicy(theirs)
    )
    peer.start()
    submit = agent.submit
    agent.submit = lambda pairs, remote: written.append(pairs.nbytes) or submit(pairs, remote)  # type: ignore[method-assign]
    events.clear()
    rank.handle(LoadPeer(instance(peer.info), bounce=True))
    assert events == [], "not ready before anything was written"
    while not events:
        rank.poll()
    (loaded,) = events
    assert isinstance(loaded, PeerLoaded)
    assert not loaded.incompatibilities
    # A path whose costs are known is only warmed up; another one is measured, which takes large writes.
    assert (max(written) <= SMALL_BYTES) is known
    assert book.knows("loopback")
    assert keep.nbytes == also.nbytes

"""Measurements of a pair: which path they prove, how they travel, what they expect; agents that others provide."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

from kv_storage import Shape, Storage, rank_info
from kvtransfer import agents, wire
from kvtransfer.agents.base import AgentCapabilities
from kvtransfer.agents.loopback import LoopbackAgent
from kvtransfer.agents.nixl_env import possible_paths
from kvtransfer.errors import AgentUnavailable, GeometryError
from kvtransfer.page_table import MemoryKind, RegisteredRegion
from kvtransfer.ports import PairProbe, PeerLoaded, PeerProbed, ProbePeer
from kvtransfer.probe_ports import path_matches
from kvtransfer.rank_info import RankInfo
from kvtransfer.transceiver.probing import ProbePolicy, host_scratch, measured_path, network_bytes

PROBE = PairProbe(1, 2, "nixl/ucx cma", 1 << 20, 1e-3, 5e-6, 1e-3, 1e-6, 17)


@pytest.mark.parametrize(
    ("path", "wanted", "fits"),
    [
        ("nixl/ucx cma", "cma", True),
        ("nixl/ucx cma", "nixl/ucx cma", True),
        ("nixl/ucx device memory same host", "device memory", True),
        ("nixl/ucx device memory same host", "memory device", False),
        ("nixl/ucx cma", "cm", False),
        # What UCX_TLS allows is not what was taken.
        ("nixl/ucx tcp (UCX_TLS=tcp,cma)", "cma", False),
        ("nixl/ucx tcp (UCX_TLS=tcp,cma)", "tcp", True),
    ],
)
def test_a_required_path_is_a_run_of_words(path, wanted, fits):
    assert path_matches(path, wanted) is fits


@pytest.mark.parametrize(
    ("named", "sent", "found"),
    [
        ("nixl/ucx cma", 100, "nixl/ucx cma"),
        ("nixl/ucx cma", 1200, "nixl/ucx tcp (found by measuring; the rules say cma)"),
        ("nixl/ucx rdma or tcp", 100, "nixl/ucx rdma"),
        ("nixl/ucx rdma or tcp", 1200, "nixl/ucx rdma or tcp"),
        ("nixl/ucx tcp", 1200, "nixl/ucx tcp"),
    ],
)
def test_the_counters_of_the_interfaces_correct_the_name(named, sent, found):
    assert measured_path(named, 1000, sent) == found


def test_the_counters_can_be_read():
    assert 0 <= network_bytes() <= network_bytes()


def test_what_a_write_takes_follows_from_the_measurement():
    assert PROBE.expected(2 << 20, 11) == pytest.approx(5e-6 + 2e-3 + 10e-6)
    assert PairProbe(0, 0, problem="cable").expected(1, 1) is None


def test_measurements_travel_between_hub_and_rank():
    incarnation = b"i" * 16
    events = (
        PeerProbed(7, (PROBE, PairProbe(0, 3, problem="cable"))),
        PeerLoaded("g", incarnation, plan_digest=b"d", probes=(PROBE,)),
    )
    assert wire.rank_output_from_bytes(wire.rank_output_to_bytes(events)) == events
    commands = (ProbePeer(7, "g", incarnation, 4096),)
    assert wire.rank_input_from_bytes(wire.rank_input_to_bytes(commands)) == commands


def test_scratch_memory_travels_and_must_not_touch_the_cache():
    storage = Storage(Shape(), "slot_major", 2)
    info, (scratch, keep) = rank_info(storage.page_table()), host_scratch(4096)
    assert len(keep) == 4096
    both = RankInfo(0, info.topology, info.page_table, info.agent, scratch=scratch)
    assert wire.rank_info_from_pb(wire.rank_info_to_pb(both)) == both
    assert both.regions == (*info.page_table.regions, scratch)
    inside = RegisteredRegion(storage.base, 16, MemoryKind.DRAM)
    with pytest.raises(GeometryError, match="scratch"):
        RankInfo(0, info.topology, info.page_table, info.agent, scratch=inside)


def test_a_path_that_can_never_be_taken_is_refused_with_those_that_can():
    can = AgentCapabilities("nixl_cu12 1.5.1", frozenset(), possible_paths("tcp,self", rdma=False, device_memory=False))
    with pytest.raises(AgentUnavailable, match=r"require_path = cma: nixl_cu12 1.5.1 can only take nixl/ucx tcp here"):
        ProbePolicy(require_path="cma").check_possible(can)
    ProbePolicy(require_path="tcp").check_possible(can)
    assert "nixl/ucx cma" in possible_paths("", rdma=False, device_memory=False)


def test_agents_of_others_are_found_by_their_entry_point(monkeypatch):
    theirs = EntryPoint("memory", "kvtransfer.agents.loopback:LoopbackAgent", agents.ENTRY_POINT_GROUP)

    def entry_points(*, group: str, name: str | None = None) -> list[EntryPoint]:
        return [theirs] if group == agents.ENTRY_POINT_GROUP and name in (None, "memory") else []

    monkeypatch.setattr(agents, "entry_points", entry_points)
    assert agents.known_agents() == ("loopback", "memory", "nixl")
    assert isinstance(agents.make_agent("memory", "x"), LoopbackAgent)


class _Cuda:
    """As much of torch.cuda as says how memory was allocated."""

    def memory_snapshot(self) -> list[dict[str, object]]:
        return [{"address": 4096, "total_size": 4096, "is_expandable": True}, {"address": 16384, "total_size": 4096}]


@pytest.mark.parametrize(("address", "shared"), [(4096, False), (8191, False), (8192, True), (16384, True)])
def test_memory_that_can_not_be_shared_is_named_and_refused_where_a_path_is_required(
    address: int, shared: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch, "cuda", _Cuda())
    regions = (RegisteredRegion(address, 1024, MemoryKind.VRAM, 1),)
    ProbePolicy().check_memory(regions)
    assert ("expandable_segments:True" in caplog.text) is not shared
    required = ProbePolicy(require_path="device memory")
    if shared:
        required.check_memory(regions)
    else:
        with pytest.raises(AgentUnavailable, match=r"require_path = device memory: .*expandable segments"):
            required.check_memory(regions)

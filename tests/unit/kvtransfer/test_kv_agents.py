"""The registry, the loopback agent's rules, and what NIXL needs to know about its environment."""

from __future__ import annotations

import os

import numpy as np
import pytest

from kvtransfer.agents import agent_factory, known_agents, make_agent
from kvtransfer.agents.base import RegionIndex, WriteState
from kvtransfer.agents.loopback import LoopbackAgent, LoopbackFabric
from kvtransfer.agents.naming import unique_agent_name
from kvtransfer.agents.nixl_env import (
    Place,
    allowed_transports,
    can_read_process,
    choose_wheel,
    describe_path,
    pack_metadata,
    prepare_environment,
    unpack_metadata,
)
from kvtransfer.errors import AgentError, AgentUnavailable, AgentUnknown, PeerLost
from kvtransfer.page_table import MemoryKind, RegisteredRegion
from kvtransfer.regions import RegionPairs


def region(memory: np.ndarray) -> RegisteredRegion:
    return RegisteredRegion(int(memory.ctypes.data), memory.nbytes, MemoryKind.DRAM)


class Two:
    """Two agents that know each other, 64 bytes each."""

    def __init__(self) -> None:
        self.fabric = LoopbackFabric()
        self.src, self.dst = np.arange(64, dtype=np.uint8), np.zeros(64, np.uint8)
        self.a, self.b = LoopbackAgent("a", self.fabric), LoopbackAgent("b", self.fabric)
        self.a.register([region(self.src)])
        self.b.register([region(self.dst)])
        self.a.load_remote(self.b.descriptor(), [region(self.dst)])

    def pairs(self, at: int = 0, count: int = 64, step: int = 16) -> RegionPairs:
        offsets = np.arange(at, at + count, step, dtype=np.int64)
        return RegionPairs(
            self.src.ctypes.data + offsets, self.dst.ctypes.data + offsets, np.full(len(offsets), step, np.int64)
        )

    def submit(self, pairs: RegionPairs | None = None):
        return self.a.submit(pairs if pairs is not None else self.pairs(), self.b.name)


def test_unknown_backends_are_named_with_the_known_ones():
    with pytest.raises(AgentUnknown, match=r"'nccl', known: loopback, nixl"):
        agent_factory("nccl")
    assert known_agents() == ("loopback", "nixl")
    assert make_agent("loopback", "x").name.startswith("x@")


def test_names_never_repeat():
    names = {unique_agent_name("rank" * 100) for _ in range(100)}
    assert len(names) == 100
    assert max(map(len, names)) <= 256


def test_a_write_lands_after_its_delay_and_not_before():
    two = Two()
    two.a.delay_polls = 2
    write = two.submit()
    for _ in range(2):
        assert two.a.poll(write).state is WriteState.IN_FLIGHT
        assert not two.dst.any()
    with pytest.raises(AgentError, match="not over"):
        two.a.release(write)
    with pytest.raises(AgentError, match="open"):
        two.a.forget_remote(two.b.name)
    with pytest.raises(AgentError, match="open"):
        two.a.close()
    assert two.a.poll(write).state is WriteState.DONE
    np.testing.assert_array_equal(two.dst, two.src)
    two.a.release(write)
    two.a.close()
    assert two.fabric.in_flight == 0


def test_a_released_handle_is_dead():
    two = Two()
    write = two.submit()
    two.a.poll(write)
    two.a.release(write)
    for use in (two.a.poll, two.a.release):
        with pytest.raises(AgentError, match="not an open write"):
            use(write)


def test_failing_half_way():
    two = Two()
    two.a.fail_next("cable")
    write = two.submit()
    status = two.a.poll(write)
    assert (status.state, status.reason, status.peer_lost) == (WriteState.FAILED, "cable", False)
    np.testing.assert_array_equal(two.dst[:32], two.src[:32])
    assert not two.dst[32:].any()
    assert two.a.poll(two.submit()).state is WriteState.DONE


def test_a_dead_peer_fails_the_write_as_lost():
    two = Two()
    write = two.submit()
    two.b.die()
    status = two.a.poll(write)
    assert (status.state, status.peer_lost) == (WriteState.FAILED, True)
    with pytest.raises(PeerLost):
        two.a.load_remote(two.b.descriptor(), [region(two.dst)])


def test_held_writes_land_late_even_after_their_writer_died():
    two = Two()
    two.a.hold = True
    write = two.submit()
    assert two.a.poll(write).state is WriteState.IN_FLIGHT
    two.a.die()
    assert two.fabric.land() == 1
    np.testing.assert_array_equal(two.dst, two.src)


@pytest.mark.parametrize(("at", "count"), [(16, 64), (-16, 32)])
def test_runs_outside_registered_memory_are_refused(at, count):
    two = Two()
    with pytest.raises(AgentError, match="not inside one registered region"):
        two.submit(two.pairs(at, count))
    assert not two.dst.any()


def test_an_unloaded_remote_is_refused():
    two = Two()
    two.a.forget_remote(two.b.name)
    with pytest.raises(AgentError, match="not been loaded"):
        two.submit()


def test_one_transfer_names_one_kind_of_memory():
    both = [RegisteredRegion(4096, 64, MemoryKind.DRAM), RegisteredRegion(8192, 64, MemoryKind.VRAM, 2)]
    index, size = RegionIndex(both, "me"), np.array([8], np.int64)
    for address, kind, device in ((4096, MemoryKind.DRAM, 0), (8192, MemoryKind.VRAM, 2)):
        found, devices = index.devices(np.array([address], np.int64), size)
        assert (found, devices.tolist()) == (kind, [device])
    with pytest.raises(AgentError, match="several kinds"):
        index.devices(np.array([4096, 8192], np.int64), np.array([8, 8], np.int64))
    with pytest.raises(AgentError, match="no memory"):
        RegionIndex([], "me")


def test_devices_come_from_the_region_of_each_run():
    index = RegionIndex(
        [RegisteredRegion(8192, 64, MemoryKind.VRAM, 1), RegisteredRegion(4096, 64, MemoryKind.VRAM, 0)], "me"
    )
    kind, devices = index.devices(np.array([8192, 4096, 8200], np.int64), np.array([8, 64, 56], np.int64))
    assert (kind, devices.tolist()) == (MemoryKind.VRAM, [1, 0, 1])


@pytest.mark.parametrize(
    ("cuda", "installed", "wheel"),
    [
        (None, ("nixl_cu13", "nixl_cu12"), "nixl_cu13"),
        (None, ("nixl_cu12",), "nixl_cu12"),
        ("12.8", ("nixl_cu13", "nixl_cu12"), "nixl_cu12"),
        ("13.0", ("nixl_cu13",), "nixl_cu13"),
    ],
)
def test_the_wheel_follows_torch(cuda, installed, wheel):
    assert choose_wheel(cuda, installed) == wheel


@pytest.mark.parametrize(("cuda", "installed", "say"), [("13.0", ("nixl_cu12",), "nixl-cu13"), (None, (), "nixl-cu12")])
def test_a_missing_wheel_says_what_to_install(cuda, installed, say):
    with pytest.raises(AgentUnavailable, match=rf"pip install .*{say}"):
        choose_wheel(cuda, installed)


@pytest.mark.parametrize("tls", ["sm,self", "cma,self", "self", "^tcp", "rc,self"])
def test_transports_that_can_not_notice_a_dead_peer_are_refused(tls):
    with pytest.raises(AgentUnavailable, match="add tcp"):
        prepare_environment({"UCX_TLS": tls}, rdma=False)


@pytest.mark.parametrize(("tls", "rdma"), [("tcp,self", False), ("all", False), ("^cma", False), ("rc,self", True)])
def test_other_transports_are_accepted(tls, rdma):
    prepare_environment({"UCX_TLS": tls}, rdma)


def test_rdma_modules_are_left_out_only_where_there_is_no_device():
    without: dict[str, str] = {}
    prepare_environment(without, rdma=False)
    assert without["UCX_MODULES"] == "^ib"
    with_device: dict[str, str] = {}
    prepare_environment(with_device, rdma=True)
    assert "UCX_MODULES" not in with_device
    chosen = {"UCX_MODULES": "^rocm"}
    prepare_environment(chosen, rdma=False)
    assert chosen["UCX_MODULES"] == "^rocm"


@pytest.mark.parametrize(
    ("tls", "left"), [("", {"cma", "tcp"}), ("all", {"cma", "tcp"}), ("tcp,self", {"tcp"}), ("^cma", {"tcp"})]
)
def test_ucx_tls_is_read_as_ucx_reads_it(tls, left):
    assert allowed_transports(tls, {"cma", "tcp"}) == left


@pytest.mark.parametrize(
    ("arguments", "path"),
    [
        (("", False, True, True, False), "nixl/ucx cma"),
        (("", False, True, False, False), "nixl/ucx tcp"),
        (("tcp,self", False, True, True, False), "nixl/ucx tcp (UCX_TLS=tcp,self)"),
        (("", False, False, False, False), "nixl/ucx tcp"),
        (("", True, False, False, False), "nixl/ucx rdma or tcp"),
        (("", True, True, False, True), "nixl/ucx device memory same host"),
    ],
)
def test_the_path_names_only_what_is_known(arguments, path):
    assert describe_path(*arguments) == path


def test_metadata_survives_and_damage_is_noticed():
    packed = pack_metadata(Place.here(), b"inner")
    assert unpack_metadata(packed, "a") == (Place.here(), b"inner")
    for damaged in (b"", packed[:20], packed[:-1], packed[:-1] + b"!", b"XXXX" + packed[4:]):
        with pytest.raises(AgentError, match="metadata of agent a"):
            unpack_metadata(damaged, "a")


def test_the_kernel_decides_about_direct_access():
    memory = np.zeros(8, np.uint8)
    assert can_read_process(os.getpid(), int(memory.ctypes.data))
    assert not can_read_process(os.getpid(), 8)
    assert not can_read_process(2**22 + 1, int(memory.ctypes.data))

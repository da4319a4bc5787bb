"""The data plane cut while the control plane lives: ranks in network namespaces of their own, joined by one cable."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.ports import RequestKey, WriterOutcome
from rank_process import KEY, Rank, load, needs_nixl, notice_of, order

# UCX looks for interfaces in /sys, which shows those of the namespace it was mounted in.
HOLDER = ["unshare", "-n", "-m", "sh", "-c", "mount -t sysfs sysfs /sys && exec cat"]
BLOCKS, UNIT = 256, 1 << 13


def _namespaces_work() -> bool:
    if os.geteuid() or not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        return False
    return (
        subprocess.run(
            ["unshare", "-n", "-m", "mount", "-t", "sysfs", "sysfs", "/sys"], capture_output=True, check=False
        ).returncode
        == 0
    )


pytestmark = [
    pytest.mark.integration,
    needs_nixl,
    pytest.mark.skipif(not _namespaces_work(), reason="network namespaces need root, ip, nsenter and unshare"),
]


class Cable:
    """Two network namespaces with one link between them; nothing of the host's own network is touched."""

    def __init__(self) -> None:
        self._holders = [subprocess.Popen(HOLDER, stdin=subprocess.PIPE) for _ in range(2)]
        for holder in self._holders:
            self._entered(holder)
        self.prefixes = [("nsenter", "-t", str(holder.pid), "-n", "-m") for holder in self._holders]
        there = str(self._holders[1].pid)
        self._ip(0, "link", "add", "data0", "type", "veth", "peer", "name", "data1", "netns", there)
        for side in (0, 1):
            self._ip(side, "addr", "add", f"10.77.0.{side + 1}/24", "dev", f"data{side}")
            self._ip(side, "link", "set", "lo", "up")
            self._ip(side, "link", "set", f"data{side}", "up")
        for side in (0, 1):
            self._running(side)

    def _entered(self, holder: subprocess.Popen[bytes]) -> None:
        """The namespaces are ready when the process has become `cat`."""
        while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "cat":
            assert holder.poll() is None
            time.sleep(0.005)

    def _running(self, side: int) -> None:
        """The kernel reports a carrier up to a second late; UCX does not use an interface before."""
        command = [*self.prefixes[side], "cat", f"/sys/class/net/data{side}/operstate"]
        for _ in range(500):
            if subprocess.run(command, check=True, capture_output=True).stdout.strip() == b"up":
                return
            time.sleep(0.02)
        raise AssertionError(f"data{side} has no carrier")

    def _ip(self, side: int, *arguments: str) -> None:
        subprocess.run([*self.prefixes[side], "ip", *arguments], check=True, capture_output=True)

    def cut(self) -> None:
        """Packets are lost from now on; nobody is told."""
        self._ip(0, "link", "set", "data0", "down")

    def mend(self) -> None:
        """They pass again."""
        self._ip(0, "link", "set", "data0", "up")

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.communicate()


@pytest.fixture
def cable() -> Iterator[Cable]:
    made = Cable()
    yield made
    made.close()


@pytest.fixture
def ranks(cable: Cable) -> Iterator[list[Rank]]:
    made = [
        Rank("slot_major", BLOCKS, UNIT, prefix=prefix, UCX_TLS="tcp,self", UCX_NET_DEVICES=f"data{side}")
        for side, prefix in enumerate(cable.prefixes)
    ]
    yield made
    for rank in made:
        rank.process.kill()
        rank.close()


def test_a_cut_data_plane_proves_nothing_and_a_mended_one_goes_on(cable: Cable, ranks: list[Rank]):
    writer, reader = ranks
    writer.info()
    peer = reader.info()
    assert load(writer, peer).incompatibilities == ()
    writer.ask("paint")
    writer.send(order(peer, range(BLOCKS), range(BLOCKS)))
    assert notice_of(writer).outcome is WriterOutcome.DELIVERED
    cable.cut()
    writer.send(order(peer, range(BLOCKS), range(BLOCKS - 1, -1, -1), RequestKey(KEY.request_id + 1)))
    # The control plane (the sockets of the ranks) lives, and must not claim anything about the write.
    assert writer.silent(2.0)
    assert reader.ask("digest")
    cable.mend()
    notice = notice_of(writer)
    assert notice.outcome in (WriterOutcome.DELIVERED, WriterOutcome.QUIESCED)
    assert bool(notice.extents) is (notice.outcome is WriterOutcome.DELIVERED)


def test_a_peer_behind_a_cut_cable_is_refused_with_the_reason(cable: Cable, ranks: list[Rank]):
    writer, reader = ranks
    writer.info()
    peer = reader.info()
    cable.cut()
    (reason,) = load(writer, peer).incompatibilities
    assert "can not be reached" in reason.yours
    # The rank is well: once the cable is mended the pair works.
    cable.mend()
    assert load(writer, peer).incompatibilities == ()
    writer.send(order(peer, [0], [0]))
    assert notice_of(writer).outcome is WriterOutcome.DELIVERED

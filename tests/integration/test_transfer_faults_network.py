"""Planes that are cut: ranks, and whole instances, in network namespaces of their own, joined by cables."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvtransfer.ports import RequestKey, WriterOutcome
from namespaces import Cables, namespaces_work
from rank_process import KEY, Rank, load, needs_nixl, notice_of, order

BLOCKS, UNIT = 256, 1 << 13
SCRIPT = Path(__file__).parents[1] / "support" / "split_networks.py"

pytestmark = [
    pytest.mark.integration,
    needs_nixl,
    pytest.mark.skipif(not namespaces_work(), reason="network namespaces need root, ip, nsenter and unshare"),
]


@pytest.fixture
def cable() -> Iterator[Cables]:
    made = Cables("data")
    yield made
    made.close()


@pytest.fixture
def ranks(cable: Cables) -> Iterator[list[Rank]]:
    made = [
        Rank("slot_major", BLOCKS, UNIT, prefix=prefix, UCX_TLS="tcp,self", UCX_NET_DEVICES=f"data{side}")
        for side, prefix in enumerate(cable.prefixes)
    ]
    yield made
    for rank in made:
        rank.process.kill()
        rank.close()


def test_a_cut_data_plane_proves_nothing_and_a_mended_one_goes_on(cable: Cables, ranks: list[Rank]):
    writer, reader = ranks
    writer.info()
    peer = reader.info()
    assert load(writer, peer).incompatibilities == ()
    writer.ask("paint")
    writer.send(order(peer, range(BLOCKS), range(BLOCKS)))
    assert notice_of(writer).outcome is WriterOutcome.DELIVERED
    cable.cut("data")
    writer.send(order(peer, range(BLOCKS), range(BLOCKS - 1, -1, -1), RequestKey(KEY.request_id + 1)))
    # The control plane (the sockets of the ranks) lives, and must not claim anything about the write.
    assert writer.silent(2.0)
    assert reader.ask("digest")
    cable.mend("data")
    notice = notice_of(writer)
    assert notice.outcome in (WriterOutcome.DELIVERED, WriterOutcome.QUIESCED)
    assert bool(notice.extents) is (notice.outcome is WriterOutcome.DELIVERED)


def test_a_peer_behind_a_cut_cable_is_refused_with_the_reason(cable: Cables, ranks: list[Rank]):
    writer, reader = ranks
    writer.info()
    peer = reader.info()
    cable.cut("data")
    (reason,) = load(writer, peer).incompatibilities
    assert "can not be reached" in reason.yours
    # The rank is well: once the cable is mended the pair works.
    cable.mend("data")
    assert load(writer, peer).incompatibilities == ()
    writer.send(order(peer, [0], [0]))
    assert notice_of(writer).outcome is WriterOutcome.DELIVERED


@pytest.mark.timeout(150)
def test_control_and_data_plane_are_cut_one_after_the_other(tmp_path: Path):
    """Two worker processes with their hubs, whose two planes go over cables of their own."""
    cables = Cables("api", "control", "data")
    try:
        places = {name: [cables.address(name, side) for side in (0, 1)] for name in ("api", "control", "data")}
        command = [*cables.prefixes[0], sys.executable, str(SCRIPT), str(tmp_path)]
        done = subprocess.run(
            [*command, json.dumps({"prefix": cables.prefixes[1], **places})],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": str(SCRIPT.parent)},
        )
    finally:
        cables.close()
    assert done.returncode == 0, done.stdout + done.stderr

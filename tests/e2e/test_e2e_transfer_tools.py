"""`isthmus sessions`, `plan` and `probe` against a cluster of real processes over NIXL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster import MOCK, assert_idle, running_cluster
from command import isthmus
from isthmus_client.supervisor import LocalCluster


async def answer(*arguments: str) -> Any:
    code, output = await isthmus(*arguments, "--json")
    assert code == 0, output
    return json.loads(output)


def worker(cluster: LocalCluster, role: str) -> str:
    (address,) = (spec.address for spec in cluster.specs if spec.name.startswith(role))
    return address


async def test_people_can_ask_about_a_pair(tmp_path: Path):
    async with running_cluster(MOCK, tmp_path) as cluster:
        context, generation = worker(cluster, "context"), worker(cluster, "generation")
        terms = [(await answer("sessions", one))["peers"] for one in (context, generation)]
        # The negotiated values are the same on both sides.
        assert [len(peers) for peers in terms] == [1, 1]
        assert all(terms[0][0][key] == terms[1][0][key] for key in ("protocol_version", "capabilities", "limits"))
        planned = await answer("plan", "--from", generation, "--to", context, "--tokens", "64")
        assert planned["compatible"]
        (write,) = planned["writes"]
        assert write["path"] == ""
        (measured,) = (await answer("probe", context))["pairs"]
        assert measured["path"].startswith("nixl/ucx"), measured
        assert measured["problem"] == ""
        (known,) = (await answer("plan", "--from", context, "--to", generation, "--tokens", "64"))["writes"]
        assert (known["path"], known["bytes"]) == (measured["path"], write["bytes"])
        code, table = await isthmus("probe", context)
        assert code == 0
        assert "GB/s" in table
        code, message = await isthmus("probe", generation)
        assert code == 1
        assert "FAILED_PRECONDITION" in message
        assert "Traceback" not in message
        await assert_idle(cluster)

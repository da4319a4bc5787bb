"""Every ready pair of a cluster, measured one after the other: a matrix of GB/s."""

from __future__ import annotations

from collections.abc import Sequence

from isthmus.v1 import coordinator_service_pb2, transfer_tools_pb2
from rich.table import Table

from isthmus_client.client import get_cluster
from isthmus_client.transfer import probe_pair, seconds
from isthmus_core.config import TlsConfig
from isthmus_core.errors import IsthmusError


def ready_pairs(cluster: coordinator_service_pb2.GetClusterResponse) -> list[tuple[str, str, str]]:
    """(context id, its endpoint, generation id) of every pair that works, in order."""
    endpoints = {one.instance.instance_id: one.instance.endpoint for one in cluster.members}
    return sorted(
        (pair.context_instance_id, endpoints[pair.context_instance_id], pair.generation_instance_id)
        for pair in cluster.pairs
        if pair.state == coordinator_service_pb2.PAIR_STATE_READY and pair.context_instance_id in endpoints
    )


async def probe_cluster(coordinator: str, nbytes: int, tls: TlsConfig | None) -> list[transfer_tools_pb2.ProbeResponse]:
    """Measures all ready pairs, one at a time so that none slows another. A pair that can not be measured says why.

    Raises IsthmusError when the coordinator does not answer.
    """
    answers: list[transfer_tools_pb2.ProbeResponse] = []
    for context, endpoint, generation in ready_pairs(await get_cluster(coordinator, tls=tls)):
        try:
            answers.append(await probe_pair(endpoint, generation, nbytes, tls=tls))
        except IsthmusError as error:
            problem = transfer_tools_pb2.PairProbe(problem=f"{error.code.name}: {error.message}")
            answers.append(
                transfer_tools_pb2.ProbeResponse(context_id=context, generation_id=generation, pairs=[problem])
            )
    return answers


def rate_text(pairs: Sequence[transfer_tools_pb2.PairProbe]) -> str:
    """The slowest pair of ranks, which is the one that counts, and its path; or the first problem."""
    problems = [one.problem for one in pairs if one.problem]
    if problems or not pairs:
        return problems[0] if problems else "shares no cache"
    rates = [(one.bytes / max(seconds(one.transfer), 1e-9) / 1e9, one.path) for one in pairs]
    rate, path = min(rates)
    return f"{rate:.2f} GB/s\n{path}"


def render_matrix(answers: Sequence[transfer_tools_pb2.ProbeResponse]) -> Table:
    """Context instances down, generation instances across."""
    columns = sorted({one.generation_id for one in answers})
    table = Table(title="context \\ generation", title_justify="left", show_lines=True)
    table.add_column("")
    for name in columns:
        table.add_column(name)
    cells = {(one.context_id, one.generation_id): rate_text(one.pairs) for one in answers}
    for context in sorted({one.context_id for one in answers}):
        table.add_row(context, *(cells.get((context, name), "not ready") for name in columns))
    return table

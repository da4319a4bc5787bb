"""transfer_tools.proto: measurements of a pair."""

from __future__ import annotations

from typing import TYPE_CHECKING

from isthmus.v1 import transfer_ipc_pb2, transfer_tools_pb2

from kvtransfer.probe_ports import PairProbe, PeerProbed, ProbePeer
from kvtransfer.wire._read import MAX_REASON_SENT, incarnation, limited, seconds, text, write_duration
from kvtransfer.wire.common import incompatibilities_to_pb
from kvtransfer.wire.page_tables import MAX_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from kvtransfer.dry_run import DryRun, PlannedWrite

MAX_PAIRS = 1 << 16


def pair_probe_to_pb(probe: PairProbe) -> transfer_tools_pb2.PairProbe:
    """Raises ValueError for negative durations."""
    pb = transfer_tools_pb2.PairProbe(
        src_rank=probe.src_rank,
        dst_rank=probe.dst_rank,
        path=probe.path,
        bytes=probe.bytes,
        network_bytes=probe.network_bytes,
        problem=probe.problem[:MAX_REASON_SENT],
    )
    write_duration(probe.first, pb.first)
    write_duration(probe.next, pb.next)
    write_duration(probe.transfer, pb.transfer)
    write_duration(probe.per_run, pb.per_run)
    return pb


def pair_probes_to_pb(probes: Iterable[PairProbe]) -> list[transfer_tools_pb2.PairProbe]:
    """In order."""
    return [pair_probe_to_pb(probe) for probe in probes]


def pair_probe_from_pb(pb: transfer_tools_pb2.PairProbe, field: str = "pair_probe") -> PairProbe:
    """Raises WireError for negative durations and endless texts."""
    return PairProbe(
        src_rank=pb.src_rank,
        dst_rank=pb.dst_rank,
        path=text(pb.path, f"{field}.path"),
        bytes=pb.bytes,
        first=seconds(pb.first, f"{field}.first"),
        next=seconds(pb.next, f"{field}.next"),
        transfer=seconds(pb.transfer, f"{field}.transfer"),
        per_run=seconds(pb.per_run, f"{field}.per_run"),
        network_bytes=pb.network_bytes,
        problem=text(pb.problem, f"{field}.problem"),
    )


def pair_probes_from_pb(pbs: Sequence[transfer_tools_pb2.PairProbe], field: str) -> tuple[PairProbe, ...]:
    """Raises WireError."""
    limited(pbs, MAX_PAIRS, field)
    return tuple(pair_probe_from_pb(pb, f"{field}[{i}]") for i, pb in enumerate(pbs))


def probe_peer_to_pb(command: ProbePeer) -> transfer_ipc_pb2.ProbePeer:
    """Any command can be sent."""
    return transfer_ipc_pb2.ProbePeer(
        number=command.number,
        instance_id=command.instance_id,
        incarnation=command.incarnation,
        bytes=command.nbytes,
    )


def probe_peer_from_pb(pb: transfer_ipc_pb2.ProbePeer) -> ProbePeer:
    """Raises WireError."""
    instance_id = text(pb.instance_id, "probe.instance_id", MAX_NAME)
    return ProbePeer(pb.number, instance_id, incarnation(pb.incarnation, "probe"), pb.bytes)


def peer_probed_to_pb(event: PeerProbed) -> transfer_ipc_pb2.PeerProbed:
    """Raises ValueError for negative durations."""
    return transfer_ipc_pb2.PeerProbed(number=event.number, pairs=pair_probes_to_pb(event.pairs))


def peer_probed_from_pb(pb: transfer_ipc_pb2.PeerProbed) -> PeerProbed:
    """Raises WireError."""
    return PeerProbed(pb.number, pair_probes_from_pb(pb.pairs, "probed.pairs"))


def planned_write_to_pb(write: PlannedWrite) -> transfer_tools_pb2.PlannedWrite:
    """Any write can be sent."""
    pb = transfer_tools_pb2.PlannedWrite(
        src_rank=write.src_rank,
        dst_rank=write.dst_rank,
        bytes=write.bytes,
        fragments=write.fragments,
        path=write.path,
    )
    if write.expected is not None:
        write_duration(write.expected, pb.expected)
    return pb


def plan_to_pb(run: DryRun) -> transfer_tools_pb2.PlanTransferResponse:
    """The whole answer."""
    answer = transfer_tools_pb2.PlanTransferResponse(
        compatible=not run.incompatibilities,
        incompatibilities=incompatibilities_to_pb(run.incompatibilities),
        writes=[planned_write_to_pb(write) for write in run.writes],
        bytes=sum(write.bytes for write in run.writes),
        explanation=run.explanation,
        context_id=run.context_id,
        generation_id=run.generation_id,
    )
    if run.expected is not None:
        write_duration(run.expected, answer.expected)
    return answer

"""transfer_ipc.proto, second part: hub and rank role, in whole frames."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, cast

from isthmus.v1 import transfer_ipc_pb2

from kvtransfer.errors import WireError
from kvtransfer.ports import (
    CancelWrite,
    ForgetPeer,
    Grant,
    HubToRank,
    LoadPeer,
    MeetSource,
    PeerLoaded,
    PeerWord,
    PrepareScatter,
    RankReady,
    RankToHub,
    Scattered,
    ScatterOrder,
    TransferNotice,
    WriteOrder,
)
from kvtransfer.probe_ports import PeerProbed, ProbePeer
from kvtransfer.wire._read import incarnation, limited, parse, present, text
from kvtransfer.wire.block_lists import block_lists_from_pb, write_block_lists
from kvtransfer.wire.bounce import (
    grant_from_pb,
    grant_to_pb,
    meet_source_from_pb,
    meet_source_to_pb,
    peer_word_from_pb,
    peer_word_to_pb,
    prepare_scatter_from_pb,
    prepare_scatter_to_pb,
    scatter_order_from_pb,
    scatter_order_to_pb,
    scattered_from_pb,
    scattered_to_pb,
)
from kvtransfer.wire.common import (
    incompatibilities_from_pb,
    incompatibilities_to_pb,
    key_from_pb,
    key_to_pb,
    tokens_from_pb,
    write_key,
    write_tokens,
)
from kvtransfer.wire.geometry import (
    MAX_DIGEST,
    MAX_RANKS,
    instance_info_from_pb,
    instance_info_to_pb,
    rank_info_from_pb,
    rank_info_to_pb,
)
from kvtransfer.wire.notices import notices_from_pb, notices_to_pb, write_notices
from kvtransfer.wire.page_tables import MAX_NAME
from kvtransfer.wire.tools import (
    pair_probes_from_pb,
    pair_probes_to_pb,
    peer_probed_from_pb,
    peer_probed_to_pb,
    probe_peer_from_pb,
    probe_peer_to_pb,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

_Rare = LoadPeer | ForgetPeer | CancelWrite | ProbePeer | Grant | MeetSource | PrepareScatter | ScatterOrder

MAX_BATCH = 1 << 16


def rank_input_to_bytes(commands: Iterable[HubToRank]) -> bytes:
    """One RankInput frame, hub to rank."""
    pb = transfer_ipc_pb2.RankInput()
    for one in commands:
        if isinstance(one, WriteOrder):
            # What every request says is written in place.
            _write_order(one, pb.commands.add().write)
        else:
            pb.commands.append(_command_to_pb(one))
    return pb.SerializeToString()


def _write_order(order: WriteOrder, pb: transfer_ipc_pb2.WriteOrder) -> None:
    write_key(order.key, pb.key)
    write_tokens(order.tokens, pb.tokens)
    pb.instance_id, pb.incarnation = order.instance_id, order.incarnation
    write_block_lists(order.sources, pb.sources)
    write_block_lists(order.destinations, pb.destinations)
    pb.receive, pb.step = order.receive, order.step
    if order.window is not None:
        write_tokens(order.window, pb.window)


def _command_to_pb(command: _Rare) -> transfer_ipc_pb2.RankCommand:
    match command:
        case LoadPeer(peer, ranks, bounce, require_path):
            load = transfer_ipc_pb2.LoadPeer(
                peer=instance_info_to_pb(peer),
                ranks=map(rank_info_to_pb, ranks),
                bounce=bounce,
                require_path=require_path,
            )
            return transfer_ipc_pb2.RankCommand(load_peer=load)
        case ForgetPeer():
            forget = transfer_ipc_pb2.ForgetPeer(instance_id=command.instance_id, incarnation=command.incarnation)
            return transfer_ipc_pb2.RankCommand(forget_peer=forget)
        case CancelWrite(key, receive):
            cancel = transfer_ipc_pb2.CancelWrite(key=key_to_pb(key), receive=receive)
            return transfer_ipc_pb2.RankCommand(cancel=cancel)
        case ProbePeer():
            return transfer_ipc_pb2.RankCommand(probe=probe_peer_to_pb(command))
        case Grant():
            return transfer_ipc_pb2.RankCommand(grant=grant_to_pb(command))
        case MeetSource():
            return transfer_ipc_pb2.RankCommand(meet_source=meet_source_to_pb(command))
        case PrepareScatter():
            return transfer_ipc_pb2.RankCommand(prepare_scatter=prepare_scatter_to_pb(command))
        case ScatterOrder():
            return transfer_ipc_pb2.RankCommand(scatter=scatter_order_to_pb(command))


def rank_input_from_bytes(data: bytes) -> tuple[HubToRank, ...]:
    """Raises WireError when any command is malformed: then none of them is used."""
    pb = parse(transfer_ipc_pb2.RankInput, data, "rank_input")
    limited(pb.commands, MAX_BATCH, "rank_input.commands")
    return tuple(_command_from_pb(one) for one in pb.commands)


def _command_from_pb(pb: transfer_ipc_pb2.RankCommand) -> HubToRank:
    match cast("str | None", pb.WhichOneof("body")):
        case "load_peer":
            present(pb.load_peer, "peer", "load_peer")
            limited(pb.load_peer.ranks, MAX_RANKS, "load_peer.ranks")
            ranks = (rank_info_from_pb(one, f"load_peer.ranks[{i}]") for i, one in enumerate(pb.load_peer.ranks))
            peer = instance_info_from_pb(pb.load_peer.peer, "load_peer.peer")
            path = text(pb.load_peer.require_path, "load_peer.require_path", MAX_NAME)
            return LoadPeer(peer, tuple(ranks), pb.load_peer.bounce, path)
        case "forget_peer":
            forget = pb.forget_peer
            instance_id = text(forget.instance_id, "forget_peer.instance_id", MAX_NAME)
            return ForgetPeer(instance_id, incarnation(forget.incarnation, "forget_peer"))
        case "write":
            return _write_from_pb(pb.write)
        case "cancel":
            present(pb.cancel, "key", "cancel")
            return CancelWrite(key_from_pb(pb.cancel.key, "cancel.key"), pb.cancel.receive)
        case "probe":
            return probe_peer_from_pb(pb.probe)
        case "grant":
            return grant_from_pb(pb.grant)
        case "meet_source":
            return meet_source_from_pb(pb.meet_source)
        case "prepare_scatter":
            return prepare_scatter_from_pb(pb.prepare_scatter)
        case "scatter":
            return scatter_order_from_pb(pb.scatter)
        case _:
            raise WireError("rank_command.body", "missing, or of a kind this build does not know")


def _write_from_pb(pb: transfer_ipc_pb2.WriteOrder) -> WriteOrder:
    present(pb, "tokens", "write")
    return WriteOrder(
        # A key that is not there has no id that is accepted.
        key=key_from_pb(pb.key, "write.key"),
        instance_id=text(pb.instance_id, "write.instance_id", MAX_NAME),
        incarnation=incarnation(pb.incarnation, "write"),
        tokens=tokens_from_pb(pb.tokens, "write.tokens"),
        sources=block_lists_from_pb(pb.sources, "write.sources"),
        destinations=block_lists_from_pb(pb.destinations, "write.destinations"),
        receive=pb.receive,
        window=tokens_from_pb(pb.window, "write.window") if pb.HasField("window") else None,
        step=pb.step,
    )


def rank_output_to_bytes(events: Iterable[RankToHub]) -> bytes:
    """One RankOutput frame, rank to hub. Notices that follow each other are one event."""
    pb = transfer_ipc_pb2.RankOutput()
    for are_notices, group in groupby(events, lambda one: isinstance(one, TransferNotice)):
        if are_notices:
            write_notices(cast("list[TransferNotice]", list(group)), pb.events.add().notices)
        else:
            pb.events.extend(_event_to_pb(one) for one in group)
    return pb.SerializeToString()


def _event_to_pb(event: RankToHub) -> transfer_ipc_pb2.RankEvent:
    match event:
        case RankReady(info):
            return transfer_ipc_pb2.RankEvent(ready=rank_info_to_pb(info))
        case PeerLoaded():
            loaded = transfer_ipc_pb2.PeerLoaded(
                instance_id=event.instance_id,
                incarnation=event.incarnation,
                incompatibilities=incompatibilities_to_pb(event.incompatibilities),
                plan_digest=event.plan_digest,
                later=event.later,
                probes=pair_probes_to_pb(event.probes),
            )
            return transfer_ipc_pb2.RankEvent(peer_loaded=loaded)
        case TransferNotice():
            return transfer_ipc_pb2.RankEvent(notices=notices_to_pb((event,)))
        case PeerProbed():
            return transfer_ipc_pb2.RankEvent(probed=peer_probed_to_pb(event))
        case PeerWord():
            return transfer_ipc_pb2.RankEvent(peer_word=peer_word_to_pb(event))
        case Scattered():
            return transfer_ipc_pb2.RankEvent(scattered=scattered_to_pb(event))


def rank_output_from_bytes(data: bytes) -> tuple[RankToHub, ...]:
    """Raises WireError when any event is malformed: then none of them is used."""
    pb = parse(transfer_ipc_pb2.RankOutput, data, "rank_output")
    limited(pb.events, MAX_BATCH, "rank_output.events")
    return tuple(event for one in pb.events for event in _events_from_pb(one))


def _events_from_pb(pb: transfer_ipc_pb2.RankEvent) -> tuple[RankToHub, ...]:
    if pb.HasField("notices"):
        return notices_from_pb(pb.notices, "notices")
    return (_event_from_pb(pb),)


def _event_from_pb(pb: transfer_ipc_pb2.RankEvent) -> RankToHub:
    match cast("str | None", pb.WhichOneof("body")):
        case "ready":
            return RankReady(rank_info_from_pb(pb.ready, "ready"))
        case "peer_loaded":
            loaded = pb.peer_loaded
            limited(loaded.plan_digest, MAX_DIGEST, "peer_loaded.plan_digest")
            return PeerLoaded(
                text(loaded.instance_id, "peer_loaded.instance_id", MAX_NAME),
                incarnation(loaded.incarnation, "peer_loaded"),
                incompatibilities_from_pb(loaded.incompatibilities, "peer_loaded.incompatibilities"),
                loaded.plan_digest,
                loaded.later,
                pair_probes_from_pb(loaded.probes, "peer_loaded.probes"),
            )
        case "peer_word":
            return peer_word_from_pb(pb.peer_word)
        case "scattered":
            return scattered_from_pb(pb.scattered)
        case "probed":
            return peer_probed_from_pb(pb.probed)
        case _:
            raise WireError("rank_event.body", "missing, or of a kind this build does not know")

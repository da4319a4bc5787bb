"""Register streams: what instances say goes into the cluster, what they must know and do comes out."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from isthmus.v1 import coordinator_service_pb2

from isthmus_coordinator import wire
from isthmus_coordinator.cluster import Cluster
from isthmus_coordinator.kv_stream import KvStream
from isthmus_coordinator.membership import Instance, Member, Peers, Role
from isthmus_coordinator.outbox import Outbox
from isthmus_coordinator.streams import unexpected
from isthmus_core.errors import InvalidRequest, IsthmusError

logger = logging.getLogger(__name__)

_RegisterRequest = coordinator_service_pb2.RegisterRequest


class UnknownInstance(IsthmusError):
    """No member has that name."""

    code = grpc.StatusCode.NOT_FOUND

    def __init__(self, instance_id: str) -> None:
        super().__init__(f"no instance {instance_id} is registered: `isthmus cluster` lists those that are")


@dataclass(slots=True)
class MemberStream:
    """One Register stream. `told`: the peers that it was last told."""

    member: Member
    outbox: Outbox[wire.RegisterResponse]
    kv: KvStream
    told: Peers | None = None


class MemberStreams:
    """All Register streams. `changed` is called whenever others have to hear about it."""

    def __init__(self, cluster: Cluster, changed: Callable[[], None]) -> None:
        self._cluster, self._changed = cluster, changed
        self._streams: dict[int, MemberStream] = {}
        # Lists of peers as they were told last: most generation instances of a model are told the same.
        self._messages: deque[tuple[Peers | None, Peers, wire.RegisterResponse]] = deque(maxlen=8)

    def __len__(self) -> int:
        return len(self._streams)

    def open(self, instance: Instance) -> MemberStream:
        """An instance has said Hello. Raises InstanceReplaced."""
        member, replaced = self._cluster.join(instance)
        if replaced is not None:
            old, error = replaced
            self._streams[old.token].outbox.end(error)
        outbox: Outbox[wire.RegisterResponse] = Outbox(f"register stream of {instance.instance_id}", 1)
        stream = MemberStream(member, outbox, KvStream(self._cluster.index, member.number))
        self._streams[member.token] = stream
        outbox.post(wire.register_welcome())
        self._ask_snapshot(stream)
        self._changed()
        extra = {"instance_id": instance.instance_id, "incarnation": instance.incarnation.hex()}
        logger.info("%s instance at %s joined", instance.role.name.lower(), instance.endpoint, extra=extra)
        return stream

    def close(self, stream: MemberStream) -> None:
        """The stream is over."""
        member = stream.member
        del self._streams[member.token]
        left = self._cluster.leave(member)
        extra = {"instance_id": member.instance.instance_id, "incarnation": member.instance.incarnation.hex()}
        logger.info("instance %s", "left" if left else "was replaced", extra=extra)
        self._changed()

    def end_all(self, error: IsthmusError) -> None:
        """End every stream."""
        for stream in self._streams.values():
            stream.outbox.end(error)

    def hear(self, stream: MemberStream, message: _RegisterRequest) -> None:
        """What an instance says. Raises InvalidRequest."""
        member = stream.member
        match message.WhichOneof("body"):
            case "load":
                self._cluster.set_load(member, wire.load_from_pb(message.load))
            case "pair":
                start, pair = wire.pair_from_pb(message.pair)
                if self._cluster.report(member, start, pair):
                    names = f"{start.instance_id} -> {member.instance.instance_id}"
                    logger.info("pair %s is %s", names, pair.state.name.lower())
                    self._changed()
            case "estimate":
                self._cluster.estimate(member, *wire.pair_estimate_from_pb(message.estimate))
            case "draining":
                self._cluster.set_draining(member)
                self._changed()
            case "kv_events":
                self._hear_kv(stream, message)
            case "role":
                role, changing_to, refused = wire.role_report_from_pb(message.role)
                self._cluster.set_role(member, role, changing_to, refused)
                self._changed()
            case other:
                raise unexpected(other, "send load, pair, estimate, draining, kv_events or role after hello")

    def _hear_kv(self, stream: MemberStream, message: _RegisterRequest) -> None:
        # Of a stream that has been replaced nothing may reach the index: its number is somebody else's.
        if self._streams.get(stream.member.token) is stream and self._cluster.has(stream.member):
            if not stream.kv.take(wire.kv_from_pb(message.kv_events)):
                name = stream.member.instance.instance_id
                logger.warning("KV events of %s have a gap: it is asked for all its blocks", name)
                self._ask_snapshot(stream)
            for number in self._cluster.index.incomplete():
                for other in self._streams.values():
                    if other.member.number == number and other.kv.following:
                        self._ask_snapshot(other)

    def _ask_snapshot(self, stream: MemberStream) -> None:
        instance = stream.member.instance
        wanted = self._cluster.policy.wants_keys and instance.keying is not None
        if wanted and instance.schema_version >= wire.WITH_ORDERS:
            stream.kv.ask()
            stream.outbox.put_state("kv_snapshot", wire.snapshot_to_pb)

    def tell_peers(self) -> None:
        """Tell every generation instance its peers, where they have changed."""
        for stream in self._streams.values():
            # A member that was a generation instance is told that it needs no streams any more.
            told = stream.member.role is Role.GENERATION or stream.told
            peers = self._cluster.peers(stream.member) if told else stream.told
            # Most often it is the same list, which need not be compared.
            if peers is not stream.told and peers != stream.told:
                stream.outbox.put_state("peers", lambda stream=stream: self._peers(stream))

    def _peers(self, stream: MemberStream) -> wire.RegisterResponse:
        """The list as it is when it is written, and from then on the one that reports are held against."""
        changes = stream.member.instance.schema_version >= wire.WITH_ORDERS
        before, stream.told = stream.told if changes else None, self._cluster.peers(stream.member)
        self._cluster.announced(stream.member, stream.told)
        for old, new, message in self._messages:
            if old is before and new is stream.told:
                return message
        message = wire.peers_to_pb(before, stream.told)
        self._messages.append((before, stream.told, message))
        return message

    # Orders

    def drain(self, instance_id: str, deadline_s: float | None) -> None:
        """Order an instance to finish and exit. Raises UnknownInstance, or InvalidRequest for one that takes no
        orders."""
        stream = self._ordered(instance_id)
        stream.outbox.put_state("order", lambda: wire.drain_to_pb(deadline_s))
        logger.info("instance %s is told to drain", instance_id)

    def set_role(self, instance_id: str, role: Role, deadline_s: float | None) -> None:
        """Order an instance to take another role. Raises UnknownInstance, or InvalidRequest."""
        stream = self._ordered(instance_id)
        possible = stream.member.instance.possible_roles
        if role not in possible:
            names = ", ".join(sorted(one.name for one in possible)) or "none: its role is fixed"
            raise InvalidRequest("role", role.name, f"instance {instance_id} can take: {names}")
        stream.outbox.put_state("order", lambda: wire.set_role_to_pb(role, deadline_s))
        logger.info("instance %s is told to become %s", instance_id, role.name.lower())

    def _ordered(self, instance_id: str) -> MemberStream:
        member = self._cluster.get(instance_id)
        if member is None:
            raise UnknownInstance(instance_id)
        version = member.instance.schema_version
        if version < wire.WITH_ORDERS:
            remedy = f"it speaks schema version {version}: orders need {wire.WITH_ORDERS}; upgrade it"
            raise InvalidRequest("instance_id", instance_id, remedy)
        return self._streams[member.token]

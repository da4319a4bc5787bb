"""The cluster as the coordinator sees it: tables for people, JSON for programs."""

from __future__ import annotations

from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from isthmus.v1 import common_pb2, coordinator_service_pb2
from rich.console import Group
from rich.table import Table
from rich.text import Text


def role_name(value: common_pb2.InstanceRole) -> str:
    """As people write it."""
    return common_pb2.InstanceRole.Name(value).removeprefix("INSTANCE_ROLE_").lower()


def _state(value: coordinator_service_pb2.PairState) -> str:
    return coordinator_service_pb2.PairState.Name(value).removeprefix("PAIR_STATE_").lower()


def cluster_json(cluster: coordinator_service_pb2.GetClusterResponse) -> dict[str, Any]:
    """Everything, with the field names of the schema; zeros are written out."""
    return message_json(cluster)


def message_json(message: Message) -> dict[str, Any]:
    """Any answer, with the field names of the schema; zeros are written out."""
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def render_cluster(cluster: coordinator_service_pb2.GetClusterResponse) -> Group:
    """Members, pairs (with every reason why one can not work) and what can be served."""
    members = Table(title="Instances", title_justify="left", show_edge=False)
    members.add_column("instance", no_wrap=True)
    members.add_column("serves", overflow="fold")
    members.add_column("endpoint", overflow="fold", min_width=len("127.0.0.1:65535"))  # stays one word to copy
    for column in ("open", "running", "held", "blocks"):
        members.add_column(column, justify="right")
    for member in cluster.members:
        instance, load = member.instance, member.load
        blocks = f"{load.used_blocks}/{load.total_blocks or instance.total_blocks}"
        name = f"{instance.instance_id} (draining)" if member.draining else instance.instance_id
        counts = (str(member.open_requests), str(load.running_requests), str(load.held_handoffs), blocks)
        serves = f"{instance.model} ({role_name(instance.role)}, {instance.engine})"
        members.add_row(name, serves, instance.endpoint, *counts)
    pairs = Table(title="Pairs", title_justify="left", show_edge=False)
    for column in ("context", "generation", "state", "reasons"):
        pairs.add_column(column, overflow="fold")
    for pair in cluster.pairs:
        reasons = [f"{row.field}: {row.mine} against {row.yours}; {row.remedy}" for row in pair.incompatibilities]
        names = (pair.context_instance_id, pair.generation_instance_id)
        pairs.add_row(*names, _state(pair.state), "\n".join(reasons))
    served = ", ".join(f"{model.name} (up to {model.max_model_len} tokens)" for model in cluster.models) or "nothing"
    return Group(members, Text(), pairs, Text(), Text(f"Served: {served}. Open requests: {cluster.open_requests}."))

"""Changing a running cluster: drain, role."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from isthmus_client.commands.shared import COORDINATOR, AsJson, run, tell, tls
from isthmus_client.orders import drain_instance, set_role

Instance = Annotated[str, typer.Argument(help="name of the instance, see `isthmus cluster`")]
Deadline = Annotated[float | None, typer.Option(min=0, help="seconds for the work that runs; default: worker.drain_s")]
Coordinator = Annotated[str, typer.Option(help="host:port of the coordinator")]


class Role(Enum):
    """What an instance does with requests."""

    CONTEXT = "context"
    GENERATION = "generation"
    BOTH = "context_and_generation"


def drain(
    instance: Instance, deadline: Deadline = None, coordinator: Coordinator = COORDINATOR, as_json: AsJson = False
) -> None:
    """An instance takes no new work, finishes what it has, and exits."""
    run(drain_instance(coordinator, instance, deadline, tls()))
    tell({"draining": instance}, f"{instance} drains; `isthmus cluster` shows how far it is", as_json=as_json)


def role(
    instance: Instance,
    to: Annotated[Role, typer.Argument(help="what it does from now on")],
    deadline: Deadline = None,
    coordinator: Coordinator = COORDINATOR,
    as_json: AsJson = False,
) -> None:
    """An instance finishes its work and takes another role, without a restart."""
    run(set_role(coordinator, instance, to.value, deadline, tls()))
    line = f"{instance} becomes {to.value}; `isthmus cluster` shows how far it is"
    tell({"instance": instance, "role": to.value}, line, as_json=as_json)

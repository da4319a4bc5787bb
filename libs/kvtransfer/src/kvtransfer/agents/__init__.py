"""Transfer agents by name. Others can add theirs as entry points of the group `kvtransfer.agents`.

A factory takes a label (used in the agent's unique name) and returns an agent; it is called on the thread that will own
the agent.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import cast

from kvtransfer.agents.base import Agent
from kvtransfer.errors import AgentUnknown

AgentFactory = Callable[[str], Agent]

ENTRY_POINT_GROUP = "kvtransfer.agents"
# Imported when asked for: nixl must not be loaded by processes that only plan.
_BUILT_IN = {"nixl": "kvtransfer.agents.nixl:NixlAgent", "loopback": "kvtransfer.agents.loopback:LoopbackAgent"}


def known_agents() -> tuple[str, ...]:
    """Names that `agent_factory` accepts, sorted."""
    return tuple(sorted({*_BUILT_IN, *(point.name for point in entry_points(group=ENTRY_POINT_GROUP))}))


def agent_factory(backend: str) -> AgentFactory:
    """Factory of a backend. Raises AgentUnknown with the known names."""
    if backend in _BUILT_IN:
        module, _, attribute = _BUILT_IN[backend].partition(":")
        return cast("AgentFactory", getattr(importlib.import_module(module), attribute))
    for point in entry_points(group=ENTRY_POINT_GROUP, name=backend):
        return cast("AgentFactory", point.load())
    raise AgentUnknown(backend, known_agents())


def make_agent(backend: str, label: str) -> Agent:
    """An agent of a backend; call it on the thread that will own it. Raises AgentUnknown, AgentUnavailable."""
    return agent_factory(backend)(label)

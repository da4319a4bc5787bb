"""The whole Agent protocol over real NIXL: two agents in a process of their own, a script prints what happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from typing import Any

import pytest

from rank_process import needs_nixl

pytestmark = [pytest.mark.integration, needs_nixl]

PROLOGUE = """
import json, os, sys, time
import numpy as np
from kvtransfer.agents import make_agent
from kvtransfer.agents.base import Operation, WriteState
from kvtransfer.errors import AgentError
from kvtransfer.page_table import MemoryKind, RegisteredRegion
from kvtransfer.regions import RegionPairs

def region(memory):
    return RegisteredRegion(int(memory.ctypes.data), memory.nbytes, MemoryKind.DRAM)

def pairs(src, dst):
    one = lambda value: np.array([value], np.int64)
    return RegionPairs(one(src.ctypes.data), one(dst.ctypes.data), one(src.nbytes))

def finish(agent, handle):
    until = time.monotonic() + 20
    while (status := agent.poll(handle)).state is WriteState.IN_FLIGHT and time.monotonic() < until:
        time.sleep(0.001)
    agent.release(handle)
    return status.state.name

def refused(call, *arguments):
    try:
        call(*arguments)
    except AgentError as error:
        return str(error)
    return ""

near, far = np.arange(4096, dtype=np.uint16), np.zeros(4096, np.uint16)
a, b = make_agent("nixl", "a"), make_agent("nixl", "b")
a.register([region(near)])
b.register([region(far)])
a.load_remote(b.descriptor(), [region(far)])
"""
EPILOGUE = """
print(json.dumps(result))
sys.stdout.flush()
os._exit(0)
"""


def run(body: str) -> Any:
    """What the script leaves in `result`."""
    environment = {**os.environ, "UCX_MODULES": "^ib", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", PROLOGUE + textwrap.dedent(body) + EPILOGUE],
        env=environment,
        capture_output=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout.splitlines()[-1])


def test_reads_and_writes_move_the_same_bytes():
    result = run("""
    wrote = finish(a, a.submit(pairs(near, far), b.name))
    same = bool((near == far).all())
    far[:] = 7
    read = finish(a, a.submit(pairs(far, near), b.name, Operation.READ))
    result = [wrote, same, read, int(near.min()), int(near.max())]
    """)
    assert result == ["DONE", True, "DONE", 7, 7]


def test_notifications_arrive_in_order_with_their_sender():
    result = run("""
    for number in range(3):
        a.notify(b.name, b"%d\\x00" % number)
    got, until = [], time.monotonic() + 20
    while len(got) < 3 and time.monotonic() < until:
        got += b.notifications()
        time.sleep(0.001)
    result = [[sender == a.name, message.decode("latin1")] for sender, message in got]
    """)
    assert result == [[True, f"{number}\x00"] for number in range(3)]


def test_memory_can_be_added_and_taken_back():
    result = run("""
    more = np.full(64, 9, np.uint16)
    first = refused(a.submit, pairs(more, far), b.name)
    a.register([region(more)])
    wrote = finish(a, a.submit(pairs(more, far), b.name))
    a.deregister([region(more)])
    second = refused(a.submit, pairs(more, far), b.name)
    twice = refused(a.deregister, [region(more)])
    result = [first, wrote, int(far[0]), int(far[64]), second, twice]
    """)
    first, wrote, head, after, second, twice = result
    assert "not inside one registered region" in first
    assert (wrote, head, after) == ("DONE", 9, 0)
    assert "not inside one registered region" in second
    assert "has not registered" in twice


def test_known_remote_memory_can_be_asked_for():
    result = run("""
    other = np.zeros(64, np.uint16)
    before = a.check_remote(b.name), a.check_remote(b.name, [region(far)])
    wrong = a.check_remote(b.name, [region(other)]), a.check_remote("nobody")
    a.forget_remote(b.name)
    result = [*before, *wrong, a.check_remote(b.name)]
    """)
    assert result == [True, True, False, False, False]


def test_metadata_of_somebody_else_or_of_a_former_life_is_refused():
    """Foreign: it names another agent than the one that is said to send it. Replayed: its memory is not the one that
    the peer has now."""
    result = run("""
    from dataclasses import replace
    other, strange = np.zeros(64, np.uint16), make_agent("nixl", "c")
    strange.register([region(other)])
    foreign = refused(a.load_remote, replace(strange.descriptor(), name="d"), [region(other)])
    unknown = a.check_remote("d")
    damaged = refused(a.load_remote, replace(strange.descriptor(), metadata=b"x" * 100), [region(other)])
    replayed = refused(a.load_remote, replace(b.descriptor(), backend="other"), [region(far)])
    a.forget_remote(b.name)
    a.load_remote(b.descriptor(), [region(other)])
    result = [foreign, unknown, damaged, replayed, a.check_remote(b.name, [region(other)])]
    """)
    foreign, unknown, damaged, backend, known = result
    assert "metadata of agent d belongs to" in foreign or "can not be reached" in foreign
    assert not unknown
    assert "metadata of agent" in damaged
    assert "speaks 'other'" in backend
    assert not known, "memory that the metadata does not name is found out before a write"


@pytest.mark.parametrize("kind", ["BLOCK", "OBJECT", "FILE"])
def test_kinds_of_memory_that_ucx_lacks_are_refused_by_name(kind):
    result = run(f"""
    result = refused(a.register, [RegisteredRegion(0, 4096, MemoryKind.{kind}, 3)])
    """)
    assert f"can not register {kind} memory" in result
    assert "DRAM" in result


def test_what_nixl_can_do_is_known_from_the_start():
    result = run("""
    can = a.capabilities
    kinds = sorted(kind.name for kind in can.memory_kinds)
    result = [can.engine, kinds, can.plugins, can.backends, can.paths, a.path(b.name)]
    """)
    engine, kinds, plugins, backends, paths, path = result
    assert engine.startswith("nixl_cu")
    assert "DRAM" in kinds
    assert "UCX" in plugins
    assert backends == ["UCX"]
    assert any(path.startswith(one) for one in paths)

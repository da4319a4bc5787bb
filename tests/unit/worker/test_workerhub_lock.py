"""The instance lock: one incarnation at a time, proof of its predecessors' death."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from pathlib import Path

import pytest

from isthmus_core.errors import ConfigError, StartError
from isthmus_core.instance_lock import MAX_EXITED, acquire


def incarnation(number: int) -> bytes:
    return number.to_bytes(16)


async def test_a_successor_knows_every_predecessor_newest_first(tmp_path: Path):
    for number in range(5):
        lock = await acquire(tmp_path, "w-0", incarnation(number))
        assert lock.exited == tuple(incarnation(before) for before in reversed(range(number)))
        lock.release()
        lock.release()


async def test_the_list_of_predecessors_is_bounded(tmp_path: Path):
    for number in range(MAX_EXITED + 3):
        lock = await acquire(tmp_path, "w-0", incarnation(number))
        lock.release()
    lock = await acquire(tmp_path, "w-0", incarnation(1000))
    assert len(lock.exited) == MAX_EXITED
    assert lock.exited[0] == incarnation(MAX_EXITED + 2)
    lock.release()


async def test_a_second_holder_is_refused_and_told_who_holds_it(tmp_path: Path):
    import os

    lock = await acquire(tmp_path, "w-0", incarnation(1))
    with pytest.raises(StartError) as caught:
        await acquire(tmp_path, "w-0", incarnation(2), wait_s=0.1)
    assert f"process {os.getpid()}" in str(caught.value)
    assert incarnation(1).hex() in str(caught.value)
    assert "worker.instance_id = w-0" in str(caught.value)
    other = await acquire(tmp_path, "w-1", incarnation(2), wait_s=0.1)
    other.release()
    lock.release()
    # The refused one left no trace: it never lived.
    third = await acquire(tmp_path, "w-0", incarnation(3))
    assert third.exited == (incarnation(1),)
    third.release()


async def test_a_child_that_inherited_the_lock_keeps_it(tmp_path: Path):
    """The hub dies, a rank lives on: nothing is proven until the rank is gone too."""
    lock = await acquire(tmp_path, "w-0", incarnation(1))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=[lock.fd])
    lock.release()
    with pytest.raises(StartError):
        await acquire(tmp_path, "w-0", incarnation(2), wait_s=0.2)
    waiting = asyncio.create_task(acquire(tmp_path, "w-0", incarnation(3), wait_s=30))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    child.communicate(b"\n")
    successor = await waiting
    assert successor.exited == (incarnation(1),)
    successor.release()


async def test_a_child_that_did_not_inherit_it_does_not_keep_it(tmp_path: Path):
    lock = await acquire(tmp_path, "w-0", incarnation(1))
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    lock.release()
    successor = await acquire(tmp_path, "w-0", incarnation(2), wait_s=0)
    successor.release()
    child.communicate(b"\n")


@pytest.mark.parametrize(
    "damaged", ["", "{", "[]", '{"incarnation": "xx"}', '{"incarnation": "00", "pid": 1, "since": 1, "exited": []}']
)
async def test_a_damaged_history_proves_nothing_and_does_not_stop_a_start(tmp_path: Path, damaged: str, caplog):
    (tmp_path / "w-0.json").write_text(damaged)
    lock = await acquire(tmp_path, "w-0", incarnation(1))
    assert lock.exited == ()
    assert "w-0.json" in caplog.text
    lock.release()
    successor = await acquire(tmp_path, "w-0", incarnation(2))
    assert successor.exited == (incarnation(1),)
    successor.release()


async def test_an_unusable_folder_names_the_setting(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"worker\.state_dir"):
        await acquire(tmp_path / "file", "w-0", incarnation(1))


async def test_a_link_in_a_shared_folder_is_not_followed(tmp_path: Path):
    (tmp_path / "victim").write_text("precious")
    (tmp_path / "w-0.lock").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match=r"w-0\.lock"):
        await acquire(tmp_path, "w-0", incarnation(1))


async def test_waiting_is_bounded(tmp_path: Path):
    lock = await acquire(tmp_path, "w-0", incarnation(1))
    began = time.monotonic()
    with pytest.raises(StartError, match="0 s"):
        await acquire(tmp_path, "w-0", incarnation(2), wait_s=0)
    assert time.monotonic() - began < 30
    lock.release()

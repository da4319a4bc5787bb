"""What ranks say to each other survives the way, and rubbish is refused."""

from __future__ import annotations

import socket
import threading

import numpy as np
import pytest
from isthmus.v1 import rank_ipc_pb2

from isthmus_core.errors import InternalError
from isthmus_core.framing import FrameError, FrameSocket
from isthmus_worker.engine import Sampling
from isthmus_worker.parallel.follower import Follower
from isthmus_worker.parallel.frames import (
    Begin,
    Copy,
    Done,
    Loaded,
    Step,
    Zero,
    answer_from_bytes,
    answer_to_bytes,
    command_from_bytes,
    command_to_bytes,
)
from isthmus_worker.parallel.links import RankLinks, RankLost
from isthmus_worker.runner import BatchRow, Draw

NO_TOKENS = np.empty(0, np.int64)


def draw(back: int = 0) -> Draw:
    return Draw(Sampling(5, temperature=1.0), 1, NO_TOKENS, NO_TOKENS, back)


def ids(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_a_step_arrives_with_all_that_a_rank_needs():
    rows = [
        BatchRow(np.array([5, 6, 70_000]), 40, (ids(3, 1, 9), ids(-1, 2, 4)), (), 1),
        BatchRow(np.array([8]), 0, (ids(7), ids(0)), (draw(), draw())),
        BatchRow(np.array([1, 2, 3]), 16, (ids(5, 6), ids(5, 6)), (draw(2), draw(1), draw())),
    ]
    arrived = command_from_bytes(command_to_bytes(Step(7, rows)))
    assert isinstance(arrived, Step)
    assert arrived.number == 7
    for row, original in zip(arrived.rows, rows, strict=True):
        assert row.token_ids.tolist() == original.token_ids.tolist()
        assert row.token_ids.dtype == np.int64
        assert (row.start, row.dp_rank, row.backs) == (original.start, original.dp_rank, original.backs)
        assert [one.tolist() for one in row.blocks] == [one.tolist() for one in original.blocks]


@pytest.mark.parametrize("command", [Begin(5000, "gloo", (7, 9)), Zero()])
def test_commands_without_arrays_come_back_equal(command: Begin | Zero):
    assert command_from_bytes(command_to_bytes(command)) == command


def test_copies_name_group_and_list():
    arrived = command_from_bytes(command_to_bytes(Copy(1, 2, ids(4, 5), ids(6, 7))))
    assert isinstance(arrived, Copy)
    assert (arrived.dp_rank, arrived.number) == (1, 2)
    assert (arrived.sources.tolist(), arrived.destinations.tolist()) == ([4, 5], [6, 7])


def test_answers_come_back_equal():
    loaded = Loaded(3, "BF16", b"attention", {"a": b"1", "b": b"2"}, (10, 20), "cuda:1")
    assert answer_from_bytes(answer_to_bytes(loaded)) == loaded
    assert answer_from_bytes(answer_to_bytes(Done())) == Done()


def test_rubbish_is_refused():
    for frame in (b"\xff\xff", b""):
        with pytest.raises(FrameError):
            command_from_bytes(frame)
    step = command_to_bytes(Step(1, [BatchRow(np.array([5]), 0, (ids(3),), (draw(),))]))
    pb = rank_ipc_pb2.LeaderCommand.FromString(step)
    pb.step.block_lists = 2
    with pytest.raises(FrameError, match="1 block lists of 1 rows, each must have 2"):
        command_from_bytes(pb.SerializeToString())


def test_a_rank_that_is_gone_is_named_whether_it_is_told_or_asked():
    ends = [socket.socketpair() for _ in range(2)]
    links = RankLinks([FrameSocket(ours) for ours, _ in ends])
    first, second = (FrameSocket(theirs) for _, theirs in ends)
    first.send(answer_to_bytes(Done()))
    threading.Timer(0.05, second.close).start()
    with pytest.raises(RankLost, match="rank 2 is gone"):
        links.confirm()
    with pytest.raises(RankLost, match="rank 2 is gone"):
        links.tell(Zero())
    first.close()


def test_an_answer_out_of_turn_is_a_bug():
    ours, theirs = socket.socketpair()
    links, other = RankLinks([FrameSocket(ours)]), FrameSocket(theirs)
    other.send(answer_to_bytes(Loaded(2, "F32", b"", {}, (1,), "cpu")))
    with pytest.raises(InternalError, match="rank 1 did not begin"):
        links.loaded()
    other.send(answer_to_bytes(Loaded(1, "F32", b"", {}, (1,), "cpu")))
    with pytest.raises(InternalError, match="rank 1 answered a command with Loaded"):
        links.confirm()
    other.close()


class Executed:
    """The runner of a rank, as far as a step needs it."""

    def __init__(self) -> None:
        self.rows: list[list[BatchRow]] = []

    def execute(self, rows: list[BatchRow]) -> None:
        self.rows.append(rows)


def test_a_rank_that_misses_a_step_stops_instead_of_computing_the_next_one():
    """The list of steps is what the ranks agree on: none may be left out."""
    ours, theirs = socket.socketpair()
    leader, runner = FrameSocket(ours), Executed()
    for number in (1, 2, 4):
        leader.send(command_to_bytes(Step(number, [BatchRow(np.array([5]), 0, (ids(3),), (draw(),))])))
    ours.shutdown(socket.SHUT_WR)
    follower = Follower(runner, FrameSocket(theirs), 1.0, lambda _: None)  # type: ignore[arg-type]
    with pytest.raises(InternalError, match="step 4 follows step 2"):
        follower.run()
    assert len(runner.rows) == 2
    leader.close()

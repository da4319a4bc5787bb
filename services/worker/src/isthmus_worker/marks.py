"""What an engine notes about a leg on the way, by the monotonic clock, and its protobuf twin."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from isthmus.v1 import timeline_pb2

# Marks of one leg. A prompt in more chunks than that has its last ones told as one.
MAX_MARKS = 256


class MarkKind(Enum):
    """Values are those of `isthmus.v1.TimelineKind`."""

    QUEUE = 1
    PREFILL_CHUNK = 2
    FIRST_TOKEN = 3
    TRANSFER = 4
    RECEIVE = 5
    CONSENSUS = 6
    DECODE = 7
    PREEMPTED = 8


@dataclass(frozen=True, slots=True)
class Mark:
    """Something that began `at` (monotonic seconds) and took `seconds`; prefill chunks: of tokens [begin, end)."""

    kind: MarkKind
    at: float
    seconds: float = 0.0
    begin: int = 0
    end: int = 0


def add_chunk(marks: list[Mark], begin: int, end: int, at: float, until: float) -> None:
    """Prompt tokens [begin, end) were computed in a step that took from `at` to `until`."""
    last = marks[-1] if marks else None
    if len(marks) >= MAX_MARKS and last is not None and last.kind is MarkKind.PREFILL_CHUNK:
        marks[-1] = Mark(MarkKind.PREFILL_CHUNK, last.at, until - last.at, last.begin, end)
    else:
        marks.append(Mark(MarkKind.PREFILL_CHUNK, at, until - at, begin, end))


def marks_to_pb(marks: Iterable[Mark]) -> list[timeline_pb2.TimelineMark]:
    """For engine_ipc.proto."""
    return [
        timeline_pb2.TimelineMark(
            kind=timeline_pb2.TimelineKind.Name(one.kind.value),
            at_ns=round(one.at * 1e9),
            duration_ns=max(0, round(one.seconds * 1e9)),
            token_begin=one.begin,
            token_end=one.end,
        )
        for one in marks
    ]


def marks_from_pb(pbs: Iterable[timeline_pb2.TimelineMark]) -> tuple[Mark, ...]:
    """Raises ValueError for a kind that this build does not know."""
    return tuple(
        Mark(MarkKind(int(pb.kind)), pb.at_ns / 1e9, pb.duration_ns / 1e9, pb.token_begin, pb.token_end) for pb in pbs
    )

"""What the scheduler notes about a request on the way: every chunk once, in order, by the caller's clock."""

from __future__ import annotations

from itertools import pairwise

from isthmus_worker.marks import Mark, MarkKind
from isthmus_worker.scheduler import RequestFinished
from sched_bench import Bench


def marks_of(bench: Bench, key) -> tuple[Mark, ...]:
    end = bench.trails[key].end
    assert isinstance(end, RequestFinished)
    return end.report.marks


def test_chunks_cover_the_prompt_and_times_follow_each_other():
    bench = Bench(max_batch_tokens=16)
    key = bench.submit([32 + index % 90 for index in range(50)], 4)
    bench.run()
    marks = marks_of(bench, key)
    kinds = [mark.kind for mark in marks]
    assert kinds == [MarkKind.QUEUE, *[MarkKind.PREFILL_CHUNK] * 4, MarkKind.FIRST_TOKEN, MarkKind.DECODE]
    chunks = marks[1:5]
    assert [(chunk.begin, chunk.end) for chunk in chunks] == [(0, 16), (16, 32), (32, 48), (48, 50)]
    for before, after in pairwise(marks):
        assert before.at + before.seconds <= after.at + 1e-9 or after.kind is MarkKind.FIRST_TOKEN
    assert chunks[-1].at + chunks[-1].seconds == marks[5].at, "the last chunk brings the first token"


def test_cached_tokens_are_in_no_chunk():
    bench = Bench(max_batch_tokens=64)
    prompt = [32 + index % 90 for index in range(50)]
    bench.submit(prompt, 2)
    bench.run()
    key = bench.submit(prompt, 2)
    bench.run()
    (chunk,) = [mark for mark in marks_of(bench, key) if mark.kind is MarkKind.PREFILL_CHUNK]
    assert (chunk.begin, chunk.end) == (48, 50)


def test_a_preempted_request_notes_it_and_is_computed_again():
    bench = Bench(num_blocks=8)
    keys = [bench.submit([65 + number], 20) for number in range(4)]
    bench.run()
    youngest = marks_of(bench, keys[-1])
    kinds = [mark.kind for mark in youngest]
    assert MarkKind.PREEMPTED in kinds
    again = kinds.index(MarkKind.PREEMPTED)
    assert MarkKind.PREFILL_CHUNK in kinds[again:], "its tokens were computed once more"
    assert MarkKind.PREEMPTED not in [mark.kind for mark in marks_of(bench, keys[0])]

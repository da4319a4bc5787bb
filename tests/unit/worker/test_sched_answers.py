"""Requests with several answers: one prefill or one hand-off, then each answer lives and ends by itself."""

from __future__ import annotations

from typing import Any

import pytest

from isthmus_core.errors import InternalError, InvalidRequest, RequestCancelled
from isthmus_worker.engine import ContextPhase, FinishReason, Sampling, Tokens
from isthmus_worker.scheduler import ContextDone, RequestFinished, RequestTokens
from kvtransfer.ports import ReceiveRequest, SendOffer
from mock_oracle import oracle
from sched_bench import HOLDER, Bench, copy_cache, new_key

PROMPT = [32 + index * 7 % 95 for index in range(37)]
HOT: dict[str, Any] = {"temperature": 1.0, "seed": 5}


def said(prompt: list[int], max_tokens: int, n: int, stop: tuple[int, ...] = ()) -> list[list[int]]:
    """What each answer must be."""
    sampling = Sampling(max_tokens, stop, n=n, **HOT)
    texts = [oracle(prompt, max_tokens, sampling=sampling, sample=sample) for sample in range(n)]
    ends = [[index for index, token in enumerate(text) if token in stop] for text in texts]
    return [text[: end[0] + 1] if end else text for text, end in zip(texts, ends, strict=True)]


def answers(*benches: Bench, key) -> list[list[int]]:
    """What each answer was, over the legs of a request."""
    samples = sorted({sample for bench in benches for sample in bench.trails[key].answers})
    return [[token for bench in benches for token in bench.trails[key].answers.get(sample, [])] for sample in samples]


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 16, 17, 37])
def test_one_prefill_and_n_answers_of_their_own(length: int, reuse: bool):
    bench = Bench(num_blocks=64, prefix_caching=reuse)
    key = bench.submit(PROMPT[:length], 9, n=3, **HOT)
    steps = 0
    computed = 0
    while True:
        plan = bench.scheduler.plan(bench.now)
        if not plan.rows:
            break
        plan.make_copies(bench.runner)
        computed += sum(len(row.token_ids) for row in plan.rows)
        bench.scheduler.apply(plan, bench.runner.execute(plan.rows), (), bench.now)
        bench.check()
        steps += 1
    assert answers(bench, key=key) == said(PROMPT[:length], 9, 3)
    assert len({tuple(text) for text in answers(bench, key=key)}) == 3
    assert computed == length + 3 * 8, "the prompt is computed once"
    assert bench.trails[key].reasons == dict.fromkeys(range(3), FinishReason.LENGTH)
    bench.check_idle()


def test_full_blocks_of_the_prompt_are_shared_and_the_last_one_is_not():
    bench = Bench(num_blocks=64, prefix_caching=False)
    key = bench.submit(PROMPT[:14], 9, n=3, **HOT)
    bench.step()
    assert bench.blocks.used == 3 + 3, "3 shared blocks, and one of its own for each answer"
    bench.step()
    tables = [bench.blocks.table(holder).tolist() for holder in bench.holders(key)]
    assert [table[:3] for table in tables] == [tables[0][:3]] * 3
    assert len({table[3] for table in tables}) == 3


def test_each_answer_ends_by_itself_and_the_request_with_the_last():
    stop = tuple(range(32, 40))
    expected = said(PROMPT, 30, 4, stop)
    assert len({len(text) for text in expected}) > 1
    bench = Bench(num_blocks=64, max_running=4)
    key = bench.submit(PROMPT, 30, stop=stop, n=4, **HOT)
    bench.run()
    assert answers(bench, key=key) == expected
    for sample, text in enumerate(expected):
        reason = FinishReason.STOP if text[-1] in stop else FinishReason.LENGTH
        assert bench.trails[key].reasons[sample] is reason
    end = bench.trails[key].end
    assert isinstance(end, RequestFinished)
    assert end.report.decode_tokens == sum(map(len, expected)) - 4
    assert sum(isinstance(one, RequestFinished) for one in bench.log) == 1
    bench.check_idle()


@pytest.mark.parametrize("ended", [(0,), (1,), (0, 2), (0, 1), (0, 1, 2)])
def test_answers_that_end_with_their_first_token(ended: tuple[int, ...]):
    first = [text[0] for text in said(PROMPT, 9, 3)]
    assert len(set(first)) == 3
    stop = tuple(first[sample] for sample in ended)
    bench = Bench(num_blocks=64)
    key = bench.submit(PROMPT, 9, stop=stop, n=3, **HOT)
    bench.run()
    assert answers(bench, key=key) == said(PROMPT, 9, 3, stop)
    bench.check_idle()


@pytest.mark.parametrize("length", [3, 4, 37])
@pytest.mark.parametrize("ended", [(), (0,), (1,), (0, 2)])
def test_split_is_unsplit_for_every_answer(length: int, ended: tuple[int, ...]):
    prompt = PROMPT[:length]
    stop = tuple(said(prompt, 9, 3)[sample][0] for sample in ended)
    context, generation = Bench("context", num_blocks=64), Bench("generation", num_blocks=64)
    key = context.submit(prompt, 9, stop=stop, n=3, **HOT)
    context.run()
    done = context.trails[key].end
    assert isinstance(done, ContextDone)
    assert [chunk.sample for chunk in done.first_tokens] == [0, 1, 2]
    assert not [one for one in context.log if isinstance(one, RequestTokens)]
    assert len(context.messages(SendOffer)) == 1
    phase = ContextPhase(key, done.first_tokens, length, HOLDER)
    generation.submit(prompt, 9, key=key, phase=phase, stop=stop, n=3, **HOT)
    generation.run()
    assert len(generation.messages(ReceiveRequest)) == 1
    copy_cache(context, generation, key)
    generation.deliver_receive(key)
    context.deliver_send(key)
    generation.run()
    context.run()
    assert answers(context, generation, key=key) == said(prompt, 9, 3, stop)
    assert not generation.trails[key].answers.keys() & set(ended), "what ended at the context is not said again"
    context.check_idle()
    generation.check_idle()


def test_no_hand_off_when_the_first_tokens_end_every_answer():
    context = Bench("context")
    key = context.submit(PROMPT, 1, n=3, **HOT)
    context.run()
    assert isinstance(context.trails[key].end, RequestFinished)
    assert answers(context, key=key) == said(PROMPT, 1, 3)
    assert not context.messages(SendOffer)
    context.check_idle()


def test_answers_with_several_first_tokens_go_on_behind_them():
    prompt, n = PROMPT[:5], 2
    expected = said(prompt, 9, n)
    context, generation = Bench("context"), Bench("generation")
    key = context.submit(prompt, 9, n=n, **HOT)
    context.run()
    chunks = (Tokens(tuple(expected[0][:4])), Tokens(tuple(expected[1][:2]), sample=1))
    generation.submit(prompt, 9, key=key, phase=ContextPhase(key, chunks, 5, HOLDER), n=n, **HOT)
    generation.run()
    copy_cache(context, generation, key)
    generation.deliver_receive(key)
    generation.run()
    assert answers(generation, key=key) == [expected[0][4:], expected[1][2:]]
    generation.check_idle()


def test_the_youngest_answer_is_preempted_and_nobodys_text_changes():
    bench = Bench(num_blocks=14, max_running=6, prefix_caching=False)
    old = bench.submit(PROMPT[:9], 20, n=2, **HOT)
    young = bench.submit(PROMPT[3:9], 20, n=3, **HOT)
    held: list[list[int]] = []
    while bench.step():
        held.append([bench.blocks.held((young, sample)) for sample in range(3)])
    assert any(0 < sum(count > 0 for count in counts) < 3 for counts in held), "one answer of three gave way"
    assert answers(bench, key=old) == said(PROMPT[:9], 20, 2)
    assert answers(bench, key=young) == said(PROMPT[3:9], 20, 3)
    bench.check_idle()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
def test_abort_takes_every_answer(steps: int):
    bench = Bench(num_blocks=40, max_running=6, max_batch_tokens=16)
    keys = [bench.submit(PROMPT, 10, n=3, **HOT), bench.submit(PROMPT[:7], 10, n=2, **HOT)]
    for _ in range(steps):
        bench.step()
    for key in keys:
        bench.abort(key)
        end = bench.trails[key].end
        assert isinstance(end, RequestFinished)
        assert isinstance(end.error, RequestCancelled)
        assert bench.trails[key].released
    bench.check_idle()


def test_an_answer_without_usable_logits_fails_its_request_only():
    texts, good_text = said([65] * 5, 9, 2), said([66] * 37, 9, 2)
    poison = next(
        token for token in texts[1][2:] if not any(token in text for text in (texts[0], *good_text, [65, 66]))
    )
    bench = Bench(num_blocks=64, poison=poison)
    bad, good = bench.submit([65] * 5, 9, n=2, **HOT), bench.submit([66] * 37, 9, n=2, **HOT)
    bench.run()
    end = bench.trails[bad].end
    assert isinstance(end, RequestFinished)
    assert isinstance(end.error, InternalError)
    assert answers(bench, key=good) == good_text
    bench.check_idle()


def test_both_answers_of_a_request_may_fail_in_one_step():
    bench = Bench(num_blocks=64, prefix_caching=False)
    key = bench.submit(PROMPT[:5], 9, n=2, **HOT)
    bench.step()
    plan = bench.scheduler.plan(bench.now)
    plan.make_copies(bench.runner)
    assert len(plan.rows) == 2
    bench.scheduler.apply(plan, [(), ()], {0, 1}, bench.now)
    assert bench.trails[key].released
    bench.check_idle()


def test_answers_take_places_in_the_batch_before_they_part():
    bench = Bench(num_blocks=64, max_running=4)
    first, second = bench.submit(PROMPT[:5], 9, n=3, **HOT), bench.submit(PROMPT[:5], 9, n=2, **HOT)
    bench.step()
    assert bench.scheduler.load().waiting_requests == 1
    while bench.step():
        assert bench.rows[-1] <= 4
    assert answers(bench, key=first) == said(PROMPT[:5], 9, 3)
    assert answers(bench, key=second) == said(PROMPT[:5], 9, 2)
    bench.check_idle()


@pytest.mark.parametrize(
    ("prompt", "n", "words"),
    [(4, 5, "engine.max_running"), (30, 4, "4 answers to 30 prompt tokens take 11 KV blocks"), (4, 17, "1 to 16")],
)
def test_more_answers_than_can_ever_run_are_refused(prompt: int, n: int, words: str):
    bench = Bench(num_blocks=10, max_running=4)
    with pytest.raises(InvalidRequest, match=words) as caught:
        bench.submit(PROMPT[:prompt], 2, n=n)
    assert caught.value.field == "sampling.n"


def test_a_context_instance_needs_no_room_for_what_it_does_not_decode():
    context = Bench("context", num_blocks=10, max_running=4)
    context.submit(PROMPT[:30], 2, n=4, **HOT)
    context.run()
    assert len(context.messages(SendOffer)) == 1


@pytest.mark.parametrize(
    "chunks",
    [
        (Tokens((65,)),),
        (Tokens((65,)), Tokens((65,), sample=2)),
        (Tokens((65,), sample=1), Tokens((65,))),
        (Tokens((65,), reason=FinishReason.STOP), Tokens((66,), sample=1, reason=FinishReason.STOP)),
    ],
)
def test_a_context_phase_that_does_not_name_every_answer_once_is_refused(chunks: tuple[Tokens, ...]):
    bench, key = Bench("generation"), new_key()
    with pytest.raises(InvalidRequest) as caught:
        bench.submit([65], 4, key=key, phase=ContextPhase(key, chunks, 1, HOLDER), n=2)
    assert caught.value.field == "context_phase.first_tokens"

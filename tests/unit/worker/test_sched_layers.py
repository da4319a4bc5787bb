"""Layer by layer in the scheduler: the end of a prompt is on offer before the step that computes it, and only it."""

from __future__ import annotations

from isthmus_core.errors import InternalError
from isthmus_worker.scheduler import ContextDone, RequestFinished
from kvtransfer.ports import CancelTransfer, SendFirstTokens, SendOffer, TransferFailure
from sched_bench import Bench

PROMPT = list(range(40, 77))


def _offers(bench: Bench) -> list[SendOffer]:
    return [one for one in bench.messages(SendOffer) if isinstance(one, SendOffer)]


def test_the_end_of_a_prompt_is_offered_with_the_step_that_computes_it():
    bench = Bench("context", max_batch_tokens=16, layer_wise=True)
    key = bench.submit(PROMPT, 4, at_once=True)
    while bench.trails[key].end is None:
        bench.step()
    offers = _offers(bench)
    assert [(one.tokens.begin, one.tokens.end, one.more, one.step) for one in offers] == [
        (0, 16, True, 0),
        (16, 32, True, 0),
        (32, 37, False, 3),
    ]
    kinds = [type(one) for one in bench.log if isinstance(one, SendOffer | SendFirstTokens | ContextDone)]
    assert kinds == [SendOffer, SendOffer, SendOffer, SendFirstTokens, ContextDone], "offered once, before it is drawn"
    bench.deliver_send(key)
    bench.run()
    assert bench.trails[key].released


def test_a_prompt_of_one_step_is_offered_before_anything_is_computed():
    bench = Bench("context", max_batch_tokens=64, layer_wise=True)
    bench.submit(PROMPT, 4, at_once=True)
    bench.scheduler.plan(0.0)
    (offer,) = _offers(bench)
    assert (offer.tokens.end, offer.more, offer.step) == (37, False, bench.layers.next_step)


def test_a_step_that_fails_withdraws_what_was_offered_and_keeps_the_pages_until_it_is_settled():
    bench = Bench("context", max_batch_tokens=64, poison=60, layer_wise=True)
    key = bench.submit(PROMPT, 4, at_once=True)
    bench.step()
    end = bench.trails[key].end
    assert isinstance(end, RequestFinished)
    assert isinstance(end.error, InternalError)
    assert any(isinstance(one, CancelTransfer) for one in bench.log)
    assert not any(isinstance(one, SendFirstTokens) for one in bench.log)
    assert not bench.trails[key].released
    bench.deliver_send(key, TransferFailure.CANCELLED)
    bench.run()
    assert bench.trails[key].released


def test_a_leg_that_nobody_waits_for_is_offered_when_it_is_done():
    bench = Bench("context", max_batch_tokens=64, layer_wise=True)
    bench.submit(PROMPT, 4)
    bench.scheduler.plan(0.0)
    assert _offers(bench) == []

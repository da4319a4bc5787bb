"""Both legs of a split request: offers, receives, failures, aborts, blocks that stay while a peer may touch them."""

from __future__ import annotations

import grpc
import pytest

from isthmus_core.errors import HandoffExpired, InternalError, RequestCancelled, TransferFailed
from isthmus_worker.engine import ContextPhase, FinishReason, KvEvent, Tokens
from isthmus_worker.scheduler import ContextDone, RequestFinished
from kvtransfer.ports import HandoffStats, ReceiveOutcome, ReceiveRequest, SendOffer, TransferFailure, TransferStats
from mock_oracle import oracle
from sched_bench import HOLDER, Bench, copy_cache

PROMPT = [32 + index * 7 % 95 for index in range(37)]
FAILURES = [one for one in TransferFailure if one is not TransferFailure.NONE]


def offered(prompt=PROMPT, max_tokens: int = 9) -> tuple[Bench, ContextPhase]:
    """A context instance that holds the pages of one prompt."""
    bench = Bench("context")
    key = bench.submit(prompt, max_tokens)
    bench.run()
    done = bench.trails[key].end
    assert isinstance(done, ContextDone)
    return bench, ContextPhase(key, done.first_tokens, len(prompt), HOLDER)


def first_of(phase: ContextPhase) -> tuple[int, ...]:
    """First tokens of the first answer."""
    return phase.first_tokens[0].ids


def receiving(phase: ContextPhase, prompt=PROMPT, max_tokens: int = 9, **options) -> Bench:
    """A generation instance that waits for the cache of a prompt."""
    bench = Bench("generation", **options)
    bench.submit(prompt, max_tokens, key=phase.key, phase=phase)
    bench.run()
    assert bench.messages(ReceiveRequest)
    return bench


@pytest.mark.parametrize("length", [1, 3, 4, 5, 15, 16, 17, 37])
def test_split_is_unsplit(length: int):
    context, phase = offered(PROMPT[:length])
    generation = receiving(phase, PROMPT[:length])
    copy_cache(context, generation, phase.key)
    generation.deliver_receive(phase.key)
    context.deliver_send(phase.key)
    generation.run()
    context.run()
    assert [*first_of(phase), *generation.trails[phase.key].tokens] == oracle(PROMPT[:length], 9)
    end = generation.trails[phase.key].end
    assert isinstance(end, RequestFinished)
    assert generation.trails[phase.key].reason is FinishReason.LENGTH
    assert end.report.decode_tokens == 8
    context.check_idle()
    generation.check_idle()


def test_the_context_leg_says_offer_and_done_and_keeps_only_then_the_pages():
    context, phase = offered()
    assert [type(one) for one in context.log if not isinstance(one, KvEvent)] == [SendOffer, ContextDone]
    offer = context.messages(SendOffer)[0]
    assert (offer.tokens.begin, offer.tokens.end) == (0, len(PROMPT))
    assert len(offer.sources[0].blocks) == 10
    load = context.scheduler.load()
    assert (load.running_requests, load.held_handoffs, load.used_blocks) == (0, 1, 10)
    assert not context.trails[phase.key].released
    context.deliver_send(phase.key)
    assert context.blocks.used == 10, "outcomes are applied between steps only"
    context.run()
    context.check_idle()


@pytest.mark.parametrize("why", ["max_tokens", "stop"])
def test_no_hand_off_when_the_first_token_ends_the_request(why: str):
    context = Bench("context")
    first = oracle(PROMPT, 1)[0]
    key = context.submit(PROMPT, 1 if why == "max_tokens" else 9, stop=[] if why == "max_tokens" else [first])
    context.run()
    end = context.trails[key].end
    assert isinstance(end, RequestFinished)
    assert context.trails[key].reason is (FinishReason.LENGTH if why == "max_tokens" else FinishReason.STOP)
    assert not context.messages(SendOffer)
    context.check_idle()


def test_only_the_pages_of_the_prompt_are_exposed():
    _, phase = offered(PROMPT[:16])
    generation = receiving(phase, PROMPT[:16])
    request = generation.messages(ReceiveRequest)[0]
    assert (request.tokens.begin, request.tokens.end) == (0, 16)
    assert len(request.destinations[0].blocks) == 4
    assert generation.blocks.used == 5, "there is room for the first token of the decoding already"
    assert request.holder == HOLDER
    assert not generation.rows, "nothing is computed before the cache is here"


@pytest.mark.parametrize("first", [1, 2, 5])
def test_all_first_tokens_of_the_context_leg_are_gone_on_from(first: int):
    context, phase = offered()
    expected = oracle(PROMPT, 9)
    phase = ContextPhase(phase.key, (Tokens(tuple(expected[:first])),), len(PROMPT), HOLDER)
    generation = receiving(phase)
    copy_cache(context, generation, phase.key)
    generation.deliver_receive(phase.key)
    generation.run()
    assert generation.trails[phase.key].tokens == expected[first:]
    generation.check_idle()


def test_a_request_that_receives_does_not_stop_the_others():
    context, phase = offered()
    generation = receiving(phase)
    other_context, other = offered(PROMPT[:9])
    generation.submit(PROMPT[:9], 9, key=other.key, phase=other)
    generation.run()
    copy_cache(other_context, generation, other.key)
    generation.deliver_receive(other.key)
    generation.run()
    assert [*first_of(other), *generation.trails[other.key].tokens] == oracle(PROMPT[:9], 9)
    assert not generation.trails[phase.key].tokens
    copy_cache(context, generation, phase.key)
    generation.deliver_receive(phase.key)
    generation.run()
    generation.check_idle()


def test_a_preempted_generation_leg_computes_its_cache_again_and_asks_nobody():
    contexts = [offered([65 + index] * 4, 20) for index in range(3)]
    generation = Bench("generation", num_blocks=8)
    for index, (_, phase) in enumerate(contexts):
        generation.submit([65 + index] * 4, 20, key=phase.key, phase=phase)
    generation.run()
    for context, phase in contexts:
        copy_cache(context, generation, phase.key)
        generation.deliver_receive(phase.key)
    generation.run()
    for index, (_, phase) in enumerate(contexts):
        assert [*first_of(phase), *generation.trails[phase.key].tokens] == oracle([65 + index] * 4, 20)
    assert max(generation.rows) == 3
    # The same steps without preemption: 19 of them.
    assert len(generation.rows) > 19
    assert len(generation.messages(ReceiveRequest)) == 3
    generation.check_idle()


def test_pages_that_are_exposed_are_never_preempted():
    context, phase = offered([65] * 4, 24)
    generation = receiving(phase, [65] * 4, 24, num_blocks=7)
    late_context, late = offered([66] * 12, 4)
    generation.submit([66] * 12, 4, key=late.key, phase=late)
    copy_cache(context, generation, phase.key)
    generation.deliver_receive(phase.key)
    generation.run()
    assert not generation.trails[phase.key].released, "it waits for pages that only the hub can settle"
    assert late.key in generation.exposed
    copy_cache(late_context, generation, late.key)
    generation.deliver_receive(late.key)
    generation.run()
    assert [*first_of(phase), *generation.trails[phase.key].tokens] == oracle([65] * 4, 24)
    assert [*first_of(late), *generation.trails[late.key].tokens] == oracle([66] * 12, 4)
    generation.check_idle()


@pytest.mark.parametrize("failure", FAILURES)
def test_a_failed_receive_is_told_at_once_and_its_pages_wait_for_settlement(failure: TransferFailure):
    _, phase = offered()
    generation = receiving(phase)
    generation.deliver_receive(phase.key, failure, settled=False)
    generation.run()
    end = generation.trails[phase.key].end
    assert isinstance(end, RequestFinished)
    expired = failure in (TransferFailure.EXPIRED, TransferFailure.NOT_HELD)
    assert isinstance(end.error, HandoffExpired if expired else TransferFailed)
    assert end.error.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.FAILED_PRECONDITION)
    assert not generation.trails[phase.key].released
    assert generation.blocks.used == 10
    assert generation.scheduler.load().running_requests == 0
    generation.abort(phase.key)
    assert generation.blocks.used == 10, "an abort does not settle anything"
    generation.deliver_receive(phase.key, failure)
    generation.run()
    generation.check_idle()


def test_a_failure_that_is_settled_frees_at_once():
    _, phase = offered()
    generation = receiving(phase)
    generation.deliver_receive(phase.key, TransferFailure.PEER_UNKNOWN)
    generation.run()
    end = generation.trails[phase.key].end
    assert isinstance(end, RequestFinished)
    assert isinstance(end.error, TransferFailed)
    assert "context-0" in end.error.message
    generation.check_idle()


@pytest.mark.parametrize("outcome", [TransferFailure.NONE, TransferFailure.CANCELLED, TransferFailure.TIMED_OUT])
@pytest.mark.parametrize("unsettled_first", [False, True])
def test_abort_while_receiving_keeps_the_pages_until_they_are_settled(outcome: TransferFailure, unsettled_first: bool):
    _, phase = offered()
    generation = receiving(phase)
    generation.abort(phase.key)
    end = generation.trails[phase.key].end
    assert isinstance(end, RequestFinished)
    assert isinstance(end.error, RequestCancelled)
    generation.abort(phase.key)
    generation.run()
    assert generation.cancels(phase.key) == 1
    assert generation.blocks.used == 10
    if unsettled_first and outcome is not TransferFailure.NONE:
        generation.deliver_receive(phase.key, outcome, settled=False)
        generation.run()
        assert generation.blocks.used == 10
    generation.deliver_receive(phase.key, outcome)
    generation.run()
    assert not generation.trails[phase.key].tokens
    generation.check_idle()


def test_abort_of_an_offer_withdraws_it_and_keeps_the_pages_until_no_write_can_read_them():
    context, phase = offered()
    context.abort(phase.key)
    context.run()
    assert context.cancels(phase.key) == 1
    assert context.blocks.used == 10
    assert isinstance(context.trails[phase.key].end, ContextDone), "the leg had ended well before"
    context.deliver_send(phase.key, TransferFailure.CANCELLED)
    context.run()
    context.check_idle()


@pytest.mark.parametrize("failure", [TransferFailure.EXPIRED, TransferFailure.PEER_LOST])
def test_an_offer_that_nobody_takes_is_released(failure: TransferFailure):
    context, phase = offered()
    context.deliver_send(phase.key, failure)
    context.run()
    context.check_idle()


def test_abort_before_the_pages_are_exposed_frees_at_once():
    _, phase = offered()
    generation = Bench("generation")
    generation.submit(PROMPT, 9, key=phase.key, phase=phase)
    generation.abort(phase.key)
    assert not generation.log[2:]
    generation.check_idle()


def test_the_report_names_the_hand_off():
    context, phase = offered()
    generation = receiving(phase)
    copy_cache(context, generation, phase.key)
    del generation.exposed[phase.key]
    stats = HandoffStats(TransferStats(bytes=640, descriptors=10, path="loopback"), total=0.25)
    generation.now = 5.0
    generation.transceiver.deliver(ReceiveOutcome(phase.key, settled=True, stats=stats))
    generation.run()
    end = generation.trails[phase.key].end
    assert end is not None
    report = end.report
    assert report.handoff is not None
    assert (report.handoff.stats, report.handoff.total) == (stats.writers, 0.25)
    assert (report.generation_queue, report.prefill, report.context_queue) == (0.0, None, None)
    assert (report.decode, report.decode_tokens) == (8.0, 8)


def test_held_pages_count_against_admission():
    context = Bench("context", num_blocks=12)
    first = context.submit(PROMPT, 9)
    second = context.submit(PROMPT[1:21], 9)
    context.run()
    assert context.trails[second].end is None
    assert context.scheduler.load().waiting_requests == 1
    context.deliver_send(first)
    context.run()
    assert isinstance(context.trails[second].end, ContextDone)


def test_an_outcome_for_a_request_that_is_not_in_a_hand_off_is_a_broken_promise():
    generation = Bench("generation")
    _, phase = offered()
    generation.submit(PROMPT, 9, key=phase.key, phase=phase)

    class Confused:
        def check_bindings(self):
            return []

        def check_context_transfer_status(self, at_least: int = 0, timeout_s: float = 0.0):
            return []

        def check_gen_transfer_status(self, at_least: int = 0, timeout_s: float = 0.0):
            return [ReceiveOutcome(phase.key, settled=True)]

    generation.scheduler._transfers._handoffs._transceiver = Confused()
    with pytest.raises(InternalError, match="outcome of a hand-off"):
        generation.scheduler.poll()

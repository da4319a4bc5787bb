"""generation_first in the scheduler when a hand-off fails, or what is heard about it is wrong."""

from __future__ import annotations

import pytest

from isthmus_core.errors import ScheduleUnsupported, TransferFailed
from isthmus_worker.engine import FinishReason, Tokens
from isthmus_worker.scheduler import RequestFinished
from isthmus_worker.wire.tokens import first_tokens_to_bytes
from kvtransfer.config import OnFailure
from kvtransfer.ports import BindFailed, Bound, FirstTokensArrived, ReceiveRequest, TransferFailure
from kvtransfer.transceiver.policy import HandoffPolicy
from sched_bench import Bench
from sched_pair import Pair
from sched_three import HOT, PROMPT, check_text, first_sampled

FAIL = HandoffPolicy(retries=1, on_failure=OnFailure.FAIL)
RECOMPUTE = HandoffPolicy(retries=1, on_failure=OnFailure.RECOMPUTE)


@pytest.mark.parametrize("turns", [2, 3, 20])
def test_a_receive_that_failed_is_repeated_on_fresh_pages(turns: int):
    """While the prompt is computed, and after its first tokens are known."""
    pair = Pair(num_blocks=64, max_batch_tokens=10, policy=RECOMPUTE, write=False)
    key = pair.submit(PROMPT, 9, **HOT)
    for _ in range(turns):
        pair.turn()
    pair.fail(key, may_retry=True)
    pair.generation.step()
    first, second = (set(one.destinations[0].blocks.tolist()) for one in pair.generation.messages(ReceiveRequest))
    assert not first & second
    pair.write = True
    pair.run()
    check_text(pair, key)
    end = pair.generation.trails[key].end
    assert isinstance(end, RequestFinished)
    assert end.report.handoff_failures == ("as told by the test",)
    assert not end.report.recomputed
    pair.check_idle()


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("turns", [2, 3, 20])
@pytest.mark.parametrize("ended", [None, 0, 1])
def test_then_the_generation_computes_the_prompt_once_the_first_tokens_are_known(
    settled: bool, turns: int, ended: int | None
):
    stop = () if ended is None else (first_sampled()[ended],)
    pair = Pair(num_blocks=64, max_batch_tokens=10, policy=RECOMPUTE, write=False)
    key = pair.submit(PROMPT, 9, stop=stop, **HOT)
    for _ in range(turns):
        pair.turn()
    pair.fail(key, settled=settled)
    while pair.turn():
        load = pair.generation.scheduler.load()
        assert load.waiting_requests + load.running_requests <= 1, "counted once wherever it is"
    check_text(pair, key, stop)
    end = pair.generation.trails[key].end
    assert isinstance(end, RequestFinished)
    assert end.report.recomputed
    assert len(pair.generation.messages(ReceiveRequest)) == 1
    if not settled:
        assert not pair.generation.trails[key].released, "a peer may still write"
        pair.generation.deliver_receive(key, TransferFailure.WRITE_FAILED)
    pair.context.abort(key)
    pair.run()
    pair.check_idle()


@pytest.mark.parametrize("settled", [True, False])
@pytest.mark.parametrize("policy", [FAIL, RECOMPUTE])
@pytest.mark.parametrize("who", ["context", "generation"])
def test_a_leg_dropped_after_its_hand_off_failed_leaves_nothing(settled: bool, policy: HandoffPolicy, who: str):
    pair = Pair(max_batch_tokens=10, policy=policy, write=False)
    key = pair.submit(PROMPT, 9)
    pair.turn()
    pair.turn()
    pair.fail(key, settled=settled)
    pair.generation.step()
    if policy is FAIL and settled:
        assert pair.generation.cancels(key) == 1, "the context instance need not say the first tokens"
    getattr(pair, who).abort(key)
    pair.run()
    assert pair.generation.trails[key].end is not None
    if not settled:
        assert not pair.generation.trails[key].released
        pair.generation.deliver_receive(key, TransferFailure.WRITE_FAILED)
        pair.run()
    pair.context.abort(key)
    pair.run()
    pair.check_idle()


# --- news that are wrong, late or bad


@pytest.mark.parametrize(
    ("failure", "kind"),
    [(TransferFailure.PEER_UNKNOWN, ScheduleUnsupported), (TransferFailure.TIMED_OUT, TransferFailed)],
)
def test_a_leg_that_waits_in_vain_says_why(failure: TransferFailure, kind: type[Exception]):
    generation = Bench("generation")
    key = generation.submit(PROMPT, 9, at_once=True)
    generation.transceiver.deliver(BindFailed(key, failure, "for a reason"))
    generation.run()
    error = generation.trails[key].end.error
    assert type(error) is kind
    assert "for a reason" in error.message
    generation.check_idle()


BAD_FIRST = {
    "no message": b"\xff\xff",
    "too few answers": first_tokens_to_bytes([Tokens((65,))]),
    "no token": first_tokens_to_bytes([Tokens((), sample) for sample in range(3)]),
    "out of the vocabulary": first_tokens_to_bytes([Tokens((1 << 20,), sample) for sample in range(3)]),
    "more than max_tokens": first_tokens_to_bytes(
        [Tokens((65,) * 10, 0, reason=FinishReason.STOP), Tokens((65,), 1), Tokens((65,), 2)]
    ),
}


@pytest.mark.parametrize("name", BAD_FIRST)
def test_first_tokens_that_can_not_be_right_end_the_leg_and_not_the_engine(name: str):
    generation = Bench("generation", num_blocks=64)
    key = generation.submit(PROMPT, 9, at_once=True, **HOT)
    generation.transceiver.deliver(Bound(key, 0))
    generation.run()
    generation.transceiver.deliver(FirstTokensArrived(key, BAD_FIRST[name]))
    generation.run()
    assert generation.trails[key].end.error is not None
    generation.deliver_receive(key, TransferFailure.CANCELLED)
    generation.run()
    generation.check_idle()

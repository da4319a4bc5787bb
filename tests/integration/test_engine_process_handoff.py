"""A context and a generation engine process, real writes between them, the test as both hubs."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

from engine_pair import EnginePair, first_of
from engine_process import engines, settings
from isthmus_worker.engine import (
    EngineLoad,
    Finished,
    Sampling,
)
from isthmus_worker.wire.engine_frames import Abort, LegReleased
from kvtransfer.ports import (
    CancelTransfer,
    ReceiveOutcome,
    ReceiveRequest,
    SendOutcome,
    TransferFailure,
    WriterOutcome,
)
from mock_oracle import oracle

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(not (find_spec("nixl_cu12") or find_spec("nixl_cu13")), reason="NIXL is not installed"),
]
PROMPT = [32 + index * 7 % 95 for index in range(100)]


@pytest.fixture(name="pair")
def _pair() -> Iterator[Callable[..., EnginePair]]:
    with engines() as make:
        yield lambda **engine: EnginePair(make, settings(engine={"num_blocks": 64, **engine}))


def test_split_requests_say_what_one_instance_would(pair: Callable[..., EnginePair]):
    both = pair()
    for number, length in enumerate((1, 15, 16, 17, 100, 600)):
        prompt = [32 + index * 7 % 95 for index in range(length)]
        leg, offer = both.prefill(prompt, 12, number)
        assert first_of(leg) == oracle(prompt, 1)
        notice = both.hand_off(leg, offer)
        assert [*first_of(leg), *both.generation.tokens(leg.key)] == oracle(prompt, 12), length
        end = both.generation.finished(leg.key)
        assert isinstance(end, Finished)
        assert end.report.handoff is not None
        assert end.report.handoff.stats.bytes == notice.stats.bytes > 0
        assert end.report.handoff.stats.path.startswith("nixl/")
        assert end.report.decode_tokens == 11
    both.stop()


def test_a_cache_that_did_not_come_changes_the_text(pair: Callable[..., EnginePair]):
    """The proof that the other tests prove something: nothing was written, and the outcome claims it was."""
    both = pair()
    leg, _ = both.prefill(PROMPT, 12)
    both.generation.send(leg)
    both.generation.next_of(ReceiveRequest)
    both.generation.send(ReceiveOutcome(leg.key, settled=True))
    both.generation.next_of(LegReleased)
    assert both.generation.tokens(leg.key) != oracle(PROMPT, 12)[1:]


def test_abort_keeps_the_pages_until_the_hub_says_that_they_are_settled(pair: Callable[..., EnginePair]):
    both = pair()
    leg, offer = both.prefill(PROMPT, 12)
    both.generation.send(leg)
    wanted = both.generation.next_of(ReceiveRequest)
    both.generation.send(Abort(leg.key))
    assert both.generation.next_of(CancelTransfer).key == leg.key
    while both.generation.next_of(EngineLoad).running_requests:
        pass
    load = [event for event in both.generation.events if isinstance(event, EngineLoad)][-1]
    assert load.used_blocks == 7, "a write may be on its way"
    both.write(offer, wanted)
    both.generation.send(ReceiveOutcome(leg.key, True, TransferFailure.CANCELLED))
    both.generation.next_of(LegReleased)
    both.context.send(Abort(leg.key))
    assert both.context.next_of(CancelTransfer).key == leg.key
    both.context.send(SendOutcome(leg.key, TransferFailure.CANCELLED))
    both.context.next_of(LegReleased)
    both.stop()


def test_the_model_computes_while_the_agent_writes(pair: Callable[..., EnginePair]):
    """Decoding of one request goes on while the cache of another is on its way."""
    both = pair(mock={"decode_us": 500})
    first, offer = both.prefill(PROMPT, 200, 1)
    second, second_offer = both.prefill(PROMPT[:40], 20, 2)
    both.generation.send(first, second)
    wanted = both.generation.next_of(ReceiveRequest)
    second_wanted = both.generation.next_of(ReceiveRequest)
    both.write(offer, wanted)
    both.generation.send(ReceiveOutcome(first.key, settled=True))
    both.write(second_offer, second_wanted)
    both.generation.send(ReceiveOutcome(second.key, settled=True))
    both.context.send(SendOutcome(first.key), SendOutcome(second.key))
    for _ in range(2):
        both.generation.next_of(LegReleased)
        both.context.next_of(LegReleased)
    assert both.generation.tokens(first.key) == oracle(PROMPT, 200)[1:]
    assert both.generation.tokens(second.key) == oracle(PROMPT[:40], 20)[1:]
    both.stop()


def test_a_killed_generation_engine_does_not_take_the_context_engine_with_it(pair: Callable[..., EnginePair]):
    both = pair()
    leg, offer = both.prefill(PROMPT, 12)
    both.generation.send(leg)
    wanted = both.generation.next_of(ReceiveRequest)
    os.kill(both.generation.process.pid, signal.SIGKILL)
    assert both.generation.outcome()[0] == -signal.SIGKILL
    notice = both.write(offer, wanted)
    assert notice.outcome is not WriterOutcome.DELIVERED
    assert notice.reason
    both.context.send(SendOutcome(leg.key, TransferFailure.PEER_LOST, notice.reason))
    assert both.context.next_of(LegReleased).key == leg.key
    again, _ = both.prefill(PROMPT, 12, 7)
    both.context.send(SendOutcome(again.key, TransferFailure.EXPIRED))
    both.context.next_of(LegReleased)


def test_a_rank_socket_that_carries_rubbish_ends_the_process_with_the_reason(pair: Callable[..., EnginePair]):
    both = pair()
    both.context.rank.send(b"\xff\xff\xff")
    code, line = both.context.outcome()
    assert code == 4
    assert line.startswith("the transfer agent failed:")


def test_n_answers_go_over_in_one_hand_off(pair: Callable[..., EnginePair]):
    both = pair()
    prompt, hot = PROMPT[:41], {"temperature": 1.0, "seed": 9, "n": 3}
    sampling = Sampling(12, **hot)
    for number in range(2):
        leg, offer = both.prefill(prompt, 12, number, **hot)
        assert leg.context_phase is not None
        assert [chunk.sample for chunk in leg.context_phase.first_tokens] == [0, 1, 2]
        both.hand_off(leg, offer)
        for sample, first in enumerate(leg.context_phase.first_tokens):
            rest = [token for chunk in both.generation.chunks(leg.key, sample) for token in chunk.ids]
            assert [*first.ids, *rest] == oracle(prompt, 12, sampling=sampling, sample=sample)
        assert both.context.finished(leg.key).report.cached_tokens == (0, 32)[number]
        assert both.generation.finished(leg.key).report.cached_tokens == (0, 32)[number], "that was not sent again"
    both.stop()

"""What a router decides by itself: who waits, who is avoided, how a request is divided, which conversation it is of."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from isthmus_core.config import parse_config
from isthmus_core.errors import ConfigError, InvalidRequest, Overloaded
from isthmus_router.admission import Admission
from isthmus_router.affinity import affinity_key, check_session, tenant_of
from isthmus_router.breaker import Breakers
from isthmus_router.chat import Conversation, Turn
from isthmus_router.fair_queue import FairQueue
from isthmus_router.ports import Schedule, Shape
from isthmus_router.requests import ChatInput, TextInput
from isthmus_router.retry import RetryBudget, RetryPolicy
from isthmus_router.rules import AdmissionRule, Rules
from isthmus_router.schedules import LocalPrefillRule, ScheduleRule, Wish


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(1, 50)), max_size=60))
def test_what_was_put_in_comes_out_once_and_each_tenant_keeps_its_order(items: list[tuple[str, float]]) -> None:
    queue: FairQueue[int] = FairQueue()
    for number, (tenant, cost) in enumerate(items):
        queue.push(tenant, number, cost)
    out: list[int] = []
    while (item := queue.pop()) is not None:
        out.append(item)
    assert sorted(out) == list(range(len(items)))
    for tenant in "abc":
        mine = [number for number in out if items[number][0] == tenant]
        assert mine == sorted(mine)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 20), min_size=40, max_size=40), st.lists(st.integers(1, 20), min_size=40, max_size=40))
def test_tenants_that_always_wait_are_served_alike(first: list[int], second: list[int]) -> None:
    queue: FairQueue[tuple[str, int]] = FairQueue()
    for tenant, costs in (("a", first), ("b", second)):
        for number, cost in enumerate(costs):
            queue.push(tenant, (tenant, number), cost)
    served = {"a": 0, "b": 0}
    while queue.waiting("a") and queue.waiting("b"):
        item = queue.pop()
        assert item is not None
        served[item[0]] += (first if item[0] == "a" else second)[item[1]]
        assert abs(served["a"] - served["b"]) <= 40, "at most one item of each"


def test_a_tenant_that_comes_seldom_does_not_wait_behind_one_that_floods() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(1000):
        queue.push("flood", f"flood-{number}", 10)
    for _ in range(5):
        queue.pop()
    queue.push("quiet", "quiet", 10)
    assert "quiet" in (queue.pop(), queue.pop())


def test_what_was_taken_out_does_not_come() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(500):
        queue.push("a", number, 1)
    assert all(queue.remove(number) for number in range(499))
    assert not queue.remove(0)
    assert (len(queue), queue.pop(), queue.pop(), queue.waiting("a")) == (1, 499, None, 0)


RULE = AdmissionRule(max_running=1, max_waiting=3, max_waiting_per_tenant=2, max_wait_s=30.0)


async def test_places_go_round_and_nothing_is_lost() -> None:
    admission = Admission(RULE, Clock())
    await admission.enter("", 1, 5)
    waits = [asyncio.create_task(admission.enter("a", 1, 5)) for _ in range(2)]
    await asyncio.sleep(0)
    waits[0].cancel()
    await asyncio.sleep(0)
    assert (admission.running, admission.waiting) == (1, 1)
    admission.leave()
    await waits[1]
    assert (admission.running, admission.waiting) == (1, 0)
    admission.leave()
    assert admission.running == 0


async def test_a_wait_that_is_cancelled_when_its_turn_comes_passes_the_turn_on() -> None:
    admission = Admission(RULE, Clock())
    await admission.enter("", 1, 5)
    first, second = (asyncio.create_task(admission.enter("a", 1, 5)) for _ in range(2))
    await asyncio.sleep(0)
    admission.leave()
    first.cancel()
    await second
    assert first.cancelled()
    admission.leave()
    assert (admission.running, admission.waiting) == (0, 0)


async def test_a_full_queue_refuses_with_the_time_to_come_back() -> None:
    clock = Clock()
    admission = Admission(RULE, clock)
    await admission.enter("", 1, 5)
    for _ in range(200):
        clock.now += 2.0
        admission.leave()
        await admission.enter("", 1, 5)
    waits = [asyncio.create_task(admission.enter(tenant, 1, 5)) for tenant in "aab"]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as raised:
        admission.check("c")
    assert raised.value.retry_after_s == pytest.approx(8.0, rel=0.01)
    waits[2].cancel()
    await asyncio.sleep(0)
    admission.check("c")
    with pytest.raises(Overloaded, match="tenant 'a'"):
        admission.check("a")
    for wait in waits:
        wait.cancel()
    await asyncio.wait(waits)
    assert admission.waiting == 0


async def test_a_wait_has_an_end() -> None:
    admission = Admission(AdmissionRule(1, 1, 1, max_wait_s=0.01), Clock())
    await admission.enter("", 1, 5)
    with pytest.raises(Overloaded):
        await admission.enter("", 1, 5)
    assert (admission.running, admission.waiting) == (1, 0)


def test_a_breaker_opens_lets_one_through_and_closes() -> None:
    clock = Clock()
    breakers = Breakers(clock, threshold=3, cool_down_s=2.0)
    assert [breakers.failed(b"x") for _ in range(3)] == [False, False, True]
    assert breakers.open() == (b"x",)
    clock.now += 2.0
    assert breakers.open() == ()
    assert breakers.failed(b"x"), "one failure is enough the second time"
    clock.now += 3.9
    assert breakers.open() == (b"x",), "for twice as long"
    clock.now += 0.2
    breakers.succeeded(b"x")
    assert [breakers.failed(b"x") for _ in range(3)] == [False, False, True]


def test_a_success_in_between_keeps_a_breaker_closed() -> None:
    breakers = Breakers(Clock(), threshold=2)
    for _ in range(5):
        assert not breakers.failed(b"x")
        breakers.succeeded(b"x")
    assert breakers.open() == ()


def test_further_tries_are_a_share_of_the_requests() -> None:
    clock = Clock()
    budget = RetryBudget(0.25, clock, burst=2.0, refill_per_s=0.5)
    assert [budget.take() for _ in range(3)] == [True, True, False]
    for _ in range(4):
        budget.request()
    assert [budget.take(), budget.take()] == [True, False]
    clock.now += 2.0
    assert [budget.take(), budget.take()] == [True, False]
    for _ in range(1000):
        budget.request()
    assert [budget.take() for _ in range(3)] == [True, True, False]


def test_the_second_try_comes_at_once_and_later_ones_wait_longer_and_longer() -> None:
    policy = RetryPolicy(pause_s=0.1, longest_pause_s=0.3)
    assert [policy.pause(failures, 0.999999) for failures in (1, 2, 3, 4, 9)] == pytest.approx(
        [0.0, 0.1, 0.2, 0.3, 0.3], abs=1e-5
    )
    assert policy.pause(3, 0.0) == pytest.approx(0.1)


def test_how_a_request_is_divided() -> None:
    early, late = Schedule.GENERATION_FIRST, Schedule.CONTEXT_FIRST
    by_length = ScheduleRule.of("by_length", 100)
    assert [by_length.decide(None, tokens)[0] for tokens in (99, 100)] == [late, early]
    assert ScheduleRule.of("generation_first", 100).decide(None, 1) == (early, Shape.ANY)
    assert ScheduleRule.of("context_first", 100).decide(None, 1000) == (late, Shape.ANY)
    assert [by_length.decide(wish, 1000) for wish in Wish] == [
        (late, Shape.SPLIT),
        (early, Shape.SPLIT),
        (late, Shape.UNSPLIT),
    ]


def test_a_prompt_is_computed_where_it_is_decoded_when_that_is_cheaper() -> None:
    rule = LocalPrefillRule(True, prefill_us_per_token=50.0, handoff_us=3000.0, handoff_us_per_token=1.0)
    assert [rule.most_uncached(tokens) for tokens in (10, 1000, 10_000)] == [10, 80, 260]
    assert LocalPrefillRule(False).most_uncached(10) == 0


def conversation(*turns: tuple[str, str]) -> ChatInput:
    return ChatInput(Conversation(tuple(Turn(*turn) for turn in turns)))


def test_a_growing_conversation_keeps_its_key() -> None:
    opening = (("system", "be brief"), ("user", "hello"))
    key = affinity_key("", "", conversation(*opening))
    assert len(key) == 16
    assert affinity_key("", "", conversation(*opening, ("assistant", "hi"), ("user", "more"))) == key
    assert affinity_key("", "", conversation(("system", "be brief"), ("user", "hullo"))) != key
    assert affinity_key("", "another tenant", conversation(*opening)) != key


def test_a_named_session_is_a_conversation_whatever_is_said() -> None:
    key = affinity_key("s-1", "", TextInput("x"))
    assert key == affinity_key("s-1", "", conversation(("user", "y")))
    assert key != affinity_key("s-1", "t", TextInput("x"))
    assert affinity_key("", "", TextInput("x")) == b""
    with pytest.raises(InvalidRequest):
        check_session("s" * 257, "x-session-id")


def test_a_tenant_is_who_the_header_names_or_who_has_the_key() -> None:
    assert tenant_of("team", "Bearer secret") == "team"
    by_key = tenant_of("", "Bearer secret")
    assert by_key == tenant_of("", "secret")
    assert by_key.startswith("key-")
    assert "secret" not in by_key
    assert tenant_of("", "") == ""


def test_the_rules_are_those_of_the_configuration() -> None:
    config = parse_config(
        {"router": {"schedule": "by_length", "generation_first_tokens": 7, "retry": {"max_attempts": 9}}}
    )
    rules = Rules.of(config.router)
    assert (rules.schedule.generation_first_from, rules.retry.max_attempts) == (7, 9)
    with pytest.raises(ConfigError, match="policy"):
        parse_config({"router": {"policy": "round_robin", "local_prefill": {"enabled": True}}})

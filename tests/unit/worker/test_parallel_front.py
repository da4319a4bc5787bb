"""Attention-dp groups in one instance: requests are dealt out, steps are joined; from outside it is one engine."""

from __future__ import annotations

from collections import Counter

import pytest

from isthmus_core.config import parse_config
from isthmus_core.errors import DuplicateRequest, InvalidRequest
from isthmus_worker.engine import EngineRequest, KvEvent, RequestType, Sampling
from isthmus_worker.engine_process.build import build_front
from isthmus_worker.engine_process.load import load_model
from isthmus_worker.runner import Drawn
from isthmus_worker.scheduler import RequestFinished, RequestReleased, RequestTokens
from isthmus_worker.scheduler.front import Front, JointPlan
from kvtransfer.ports import ReceiveOutcome
from sched_bench import new_key


class World:
    """A front of two groups over a cache of 16 blocks each; `said` is what it has emitted."""

    def __init__(self, role: str = "context_and_generation") -> None:
        settings = {
            "engine": {"kind": "mock", "num_blocks": 16, "max_running": 4, "mock": {"max_model_len": 200}},
            "model": {"name": "mock"},
            "worker": {"role": role},
        }
        sizes = {"tensor_parallel_size": 2, "data_parallel_size": 2}
        self.said: list[object] = []
        # The mock has one rank: its groups are two schedulers that never meet a model here.
        model = load_model(parse_config(settings))
        self.front: Front = build_front(parse_config({**settings, "parallel": sizes}), model, self)  # type: ignore[arg-type]

    def emit(self, message: object) -> None:
        self.said.append(message)

    send = emit

    def submit(self, length: int = 20, max_tokens: int = 3, salt: bytes = b"") -> EngineRequest:
        prompt = tuple(range(32, 32 + length))
        request = EngineRequest(
            new_key(), RequestType.CONTEXT_AND_GENERATION, prompt, Sampling(max_tokens), cache_salt=salt
        )
        self.front.submit(request, 0.0)
        return request

    def step(self) -> JointPlan:
        self.front.poll()
        plan = self.front.plan(0.0)
        drawn = [tuple(Drawn(65 + row.dp_rank) for _ in row.draws) for row in plan.rows]
        self.front.apply(plan, drawn, (), 0.0)
        return plan

    def of(self, kind: type) -> list:
        return [one for one in self.said if isinstance(one, kind)]


def test_requests_are_dealt_out_evenly_and_each_group_keeps_its_own_cache():
    world = World()
    requests = [world.submit() for _ in range(4)]
    plan = world.step()
    assert Counter(row.dp_rank for row in plan.rows) == {0: 2, 1: 2}
    by_group = [
        {int(block) for row in plan.rows if row.dp_rank == group for block in row.blocks[0]} for group in (0, 1)
    ]
    assert by_group[0] & by_group[1], "block ids of the two caches are independent"
    assert world.front.load().running_requests == 4
    assert world.front.load().total_blocks == 32
    while world.front.live:
        world.step()
    tokens = {request.key: [] for request in requests}
    for one in world.of(RequestTokens):
        tokens[one.key] += one.chunk.ids
    # A token names the group that has drawn it: all tokens of a request come from one group.
    assert sorted(tokens.values()) == [[65] * 3, [65] * 3, [66] * 3, [66] * 3]
    assert {one.key for one in world.of(RequestReleased)} == set(tokens)
    world.front.check_idle()


def test_a_prompt_goes_where_its_beginning_is_cached_unless_that_group_has_much_more_to_do():
    world = World()
    fillers = [world.submit(5, 30), world.submit(40, 3)]  # the second one is in group 1
    groups = {row.dp_rank: len(row.token_ids) for row in world.step().rows}
    assert groups == {0: 5, 1: 40}
    while not any(one.key == fillers[1].key for one in world.of(RequestReleased)):
        world.step()
    world.front.abort(fillers[0].key)
    assert not world.front.live
    # Both groups are idle, and the lowest one would be taken; the prompt is cached in the other one.
    at = [world.front._group_of[world.submit(40).key] for _ in range(4)]
    assert at == [1, 1, 0, 1]
    assert world.front._group_of[world.submit(40, salt=b"other").key] == 0


def test_a_group_without_work_joins_with_no_rows():
    world = World()
    world.submit()
    assert {row.dp_rank for row in world.step().rows} == {0}


def test_rows_that_fail_are_told_to_their_group():
    world = World()
    first, second = world.submit(), world.submit()
    plan = world.front.plan(0.0)
    assert [row.dp_rank for row in plan.rows] == [0, 1]
    world.front.apply(plan, [(), (Drawn(66),)], {0}, 0.0)
    (failed,) = world.of(RequestFinished)
    assert failed.key == first.key
    assert failed.error is not None
    assert [one.key for one in world.of(RequestTokens)] == [second.key]


def test_aborts_and_duplicates_find_their_group():
    world = World()
    requests = [world.submit() for _ in range(4)]
    world.step()
    with pytest.raises(DuplicateRequest):
        world.front.submit(requests[3], 0.0)
    for request in requests:
        world.front.abort(request.key)
    assert {one.key for one in world.of(RequestReleased)} == {one.key for one in requests}
    assert not world.front.live
    world.front.check_idle()


def test_a_refused_request_belongs_to_no_group():
    world = World()
    request = EngineRequest(new_key(), RequestType.CONTEXT_ONLY, (1,), Sampling(1))
    with pytest.raises(InvalidRequest):
        world.front.submit(request, 0.0)
    assert not world.front._group_of


def test_a_block_is_gone_only_when_no_group_has_it_any_more():
    """Both groups store the same prompt; each evicts it for another one."""
    world = World()
    heard = world.front._heard
    heard(KvEvent((b"a" * 16, b"b" * 16)))
    heard(KvEvent((b"a" * 16,)))
    heard(KvEvent((), (b"a" * 16,)))
    heard(KvEvent((), (b"a" * 16, b"b" * 16)))
    assert world.of(KvEvent) == [KvEvent((b"a" * 16, b"b" * 16)), KvEvent((), (b"a" * 16, b"b" * 16))]


def test_an_outcome_for_an_engine_that_hands_nothing_off_is_a_bug():
    world = World()
    with pytest.raises(Exception, match="hands nothing off"):
        world.front.deliver(ReceiveOutcome(new_key(), settled=True))

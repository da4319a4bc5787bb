"""Arguments, sampling, outputs and block names of the vLLM engine: what can be judged without vLLM."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from isthmus_core import token_ids
from isthmus_core.block_keys import chain
from isthmus_core.config import parse_config
from isthmus_core.errors import ConfigError, RequestCancelled, TransferFailed
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import ContextPhase, EngineRequest, FinishReason, RequestType, Sampling, Tokens
from isthmus_worker.scheduler.events import ContextDone, RequestFinished, RequestTokens
from isthmus_worker.vllm_engine.arguments import engine_arguments
from isthmus_worker.vllm_engine.block_keys import BlockKeys, salt_text
from isthmus_worker.vllm_engine.model import ModelIdentity
from isthmus_worker.vllm_engine.outputs import LegOutput
from isthmus_worker.vllm_engine.sampling import position_seed, prompts, sampling_arguments
from kvtransfer.integrations.vllm.refusals import EngineUnsupported, check_configuration, version_problem
from kvtransfer.ports import Holder

KEY = RequestKey(1 << 50)
HOLDER = Holder("h:1", "context-0", b"i" * 16)
IDENTITY = ModelIdentity(b"w", b"a")


def config(**engine: Any) -> Any:
    return parse_config(
        {
            "model": {"path": "/models/m", "dtype": "float32"},
            "worker": {"role": "context"},
            "engine": {"kind": "vllm", **engine},
            "transfer": {"on_transfer_failure": "fail"},
        }
    )


def test_arguments_are_passed_on_untouched():
    given = {"gpu_memory_utilization": 0.5, "compilation_config": {"level": 0}, "enable_lora": True}
    made = engine_arguments(config(vllm=given, max_model_len=512), IDENTITY, "ipc:///x")
    assert given.items() <= made.items()
    assert (made["model"], made["served_model_name"], made["max_model_len"]) == ("/models/m", "m", 512)
    transfer = made["kv_transfer_config"]
    assert (transfer["kv_role"], transfer["kv_load_failure_policy"]) == ("kv_producer", "fail")
    assert transfer["kv_connector_extra_config"]["fingerprint"] == {"weights": b"w".hex(), "attention": b"a".hex()}
    assert made["kv_events_config"]["endpoint"] == "ipc:///x"


def test_an_instance_that_does_both_has_no_connector():
    both = config().model_copy(update={"worker": parse_config({}).worker})
    assert "kv_transfer_config" not in engine_arguments(both, IDENTITY, "ipc:///x")
    assert "kv_events_config" not in engine_arguments(config(prefix_caching=False), IDENTITY, "ipc:///x")


def test_what_the_worker_decides_is_not_set_twice():
    with pytest.raises(ConfigError, match=r"engine\.vllm\.dtype = 'half': set model\.dtype"):
        engine_arguments(config(vllm={"dtype": "half"}), IDENTITY, "ipc:///x")


def request(kind: RequestType, prompt: tuple[int, ...] = (1, 2, 3), **sampling: Any) -> EngineRequest:
    phase = None
    if kind is RequestType.GENERATION_ONLY:
        phase = ContextPhase(KEY, (Tokens((9,)),), len(prompt), HOLDER)
    return EngineRequest(KEY, kind, prompt, Sampling(sampling.pop("max_tokens", 8), **sampling), phase)


def test_a_leg_computes_its_part():
    context = sampling_arguments(request(RequestType.CONTEXT_ONLY, min_tokens=5))
    assert (context["max_tokens"], context["min_tokens"], context["detokenize"]) == (1, 1, False)
    generation = sampling_arguments(request(RequestType.GENERATION_ONLY, min_tokens=5))
    assert (generation["max_tokens"], generation["min_tokens"]) == (7, 4)
    whole = sampling_arguments(request(RequestType.CONTEXT_AND_GENERATION, n=3, stop_token_ids=(2,), logprobs=0))
    assert (whole["max_tokens"], whole["stop_token_ids"], whole["logprobs"]) == (8, [2], 0)


def test_legs_of_a_request_draw_other_numbers():
    drawn = {
        sampling_arguments(request(kind, temperature=1.0, seed=5))["seed"]
        for kind in (RequestType.CONTEXT_ONLY, RequestType.GENERATION_ONLY)
    }
    assert len(drawn) == 2
    assert all(0 <= position_seed((1 << 64) - 1, place) < 1 << 63 for place in range(100))
    assert sampling_arguments(request(RequestType.CONTEXT_ONLY, seed=5))["seed"] is None


def test_every_answer_is_a_request_of_vllm():
    both = request(RequestType.CONTEXT_ONLY, n=2, temperature=1.0)
    assert prompts(both) == {0: [1, 2, 3], 1: [1, 2, 3]}
    assert sampling_arguments(both, 0)["seed"] != sampling_arguments(both, 1)["seed"]


def test_answers_that_go_on_apart_are_requests_of_their_own():
    first = (Tokens((9,), 0), Tokens((2,), 1, reason=FinishReason.STOP), Tokens((8,), 2))
    phase = ContextPhase(KEY, first, 3, HOLDER)
    leg = replace(request(RequestType.GENERATION_ONLY, n=3, temperature=1.0, seed=4), context_phase=phase)
    assert prompts(leg) == {0: [1, 2, 3, 9], 2: [1, 2, 3, 8]}
    each = [sampling_arguments(leg, one) for one in (0, 2)]
    assert each[0]["seed"] != each[1]["seed"]
    out = LegOutput(leg)
    assert out.events(output(answer((5,))), 2) == [RequestTokens(KEY, Tokens((5,), 2))]
    (told,) = out.events(output(answer((6,), "length")), 0)
    assert told == RequestTokens(KEY, Tokens((6,), 0, reason=FinishReason.LENGTH))
    *_, end = out.events(output(answer((6,), "length")), 2)
    assert isinstance(end, RequestFinished)


def answer(ids: tuple[int, ...], reason: str | None = None, logprobs: Any = None) -> SimpleNamespace:
    return SimpleNamespace(token_ids=list(ids), finish_reason=reason, logprobs=logprobs)


def output(*answers: SimpleNamespace, params: Any = None, cached: int = 0) -> SimpleNamespace:
    return SimpleNamespace(outputs=answers, kv_transfer_params=params, num_cached_tokens=cached)


def test_a_context_leg_ends_with_its_first_token():
    (done,) = LegOutput(request(RequestType.CONTEXT_ONLY)).events(output(answer((7,), "length"), params={"x": 1}))
    assert isinstance(done, ContextDone)
    assert done.first_tokens == (Tokens((7,)),)


def test_a_first_token_that_ends_the_answer_is_no_hand_off():
    told, end = LegOutput(request(RequestType.CONTEXT_ONLY)).events(output(answer((2,), "stop")))
    assert told == RequestTokens(KEY, Tokens((2,), reason=FinishReason.STOP))
    assert isinstance(end, RequestFinished)
    assert end.error is None
    whole = LegOutput(request(RequestType.CONTEXT_ONLY, max_tokens=1)).events(output(answer((2,), "length")))
    assert whole[0] == RequestTokens(KEY, Tokens((2,), reason=FinishReason.LENGTH))


def test_blocks_that_could_not_be_offered_fail_the_leg():
    with pytest.raises(TransferFailed):
        LegOutput(request(RequestType.CONTEXT_ONLY)).events(output(answer((7,), "length")))


def test_answers_that_wait_for_their_first_tokens():
    """One of them is over when these come."""
    leg = replace(request(RequestType.GENERATION_ONLY, n=2, min_tokens=3), context_phase=None, context=HOLDER)
    assert prompts(leg) == {0: [1, 2, 3], 1: [1, 2, 3]}
    each = sampling_arguments(leg, 1)
    assert (each["max_tokens"], each["min_tokens"]) == (7, 2)
    out = LegOutput(leg)
    assert out.drop(0) == []
    assert out.is_dropped(0)
    assert out.events(output(answer((9,))), 0) == []
    *_, end = out.events(output(answer((6,), "length")), 1)
    assert isinstance(end, RequestFinished)


def test_one_of_several_answers_offers_the_cache():
    leg = LegOutput(request(RequestType.CONTEXT_ONLY, n=3))
    assert leg.events(output(answer((7,), "length"), params={"x": 1}), 1) == []
    assert leg.events(output(answer((2,), "stop")), 0) == []
    assert not leg.handed_off
    (done,) = leg.events(output(answer((8,), "length")), 2)
    assert isinstance(done, ContextDone)
    assert done.first_tokens == (Tokens((2,), 0, reason=FinishReason.STOP), Tokens((7,), 1), Tokens((8,), 2))
    assert leg.handed_off


def test_every_answer_ends_once():
    leg = LegOutput(request(RequestType.CONTEXT_AND_GENERATION, n=2))
    assert leg.events(output(answer((4,)))) == [RequestTokens(KEY, Tokens((4,)))]
    assert leg.events(output(answer((), None)), 1) == []
    assert leg.events(output(answer((5,), "stop"))) == [RequestTokens(KEY, Tokens((5,), reason=FinishReason.STOP))]
    *_, end = leg.events(output(answer((6,), "length")), 1)
    assert isinstance(end, RequestFinished)
    assert end.report.decode_tokens == 3


@pytest.mark.parametrize(("reason", "error"), [("abort", RequestCancelled), ("error", TransferFailed)])
def test_legs_that_vllm_ended(reason, error):
    with pytest.raises(error):
        LegOutput(request(RequestType.GENERATION_ONLY)).events(output(answer((), reason)))


def test_a_cache_that_does_not_come():
    """The prompt is computed, or the leg fails; without a first token nobody can go on."""
    leg = request(RequestType.GENERATION_ONLY)
    waits = replace(leg, context_phase=None, context=HOLDER)
    for about, recompute, alone in ((leg, True, True), (leg, False, False), (waits, True, False)):
        out = LegOutput(about)
        out.lose("gone", recompute=recompute)
        assert (out.alone, isinstance(out.lost, TransferFailed)) == (alone, not alone)
        assert not out.has_spoken


def test_log_probabilities_are_in_order():
    def about(logprob: float, rank: int) -> SimpleNamespace:
        return SimpleNamespace(logprob=logprob, rank=rank)

    position = {8: about(-0.5, 2), 3: about(-0.1, 1), 9: about(-3.0, 7)}
    leg = LegOutput(request(RequestType.CONTEXT_AND_GENERATION, logprobs=2))
    (told,) = leg.events(output(answer((9,), None, [position])))
    assert isinstance(told, RequestTokens)
    (one,) = told.chunk.logprobs
    assert (one.logprob, one.top) == (-3.0, ((3, -0.1), (8, -0.5)))


SIZE = 4


def keys() -> BlockKeys:
    return BlockKeys(lambda salt, adapter: b"root" + salt + adapter.encode(), SIZE)


def stored(hashes: list[int], ids: range, parent: int | None = None, **fields: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": list(ids)}
    return {**event, "block_size": SIZE, "medium": "GPU", **fields}


def removed(*hashes: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU"}


def test_blocks_get_the_names_of_their_tokens():
    names, all_keys = keys(), chain(b"root", token_ids.pack(range(12)), SIZE)
    event = names.apply([stored([101, 102], range(8)), stored([103], range(8, 12), 102)])
    assert event is not None
    assert set(event.stored) == set(all_keys)
    gone = names.apply([removed(102)])
    assert gone is not None
    assert (gone.stored, gone.removed) == ((), (all_keys[1],))
    assert names.apply([removed(999)]) is None


def test_two_blocks_of_the_same_tokens_are_one_name():
    names = keys()
    names.apply([stored([1], range(4)), stored([2], range(4))])
    assert names.apply([removed(1)]) is None
    assert names.apply([removed(2)]) is not None
    assert names.apply([stored([3], range(4)), removed(3)]) is None


def test_a_block_that_is_told_again_changes_nothing():
    """vLLM does so for blocks that were loaded."""
    names = keys()
    names.apply([stored([1, 2], range(8))])
    assert names.apply([stored([1, 2], range(8))]) is None
    more = names.apply([stored([1, 2, 3], range(12))])
    assert more is not None
    assert len(more.stored) == 1


def test_salts_and_adapters_separate_names():
    names = keys()
    salted = names.apply([stored([1], range(4), extra_keys=[(salt_text(b"s"),)])])
    adapted = names.apply([stored([2], range(4), lora_name="a", extra_keys=[("a",)])])
    assert salted is not None
    assert adapted is not None
    want = [chain(root, token_ids.pack(range(4)), SIZE) for root in (b"roots", b"roota")]
    assert [list(salted.stored), list(adapted.stored)] == want
    assert salt_text(b"") is None


@pytest.mark.parametrize(
    "fields", [{"group_idx": 1}, {"block_size": 8}, {"medium": "CPU"}, {"extra_keys": [("image", 3)]}]
)
def test_blocks_without_a_name_are_left_out(fields):
    names = keys()
    assert names.apply([{**stored([1], range(4)), **fields}]) is None
    assert names.apply([stored([2], range(4, 8), 1)]) is None


def test_missed_events_forget_everything():
    names = keys()
    told = names.apply([stored([1, 2], range(8))])
    forgotten = names.lost()
    assert told is not None
    assert forgotten is not None
    assert set(forgotten.removed) == set(told.stored)
    assert names.lost() is None
    again = names.apply([stored([1], range(4)), {"type": "AllBlocksCleared"}])
    assert again is None


@pytest.mark.parametrize(
    ("version", "fits"), [("0.32.0+cpu", True), ("0.32.7", True), ("0.31.9", False), ("1.0", False)]
)
def test_versions(version, fits):
    assert (version_problem(version) is None) is fits


def test_a_missing_vllm_is_a_problem():
    assert "not installed" in str(version_problem(None))


def test_configurations_that_can_not_hand_off():
    parallel = SimpleNamespace(data_parallel_size=2, prefill_context_parallel_size=1, decode_context_parallel_size=1)
    wrong = SimpleNamespace(
        parallel_config=parallel,
        kv_transfer_config=SimpleNamespace(kv_role="kv_both"),
        model_config=SimpleNamespace(enable_sleep_mode=True),
    )
    with pytest.raises(EngineUnsupported, match=r"kv_role = kv_both.*data_parallel_size = 2.*enable_sleep_mode = True"):
        check_configuration(wrong)


def test_a_generation_leg_reports_the_time_before_its_first_token():
    times = iter([1.0, 3.0, 6.0])
    leg = LegOutput(replace(request(RequestType.GENERATION_ONLY)), clock=lambda: next(times))
    *_, end = leg.events(output(answer((4,), "length")))
    assert isinstance(end, RequestFinished)
    assert (end.report.generation_queue, end.report.decode) == (2.0, 3.0)

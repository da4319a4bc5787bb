"""LoRA adapters of a vLLM worker: what is read of them, what they change, who may ask for them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from isthmus_core.errors import ConfigError, InvalidRequest
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import EngineRequest, RequestType, Sampling
from isthmus_worker.scheduler.limits import Limits
from isthmus_worker.vllm_engine.adapters import adapter_arguments, read_adapters, with_adapters
from isthmus_worker.wire.requests import request_from_pb, submit_to_pb
from worker_process import leg

LIMITS = Limits("any", 100, 64, 4, 64, 8, 64, 8)


def adapter(folder: Path, name: str, rank: object = 4, weights: bytes = b"w") -> Path:
    made = folder / name
    made.mkdir()
    (made / "adapter_config.json").write_text(json.dumps({"r": rank}))
    (made / "adapter_model.safetensors").write_bytes(weights)
    return made


def test_adapters_are_numbered_and_vllm_is_told_how_wide_they_are(tmp_path: Path):
    folders = {name: adapter(tmp_path, name, rank) for name, rank in (("b", 4), ("a", 12))}
    found = read_adapters(folders)
    assert [(one.name, one.number, one.rank) for one in found] == [("a", 1, 12), ("b", 2, 4)]
    assert adapter_arguments(found) == {"enable_lora": True, "max_loras": 2, "max_lora_rank": 16}
    assert adapter_arguments(()) == {}


def test_instances_with_other_adapters_are_told_apart(tmp_path: Path):
    (one,) = read_adapters({"a": adapter(tmp_path, "a")})
    (other,) = read_adapters({"a": adapter(tmp_path, "x", weights=b"v")})
    made = [with_adapters(b"d", given) for given in ((), (one,), (other,), (replace(one, name="c"),), (one, other))]
    assert made[0] == b"d"
    assert len(set(made)) == 5


@pytest.mark.parametrize("wrong", ["no weights", "no settings", "no rank", "no json"])
def test_what_is_no_adapter_is_named(tmp_path: Path, wrong: str):
    folder = adapter(tmp_path, "a", rank="4" if wrong == "no rank" else 4)
    if wrong == "no weights":
        (folder / "adapter_model.safetensors").unlink()
    elif wrong == "no settings":
        (folder / "adapter_config.json").unlink()
    elif wrong == "no json":
        (folder / "adapter_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"engine\.adapters\.a"):
        read_adapters({"a": folder})


def test_only_adapters_that_are_here_can_be_asked_for():
    request = EngineRequest(
        RequestKey(1 << 50, 0), RequestType.CONTEXT_AND_GENERATION, (1,), Sampling(2), adapter="poet"
    )
    with pytest.raises(InvalidRequest, match="this instance has none"):
        LIMITS.check(request)
    with pytest.raises(InvalidRequest, match="known here are cook"):
        replace(LIMITS, adapters=("cook",)).check(request)
    replace(LIMITS, adapters=("poet",)).check(request)


def test_the_name_of_an_adapter_reaches_the_engine():
    pb = leg([1], 2)
    pb.adapter = "poet"
    request = request_from_pb(pb, None)
    assert request.adapter == "poet"
    assert submit_to_pb(request).adapter == "poet"
    pb.adapter = "x" * 257
    with pytest.raises(InvalidRequest, match="adapter"):
        request_from_pb(pb, None)

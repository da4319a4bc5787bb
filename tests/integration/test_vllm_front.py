"""A worker's hub and a stand-in for vLLM: what the two processes of vLLM say differently is refused at the start."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from isthmus_core.config import parse_config
from isthmus_core.errors import StartError
from isthmus_worker.process_engine import EngineLaunch
from isthmus_worker.vllm_engine import engine as vllm_engine
from isthmus_worker.vllm_engine.engine import VllmEngine
from kvtransfer.local.messages import LocalWelcome
from kvtransfer.ports import Holder
from kvtransfer.rank_info import InstanceRole

pytestmark = [pytest.mark.integration, pytest.mark.timeout(90)]
SUPPORT = Path(__file__).resolve().parents[1] / "support"


def engine(told: str) -> VllmEngine:
    launch = EngineLaunch(
        config=parse_config({}),
        environment={**os.environ, "PYTHONPATH": str(SUPPORT), "VLLM_FRONT": told},
        with_rank=False,
        start_timeout_s=60,
        command=(sys.executable, str(SUPPORT / "vllm_front.py")),
    )
    welcome = LocalWelcome(Holder("h:1", "context-0", b"i" * 16), InstanceRole.CONTEXT, "loopback")
    return VllmEngine(launch, "context-0", welcome)


async def test_an_engine_whose_processes_agree_starts():
    one = engine("same")
    assert (await one.start()).tokens_per_block == 16
    assert len(one.rank_infos) == 1
    await one.stop()


@pytest.mark.parametrize(
    ("told", "both"),
    [
        ("dtype", "KV dtype BF16, front F32"),
        ("block", "tokens of a block 32, front 16"),
        ("model", f"weights {(b'other' * 3 + b'x').hex()}, front {(b'w' * 16).hex()}"),
    ],
)
async def test_what_they_say_differently_is_refused_with_both_values(told: str, both: str):
    with pytest.raises(StartError, match=both):
        await engine(told).start()


async def test_an_engine_without_the_connector_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm_engine, "_INTRODUCED_S", 1.0)
    with pytest.raises(StartError, match="its connector has not: after 1 s the scheduler is missing"):
        await engine("none").start()

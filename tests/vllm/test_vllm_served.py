"""Workers that run a plain `vllm serve` of their own behind the router's protocol. Nightly."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncGenerator
from pathlib import Path

import httpx
import psutil
import pytest
import pytest_asyncio

from isthmus_core.process import free_port
from vllm_world import PAIRS, ROOT, World, prompt, running_world, torch_settings, until, vllm_settings
from worker_process import GENERATION, leg, tokens

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.nightly,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(1800),
]

PORTS = {"vllm-context": free_port(), "vllm-generation": free_port()}


def served(model: Path, name: str, **arguments: object) -> list[str]:
    vllm = ROOT / ".venv-vllm/bin/vllm"
    return [*vllm_settings(model, **arguments), f'engine.serve=["{vllm}", "serve", "--port", "{PORTS[name]}"]']


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def servers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncGenerator[World, None]:
    """Blocks of 128, 32, 16 and 16 tokens."""
    settings = {
        "vllm-context": served(model, "vllm-context"),
        "vllm-generation": served(model, "vllm-generation", block_size=32),
        "torch-context": torch_settings(model),
        "torch-generation": torch_settings(model),
    }
    async with running_world(tmp_path_factory.mktemp("served"), settings) as running:
        yield running


@pytest.mark.parametrize("length", [1, 32, 129, 700])
async def test_every_pair_says_what_one_machine_says(servers: World, length: int):
    want = await servers.whole("torch-generation", prompt(length), 16)
    got = {pair: await servers.split(*pair, prompt(length), 16) for pair in PAIRS}
    got["unsplit"] = await servers.whole("vllm-generation", prompt(length), 16)  # type: ignore[index]
    at_once = {pair: await servers.at_once(*pair, [7, *prompt(length)], 16) for pair in PAIRS}
    assert got == dict.fromkeys(got, want)
    want = await servers.whole("torch-generation", [7, *prompt(length)], 16)
    assert at_once == {pair: [want] for pair in PAIRS}
    await servers.idle()


async def test_the_server_answers_its_own_users_too(servers: World):
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORTS['vllm-generation']}", timeout=60) as http:
        body = {"model": "m", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
        answer = (await http.post("/v1/completions", json=body)).json()
        assert answer["choices"][0]["text"].startswith(" Paris")


async def test_a_cancelled_leg_ends_in_the_server(servers: World):
    worker = servers.members["vllm-generation"].process
    call = worker.stub.Generate(leg(prompt(64), 3000, number=servers.number()))
    async for _ in call:
        break
    call.cancel()
    await servers.idle("vllm-generation")
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{PORTS['vllm-generation']}", timeout=60) as http:
        while 'vllm:num_requests_running{engine="0",model_name="m"} 0.0' not in (await http.get("/metrics")).text:
            await asyncio.sleep(0.2)


async def test_a_killed_server_is_the_end_of_its_worker_and_it_starts_again(servers: World):
    worker = servers.members["vllm-context"].process
    (front,) = psutil.Process(worker.process.pid).children()
    (server,) = [one for one in front.children() if "serve" in one.cmdline()]
    processes = server.children(recursive=True)
    server.send_signal(signal.SIGKILL)
    await worker.exit_code()
    await until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes))
    await servers.restart("vllm-context")
    number = servers.number()
    first, params = await servers.prefill("vllm-context", prompt(200), 8, number)
    said = await servers.read("torch-generation", leg(prompt(200), 8, kind=GENERATION, number=number, params=params))
    assert [*first, *tokens(said)] == await servers.whole("torch-generation", prompt(200), 8)
    await servers.idle()

"""Runs inside one of two network namespaces: a context instance here, a generation instance there, three cables.

    python split_networks.py FOLDER '{"prefix": [...], "api": [here, there], "control": [...], "data": [...]}'

The test speaks to the instances over `api`, their hubs to each other over `control`, their ranks over `data`. Each of
the last two is cut while the other one lives; exits with 0 when every answer is right and nothing is left.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from isthmus.v1 import coordinator_service_pb2
from isthmus.v1.generation_pb2 import ContextInstance

from fake_coordinator import FakeCoordinator, Response
from mock_oracle import oracle
from worker_pair import READY, Pair
from worker_process import tokens, worker

CONNECTING = coordinator_service_pb2.PAIR_STATE_CONNECTING
PROMPT = [40 + index % 50 for index in range(900)]
# How long a cut lasts beyond what was waited for: several times what a write and a notice take.
CALM_S = 1.0


def ip(*arguments: str) -> None:
    """The command, in this namespace."""
    subprocess.run(["ip", *arguments], check=True)


async def control_is_cut(pair: Pair, there: str) -> None:
    """What the context hub says is lost: its bytes arrive, and nobody claims so before the cable is mended."""
    first, params = await pair.prefill(PROMPT, 9, 0)
    ip("route", "add", "blackhole", f"{there}/32")
    decode = asyncio.create_task(pair.decode(PROMPT, 9, params, 0))
    await pair.context.idle()
    await pair.heard.until(lambda: pair.heard.said("pair")[-1].state == CONNECTING)
    await asyncio.sleep(CALM_S)
    assert not decode.done(), "neither silence nor bytes that are there make a cache complete"
    (session,) = (await pair.generation.sessions()).sessions
    assert session.in_doubt
    ip("route", "del", "blackhole", f"{there}/32")
    assert first + tokens(await decode) == oracle(PROMPT, 9)
    await pair.idle()


async def data_is_cut(pair: Pair) -> None:
    """The write stands still. The hubs talk all the time, and claim nothing about it."""
    prompt = PROMPT[::-1]
    first, params = await pair.prefill(prompt, 9, 1)
    ip("link", "set", "data0", "down")
    decode = asyncio.create_task(pair.decode(prompt, 9, params, 1))
    while [one.state for one in (await pair.context.sessions()).sessions] != ["writing"]:
        await asyncio.sleep(0.02)
    await asyncio.sleep(CALM_S)
    assert not decode.done()
    assert pair.heard.said("pair")[-1].state == READY, "the control plane has not noticed anything"
    (session,) = (await pair.generation.sessions()).sessions
    assert not session.in_doubt
    ip("link", "set", "data0", "up")
    # The write goes on, or has failed and is repeated, or the prompt is computed there: right in any case.
    assert first + tokens(await decode) == oracle(prompt, 9)
    await pair.idle()


async def run(folder: Path, cables: dict[str, Any]) -> None:
    """Both instances, then both cuts."""
    here, there = cables["api"]
    options = ("transfer.ping_interval_s=0.2", "engine.prefix_caching=false")
    async with AsyncExitStack() as stack:
        near, heard = [await stack.enter_async_context(FakeCoordinator(host=here)) for _ in range(2)]
        sides = (("context", "c-0", near, here, ()), ("generation", "g-0", heard, there, cables["prefix"]))
        made = [
            await stack.enter_async_context(
                worker(
                    folder,
                    coordinator.address,
                    f"worker.role={role}",
                    f"worker.instance_id={name}",
                    *options,
                    host=host,
                    prefix=prefix,
                    UCX_TLS="tcp,self",
                    UCX_NET_DEVICES=f"data{side}",
                )
            )
            for side, (role, name, coordinator, host, prefix) in enumerate(sides)
        ]
        for one in made:
            assert await one.serving(), one.log
        instance = near.said("hello")[0].instance
        instance.endpoint = f"{cables['control'][0]}:{made[0].port}"
        heard.send(Response(peers=coordinator_service_pb2.PeerSet(context_instances=[instance])))
        await heard.until(lambda: any(pair.state == READY for pair in heard.said("pair")))
        pair = Pair(made[0], made[1], heard, ContextInstance())
        await control_is_cut(pair, cables["control"][1])
        await heard.until(lambda: heard.said("pair")[-1].state == READY)
        await data_is_cut(pair)


if __name__ == "__main__":
    asyncio.run(run(Path(sys.argv[1]), json.loads(sys.argv[2])))

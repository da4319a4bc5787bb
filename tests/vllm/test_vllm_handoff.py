"""vLLM and the reference engine hand off to each other and to themselves: the text is that of one machine."""

from __future__ import annotations

import asyncio
import os
import signal

import grpc.aio
import psutil
import pytest

from vllm_world import PAIRS, World, prompt, until
from worker_process import GENERATION, leg, tokens

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    # vLLM takes minutes to start on a few cores.
    pytest.mark.timeout(900),
]

# One token; a part of a block, blocks of 32 and of 128 to the token, one more; a chunked prompt.
LENGTHS = (1, 5, 32, 128, 129, 700)


@pytest.mark.parametrize("length", LENGTHS)
async def test_every_pair_says_what_one_machine_says(world: World, length: int):
    want = await world.whole("torch-generation", prompt(length), 16)
    got = {pair: await world.split(*pair, prompt(length), 16) for pair in PAIRS}
    got["unsplit vLLM"] = await world.whole("vllm-generation", prompt(length), 16)  # type: ignore[index]
    assert got == dict.fromkeys(got, want)


async def test_what_vllm_writes_goes_through_chunks(world: World):
    for pair in PAIRS:
        if pair[0] == "vllm-context":
            before = await world.written(pair[0], "bounced")
            await world.split(*pair, [4, *prompt(200)], 2)
            # Whoever has none of the prompt in its prefix cache yet is sent all of it; counted shortly afterwards.
            while await world.written(pair[0], "bounced") <= before:
                await asyncio.sleep(0.05)
    assert await world.written("vllm-context", "direct") == 0


@pytest.mark.parametrize("length", [1, 129, 700])
async def test_both_legs_at_once_say_what_one_machine_says(world: World, length: int):
    """In chunks while the prompt is computed, where it takes several steps."""
    ids = [7, *prompt(length)][:length]
    want = await world.whole("torch-generation", ids, 16)
    got = {pair: await world.at_once(*pair, ids, 16) for pair in PAIRS}
    assert got == {pair: [want] for pair in PAIRS}
    await world.idle()


@pytest.mark.parametrize("schedule", ["split_answers", "at_once"])
async def test_several_answers_to_one_prompt(world: World, schedule: str):
    """One prefill, one hand-off: the generation side's answers share the blocks that have come."""
    ids = [9 if schedule == "at_once" else 8, *prompt(300)]
    want = await world.whole("torch-generation", ids, 12)
    for pair in PAIRS:
        assert await getattr(world, schedule)(*pair, ids, 12, n=3) == [want] * 3, pair
    await world.idle()


async def test_a_first_token_that_ends_the_answer_is_no_hand_off(world: World):
    ids = [6, *prompt(150)]
    want = await world.whole("torch-generation", ids, 1)
    for pair in PAIRS:
        assert await world.at_once(*pair, ids, 12, stop=want) == [want], pair
        assert await world.at_once(*pair, ids, 1) == [want], pair
    await world.idle()


@pytest.mark.parametrize("length", [160, 161])
async def test_a_prefix_that_is_here_but_for_the_last_token(world: World, length: int):
    """Five blocks of 32, and one token more: the second time nothing, or next to nothing, is left to hand off."""
    ids = [5, *prompt(length)][:length]
    for schedule in (world.split_answers, world.at_once, world.split_answers):
        (first,) = await schedule("torch-context", "vllm-generation", ids, 8)
        assert first == await world.whole("torch-generation", ids, 8)
    await world.idle()


async def test_a_prefix_that_is_here_is_not_asked_for_again(world: World):
    """The second time the generation instance has all but the last block."""
    first = await world.split("torch-context", "vllm-generation", prompt(200), 8)
    assert await world.split("torch-context", "vllm-generation", prompt(200), 8) == first
    longer = [*prompt(200), 11, 12, 13]
    want = await world.whole("torch-generation", longer, 8)
    assert await world.split("vllm-context", "vllm-generation", longer, 8) == want


async def test_blocks_have_the_names_that_the_reference_engine_gives_them(world: World):
    """Both compute the same prompt in blocks of 32 tokens."""
    names = ("vllm-generation", "torch-generation")
    world.ask_for_blocks(*names)
    for name in names:
        await world.whole(name, prompt(170), 4)
    try:
        await asyncio.wait_for(until(lambda: len(world.blocks(names[0]) & world.blocks(names[1])) >= 170 // 32), 60)
    except TimeoutError:
        pytest.fail(f"{[len(world.blocks(name)) for name in names]} blocks, of which too few have one name")


async def test_a_client_that_leaves_leaves_nothing(world: World):
    """Before anybody has asked for the cache, and while its answer is decoded."""
    held = world.number()
    await world.prefill("vllm-context", prompt(150), 50, held)
    await world.abort("vllm-context", held)
    number = world.number()
    _, params = await world.prefill("vllm-context", prompt(151), 400, number)
    call = world.members["vllm-generation"].process.stub.Generate(
        leg(prompt(151), 400, kind=GENERATION, number=number, params=params), timeout=120
    )
    async for answer in call:
        if tokens([answer]):
            break
    call.cancel()
    await world.idle()


async def test_a_killed_engine_is_told_and_its_peers_go_on(world: World):
    number = world.number()
    _, params = await world.prefill("vllm-context", prompt(160), 400, number)
    victim = world.members["vllm-generation"].process
    call = victim.stub.Generate(leg(prompt(160), 400, kind=GENERATION, number=number, params=params), timeout=120)
    async for answer in call:
        if tokens([answer]):
            break
    children = psutil.Process(victim.process.pid).children(recursive=True)
    workers = [one for one in children if "VLLM::Worker" in one.name() or "VLLM::Worker" in " ".join(one.cmdline())]
    assert workers, [one.name() for one in children]
    os.kill(workers[0].pid, signal.SIGKILL)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert await victim.exit_code() == 4
    _, alive = psutil.wait_procs(children, timeout=20)
    assert not alive
    others = [name for name in world.members if name != "vllm-generation"]
    await asyncio.wait_for(world.idle(*others), 60)
    want = await world.whole("torch-generation", prompt(161), 8)
    assert await world.split("vllm-context", "torch-generation", prompt(161), 8) == want

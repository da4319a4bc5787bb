"""Hubs of instances that keep their cache differently agree on a plan, and the bytes arrive where they belong."""

from __future__ import annotations

import numpy as np
import pytest

from hub_world import Side, assert_hubs_idle, blocks, connect, key, until
from kv_storage import GUARD, Shape
from kvtransfer.agents.loopback import LoopbackFabric
from kvtransfer.ports import ReceiveRequest, TokenRange, TransferFailure
from kvtransfer.rank_info import InstanceRole

pytestmark = pytest.mark.integration

TOKENS = 17


def token_bytes(side: Side, ids: list[int], tokens: range) -> list[bytes]:
    """Every token of every buffer of the side's storage, by its own arithmetic."""
    shape = side.storage.shape
    unit = shape.heads * shape.unit
    found: list[bytes] = []
    for layer in range(len(shape.layers)):
        for kv in (0, 1):
            for token in tokens:
                block, phase = divmod(token, shape.tokens_per_block)
                at = GUARD + side.storage.where(layer, kv, ids[block]) + phase * unit
                found.append(side.storage.memory[at : at + unit].tobytes())
    return found


@pytest.mark.parametrize(("mine", "yours", "reused"), [(4, 6, 0), (6, 4, 0), (4, 8, 3), (8, 5, 5)])
async def test_unequal_blocks_and_a_reused_prefix(mine: int, yours: int, reused: int):
    fabric = LoopbackFabric()
    context = Side("context-0", InstanceRole.CONTEXT, fabric, shape=Shape(tokens_per_block=mine), drain_s=0.05)
    generation = Side(
        "generation-0",
        InstanceRole.GENERATION,
        fabric,
        shape=Shape(tokens_per_block=yours),
        layout="layer_major",
        drain_s=0.05,
    )
    await context.start()
    await generation.start()
    await connect(generation, context)
    held, wanted = [7, 3, 11, 5, 2][: -(-TOKENS // mine)], [9, 1, 12, 4, 8][: -(-TOKENS // yours)]
    context.storage.fill(np.array(held, np.int32), 5)
    before = generation.storage.memory.copy()
    context.scheduler.respond_and_send_async(key(1), TokenRange(0, TOKENS), blocks(*held))
    first = reused // yours
    (listed,) = blocks(*wanted[first:])
    destinations = (type(listed)(listed.rank, listed.layer_group, listed.blocks, begin=reused),)
    generation.scheduler.request_and_receive_async(
        ReceiveRequest(key(1), TokenRange(0, TOKENS), destinations, context.holder)
    )
    received = []

    def arrived() -> bool:
        received.extend(generation.scheduler.check_gen_transfer_status())
        return bool(received)

    await until(arrived)
    assert received[0].failure is TransferFailure.NONE, received[0].reason
    tokens = range(reused, TOKENS)
    assert token_bytes(generation, wanted, tokens) == token_bytes(context, held, tokens)
    now, generation.storage.memory = generation.storage.memory, before
    kept = token_bytes(generation, wanted, range(reused))
    generation.storage.memory = now
    assert token_bytes(generation, wanted, range(reused)) == kept
    await until(context.scheduler.check_context_transfer_status)
    await context.hub.drain(10)
    await generation.hub.drain(10)
    assert_hubs_idle([context, generation])
    await generation.stop()
    await context.stop()

"""Both roles behind the calls an engine with its own loop makes: the shape of vLLM's KV connector fits the seam."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import pytest

from hub_world import TOKENS_PER_BLOCK, Side, assert_hubs_idle, blocks, connect, key, until
from kvtransfer.agents.loopback import LoopbackFabric
from kvtransfer.ports import Holder, ReceiveRequest, RequestKey, TokenRange, TransferFailure
from kvtransfer.rank_info import InstanceRole

pytestmark = pytest.mark.integration


@dataclass
class Request:
    key: RequestKey
    prompt_tokens: int
    holder: Holder | None = None
    block_ids: list[int] = field(default_factory=list)


class SchedulerConnector:
    """The connector in the scheduler's process, over the scheduler role."""

    def __init__(self, side: Side) -> None:
        self._role, self._to_load = side.scheduler, list[Request]()

    def get_num_new_matched_tokens(self, request: Request) -> tuple[int, bool]:
        return (request.prompt_tokens, True) if request.holder else (0, False)

    def update_state_after_alloc(self, request: Request, block_ids: list[int]) -> None:
        request.block_ids = block_ids
        if request.holder:
            self._to_load.append(request)

    def build_connector_meta(self) -> list[RequestKey]:
        loads, self._to_load = self._to_load, []
        for one in loads:
            assert one.holder is not None
            tokens = TokenRange(0, one.prompt_tokens)
            self._role.request_and_receive_async(ReceiveRequest(one.key, tokens, blocks(*one.block_ids), one.holder))
        return [one.key for one in loads]

    def request_finished(self, request: Request) -> bool:
        """True: the blocks are being sent, they are freed when get_finished names the request."""
        tokens = TokenRange(0, request.prompt_tokens)
        self._role.respond_and_send_async(request.key, tokens, blocks(*request.block_ids))
        return self._role.has_inflight_transfer(request.key)

    def update_connector_output(self) -> tuple[set[RequestKey], set[RequestKey]]:
        sent = self._role.check_context_transfer_status()
        received = self._role.check_gen_transfer_status()
        assert all(outcome.failure is TransferFailure.NONE for outcome in (*sent, *received))
        return {outcome.key for outcome in sent}, {outcome.key for outcome in received}


class WorkerConnector:
    """The connector in a worker's process, over the rank role: it is only given time."""

    def __init__(self, side: Side) -> None:
        self._side = side
        side.frozen = True

    def start_load_kv(self, metadata: list[RequestKey]) -> None:
        self._side.work()

    def get_finished(self) -> None:
        self._side.work()


async def test_a_connector_drives_both_roles():
    fabric = LoopbackFabric()
    prefill = Side("context-0", InstanceRole.CONTEXT, fabric)
    decode = Side("generation-0", InstanceRole.GENERATION, fabric, layout="layer_major")
    for side in (prefill, decode):
        await side.start()
    await connect(decode, prefill)
    producer, consumer = SchedulerConnector(prefill), SchedulerConnector(decode)
    workers = [WorkerConnector(prefill), WorkerConnector(decode)]
    try:
        done = Request(key(1), 3 * TOKENS_PER_BLOCK)
        assert producer.get_num_new_matched_tokens(done) == (0, False)
        producer.update_state_after_alloc(done, [4, 2, 9])
        prefill.storage.fill(blocks(4, 2, 9)[0].blocks, seed=5)
        assert producer.request_finished(done) is True

        load = Request(key(1), done.prompt_tokens, prefill.holder)
        assert consumer.get_num_new_matched_tokens(load) == (done.prompt_tokens, True)
        consumer.update_state_after_alloc(load, [1, 8, 0])
        sent: set[RequestKey] = set()
        received: set[RequestKey] = set()

        def step() -> bool:
            metadata = consumer.build_connector_meta()
            for worker in workers:
                worker.start_load_kv(metadata)
                worker.get_finished()
            sent.update(producer.update_connector_output()[0])
            received.update(consumer.update_connector_output()[1])
            return bool(sent and received)

        await until(step)
        assert sent == received == {key(1)}
        assert decode.block_bytes(1, 8, 0) == prefill.block_bytes(4, 2, 9)
        await asyncio.gather(*(side.hub.drain(10) for side in (prefill, decode)))
        assert_hubs_idle([prefill, decode])
    finally:
        for side in (decode, prefill):
            await side.stop()

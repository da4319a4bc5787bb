"""Stands in for vLLM below a worker's hub: `python vllm_front.py --config … --scheduler-fd N`, as its front is started.

VLLM_FRONT says what its connector tells the hub about the engine: "same" as the front, another "dtype", "model" or
"block" size, or that there is "none".
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import replace

from isthmus_core.framing import FrameSocket
from isthmus_worker.engine import EngineDescription
from isthmus_worker.engine_process.frames import events_to_bytes
from kv_storage import MODEL, Shape, Storage
from kvtransfer.agents import make_agent
from kvtransfer.local.client import HUB_VARIABLE, connect
from kvtransfer.local.messages import LocalHello, LocalScheduler
from kvtransfer.rank_info import Topology
from kvtransfer.transceiver.agent_thread import AgentThread

BLOCK = 16


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--scheduler-fd", type=int, required=True)
    arguments, _ = parser.parse_known_args()
    kept: list[object] = []
    told = os.environ["VLLM_FRONT"]
    if told != "none":
        model = {"dtype": replace(MODEL, kv_dtype="BF16"), "model": replace(MODEL, weights_digest=b"other" * 3 + b"x")}
        facts = LocalScheduler(
            model.get(told, MODEL), 2 * BLOCK if told == "block" else BLOCK, 64, 4096, 1000, "vLLM 9"
        )
        path = os.environ[HUB_VARIABLE]
        kept.append(connect(path, LocalHello(1, facts)))
        rank = connect(path, LocalHello(1, 0))
        rank.sock.settimeout(None)
        storage = Storage(Shape(), "slot_major", 8)
        thread = AgentThread(rank.sock, lambda: make_agent("loopback", "x"), storage.page_table(), 0, Topology())
        thread.start()
        kept += [rank, storage, thread]
    digests = (MODEL.weights_digest, MODEL.attention_digest, MODEL.kv_dtype)
    hub = FrameSocket.from_fd(arguments.scheduler_fd)
    hub.send(events_to_bytes([EngineDescription("vllm", 4096, BLOCK, 63, 1000, *digests)]))
    kept.append(hub)
    time.sleep(600)


if __name__ == "__main__":
    main()

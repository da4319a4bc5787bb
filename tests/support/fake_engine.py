"""An engine process without an engine: what it does with a request is written in the prompt.

Started like the real one (`--config FILE --scheduler-fd N [--rank-fd M] [--lock-fd K]`). FAKE_ENGINE in the environment
says how the start goes; the first token of a prompt says what happens to a request:

    ANSWER  max_tokens tokens (token i = i), then the end          HOLD    ContextDone; pages held
    STALL   one token, then nothing until it is aborted            REFUSE  fails as Overloaded
    DIE     one token, then the process ends with code 7           GARBAGE a frame that is no EngineOutput
    DOUBT   one token; an abort ends it, but it is never released
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from array import array
from pathlib import Path

from isthmus.v1 import engine_ipc_pb2 as ipc
from isthmus.v1 import generation_pb2, worker_service_pb2

from isthmus_core.config import load_config
from isthmus_core.errors import Overloaded, RequestCancelled
from isthmus_core.framing import FrameSocket
from isthmus_core.process import die_with_parent

ANSWER, STALL, DIE, HOLD, REFUSE, GARBAGE, DOUBT = range(1, 8)
TOTAL_BLOCKS = 100


class FakeEngine:
    """One frame in, any number of frames out."""

    def __init__(self, frames: FrameSocket) -> None:
        self._frames = frames
        self._held: dict[tuple[int, int], ipc.SubmitCommand] = {}

    def send(self, *events: ipc.EngineEvent) -> None:
        self._frames.send(ipc.EngineOutput(events=events).SerializeToString())

    def run(self) -> None:
        while (frame := self._frames.recv()) is not None:
            for command in ipc.EngineInput.FromString(frame).commands:
                if command.WhichOneof("body") == "stop":
                    return
                if command.WhichOneof("body") == "submit":
                    self.submit(command.submit)
                elif command.WhichOneof("body") == "abort":
                    self.abort(command.abort)
                self.load()

    def load(self) -> None:
        load = worker_service_pb2.InstanceLoad(
            running_requests=len(self._held), used_blocks=len(self._held), total_blocks=TOTAL_BLOCKS
        )
        self.send(ipc.EngineEvent(load=load))

    def tokens(self, request: ipc.SubmitCommand, *ids: int, last: bool = False) -> None:
        event = ipc.RequestTokens(key=request.key)
        event.chunk.tokens.le_uint32 = array("I", ids).tobytes()
        if last:
            event.chunk.finish_reason = generation_pb2.FINISH_REASON_LENGTH
        self.send(ipc.EngineEvent(tokens=event))

    def release(self, request: ipc.SubmitCommand) -> None:
        self._held.pop((request.key.request_id, request.key.attempt), None)
        self.send(ipc.EngineEvent(released=ipc.RequestReleased(key=request.key)))

    def submit(self, request: ipc.SubmitCommand) -> None:
        what = int.from_bytes(request.prompt.le_uint32[:4], "little")
        if what == REFUSE:
            status = Overloaded("the waiting queue", 3).serialize()
            self.send(ipc.EngineEvent(finished=ipc.RequestFinished(key=request.key, status=status)))
            self.release(request)
            return
        self._held[request.key.request_id, request.key.attempt] = request
        if what == ANSWER:
            count = request.sampling.max_tokens
            for index in range(count):
                self.tokens(request, index, last=index == count - 1)
            done = ipc.RequestFinished(key=request.key)
            done.report.context_queue.FromMilliseconds(1)
            done.report.prefill.FromMilliseconds(2)
            done.report.decode.FromMilliseconds(3)
            done.report.decode_tokens = request.sampling.max_tokens - 1
            self.send(ipc.EngineEvent(finished=done), ipc.EngineEvent(released=ipc.RequestReleased(key=request.key)))
            del self._held[request.key.request_id, request.key.attempt]
            return
        if what != HOLD:
            self.tokens(request, 42)
        if what == DIE:
            print("out of luck", file=sys.stderr, flush=True)
            os._exit(7)
        if what == GARBAGE:
            self._frames.send(b"\xff\xff\xff")
        if what == HOLD:
            done = ipc.ContextDone(key=request.key)
            done.first_tokens.add().tokens.le_uint32 = array("I", [42]).tobytes()
            self.send(ipc.EngineEvent(context_done=done))

    def abort(self, command: ipc.AbortCommand) -> None:
        request = self._held.get((command.key.request_id, command.key.attempt))
        if request is None:
            return
        what = int.from_bytes(request.prompt.le_uint32[:4], "little")
        if what != HOLD:
            status = RequestCancelled().serialize()
            self.send(ipc.EngineEvent(finished=ipc.RequestFinished(key=command.key, status=status)))
        if what != DOUBT:
            self.release(request)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path)
    parser.add_argument("--scheduler-fd", type=int)
    parser.add_argument("--rank-fd", type=int)
    parser.add_argument("--lock-fd", type=int)
    arguments = parser.parse_args()
    die_with_parent()
    mode = os.environ.get("FAKE_ENGINE", "ready")
    config = load_config(arguments.config)
    if mode == "settings":
        print("engine.device = tpu: not known", file=sys.stderr)
        sys.exit(2)
    if mode == "start":
        print("model.path: no such folder", file=sys.stderr)
        sys.exit(3)
    if mode == "crash":
        raise RuntimeError("a bug at start")
    if mode == "hang":
        time.sleep(3600)
    frames = FrameSocket.from_fd(arguments.scheduler_fd)
    engine = FakeEngine(frames)
    ready = ipc.EngineReady(
        engine=f"fake {config.worker.instance_id}",
        max_model_len=64,
        tokens_per_block=16,
        total_blocks=TOTAL_BLOCKS,
        vocab_size=257,
    )
    ready.model.kv_dtype = "U8"
    engine.send(ipc.EngineEvent(ready=ready))
    if mode == "closes":
        frames.close()
        time.sleep(3600)
    engine.run()
    if mode == "stubborn":
        time.sleep(3600)


if __name__ == "__main__":
    main()

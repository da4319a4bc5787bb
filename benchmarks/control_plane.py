"""The control plane beside ZeroMQ: one gRPC stream with envelopes against ROUTER/DEALER with msgpack maps.

    python benchmarks/control_plane.py [--quick] [--json FILE]

Same messages (a KvRequest there, a TransferNotice back), same two processes, all cases interleaved, medians of rounds.
ZeroMQ is measured twice: both ends blocked in recv, and both inside asyncio, as a service needs it. A grpc.aio stream
that carries bytes without any meaning shows what is left when our own part is taken away.
"""

from __future__ import annotations

import asyncio
import statistics
from collections import defaultdict
from collections.abc import Awaitable, Callable

import exchange_empty
import exchange_grpc
import exchange_zmq
import uvloop
from exchange import LARGE, SMALL, Server
from report import Row, argument_parser, at_least, at_most, figure, show

PAIRS = 64
PACE_S = 0.002

Case = Callable[[], Awaitable[float]]


class Cases:
    """Every case is a coroutine that returns one sample: seconds, or messages per second."""

    def __init__(
        self,
        ours: exchange_grpc.Peer,
        empty: exchange_empty.Peer,
        thread: exchange_zmq.BlockingPeer,
        loop: exchange_zmq.AsyncPeer,
        calls: int,
    ) -> None:
        self._ours, self._empty, self._thread, self._loop, self._calls = ours, empty, thread, loop, calls

    def all(self) -> dict[str, Case]:
        """Name -> case, in the order of a round."""
        cases: dict[str, Case] = {
            "rtt grpc": lambda: self._rtt(self._ours.round_trip, 0),
            "rtt empty": lambda: self._rtt(self._empty.round_trip, 0),
            "rtt thread": lambda: self._rtt(self._blocked, 0),
            "rtt asyncio": lambda: self._rtt(self._loop.round_trip, 0),
            "paced grpc": lambda: self._rtt(self._ours.round_trip, PACE_S),
            "paced thread": lambda: self._rtt(self._blocked, PACE_S),
            "pairs one message": lambda: self._pairs(lambda: self._ours.round_trip(SMALL, lists=PAIRS)),
            "pairs message each": lambda: self._pairs(lambda: self._ours.round_trip(SMALL, messages=PAIRS)),
            "pairs asyncio": lambda: self._pairs(lambda: self._loop.round_trip(SMALL, messages=PAIRS)),
            "pairs thread": lambda: self._pairs(lambda: self._blocked(SMALL, PAIRS)),
        }
        for blocks, windows in ((SMALL, (16, 256)), (LARGE, (1, 16))):
            for window in windows:
                cases |= self._rates(blocks, window)
        return cases

    def _rates(self, blocks: int, window: int) -> dict[str, Case]:
        total = self._calls * (1 if window == 1 else 4)

        async def thread() -> float:
            return await asyncio.to_thread(self._thread.rate, blocks, window, total)

        return {
            f"rate {blocks}/{window} grpc": lambda: self._ours.rate(blocks, window, total),
            f"rate {blocks}/{window} thread": thread,
            f"rate {blocks}/{window} asyncio": lambda: self._loop.rate(blocks, window, total),
        }

    async def _blocked(self, blocks: int, messages: int = 1) -> float:
        return self._thread.round_trip(blocks, messages)

    async def _pairs(self, call: Callable[[], Awaitable[float]]) -> float:
        """One call takes as long as a whole series of the others' messages: alone it would be the only one that finds
        the caches of another case."""
        return statistics.median([await call() for _ in range(self._calls // 20)])

    async def _rtt(self, call: Callable[[int], Awaitable[float]], pause_s: float) -> float:
        samples: list[float] = []
        for _ in range(self._calls // (10 if pause_s else 1)):
            samples.append(await call(SMALL))
            if pause_s:
                await asyncio.sleep(pause_s)
        return statistics.median(samples)


async def measure(rounds: int, calls: int) -> dict[str, float]:
    """Median of every case over `rounds` interleaved rounds."""
    serves = (exchange_grpc.serve, exchange_zmq.serve, exchange_zmq.serve_asyncio, exchange_empty.serve)
    servers = [Server(serve) for serve in serves]
    ours = exchange_grpc.Peer(servers[0].port)
    thread, loop = exchange_zmq.BlockingPeer(servers[1].port), exchange_zmq.AsyncPeer(servers[2].port)
    empty = exchange_empty.Peer(servers[3].port)
    try:
        cases = Cases(ours, empty, thread, loop, calls).all()
        samples: defaultdict[str, list[float]] = defaultdict(list)
        for number in range(rounds + 1):
            for name, case in cases.items():
                sample = await case()
                # The first round opens connections and warms caches.
                if number:
                    samples[name].append(sample)
    finally:
        await ours.close()
        await empty.close()
        thread.close()
        loop.close()
        for server in servers:
            server.close()
    return {name: statistics.median(values) for name, values in samples.items()}


def rows(found: dict[str, float]) -> list[Row]:
    """The figures with their aims."""
    us = {name: value * 1e6 for name, value in found.items()}
    made = [
        at_most("one in flight, paced; ZeroMQ in a blocked thread", us["paced grpc"], "us", us["paced thread"], 3),
        at_most("one in flight, closed loop; ZeroMQ in a blocked thread", us["rtt grpc"], "us", us["rtt thread"], 4.5),
        at_most("one in flight, closed loop; ZeroMQ in asyncio", us["rtt grpc"], "us", us["rtt asyncio"], 1.2),
        Row(
            "one in flight, a grpc.aio stream of bytes alone; ZeroMQ in asyncio",
            us["rtt empty"],
            "us",
            us["rtt asyncio"],
            us["rtt empty"] / us["rtt asyncio"],
        ),
    ]
    for blocks, window, size, least in (
        (SMALL, 16, "200 B", 1.3),
        (SMALL, 256, "200 B", 1.5),
        (LARGE, 1, "16 KiB", None),
        (LARGE, 16, "16 KiB", 0.8),
    ):
        for kind in ("asyncio", "thread"):
            name = f"{size}, {window} in flight; ZeroMQ in {'asyncio' if kind == 'asyncio' else 'a blocked thread'}"
            value, base = (found[f"rate {blocks}/{window} {who}"] for who in ("grpc", kind))
            if least is None:
                made.append(Row(name, value, "msg/s", base, value / base))
            else:
                made.append(at_least(name, value, "msg/s", base, least))
    one = us["pairs one message"]
    made += [
        at_most("64 lists in one message; a ZeroMQ message each, asyncio", one, "us", us["pairs asyncio"], 0.2),
        at_most("64 lists in one message; a ZeroMQ message each, thread", one, "us", us["pairs thread"], 0.2),
        figure("64 lists as 64 messages on our stream", us["pairs message each"], "us"),
    ]
    return made


def main() -> None:
    """Command line."""
    arguments = argument_parser(__doc__).parse_args()
    rounds, calls = (5, 300) if arguments.quick else (15, 1000)
    show("control plane", rows(uvloop.run(measure(rounds, calls))), arguments.json)


if __name__ == "__main__":
    main()

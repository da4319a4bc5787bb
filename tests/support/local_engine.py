"""A process of an engine that connects to a hub's UNIX socket by itself: `python local_engine.py PATH ranks|scheduler`.

Says "ready" on stdout and lives until it is killed, or until the hub is gone: then it leaves with code 4.
"""

from __future__ import annotations

import os
import sys
import time

from kv_storage import MODEL, Shape, Storage
from kvtransfer.agents import make_agent
from kvtransfer.local.client import SchedulerLink, connect
from kvtransfer.local.messages import LocalHello, LocalScheduler
from kvtransfer.rank_info import Topology
from kvtransfer.transceiver.agent_thread import AgentThread

FACTS = LocalScheduler(MODEL, 16, 64, 4096, 1000, "imitation 1")
RANKS = 2


def main() -> None:
    """The command."""
    path, what = sys.argv[1:]
    kept: list[object] = []
    if what == "scheduler":
        connection = connect(path, LocalHello(RANKS, FACTS))
        connection.sock.settimeout(None)
        link = SchedulerLink(connection.sock, lambda _: None, lambda _: os._exit(4))
        link.start()
        kept += [connection, link]
    else:
        for rank in range(RANKS):
            connection = connect(path, LocalHello(RANKS, rank))
            connection.sock.settimeout(None)
            storage = Storage(Shape(), "slot_major", 8)
            topology = Topology(tp_size=RANKS, tp_rank=rank)
            table = storage.page_table()
            thread = AgentThread(connection.sock, lambda: make_agent("loopback", "x"), table, rank, topology)
            thread.start()
            kept += [connection, storage, thread]
    print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()

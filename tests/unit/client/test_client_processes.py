"""Child processes, their logs and run folders."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from isthmus_client.launch import ChildProcess, last_words
from isthmus_client.logfile import RotatingLog
from isthmus_client.runs import KEEP_RUNS, create_run, stop_runs
from isthmus_client.supervisor import ChildFailed, choose_ports
from isthmus_core.errors import StartError

SLEEPER = "import time\nprint('sleeping', flush=True)\ntime.sleep(50)\n"
STUBBORN = (
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(50)\n"
)


def _child(folder: Path, source: str, *arguments: str) -> ChildProcess:
    (folder / "child_module.py").write_text(source)
    return ChildProcess("child", "child_module", arguments, folder / "child.log", {"PYTHONPATH": str(folder)})


async def _until_logged(child: ChildProcess, text: str) -> None:
    while text not in (child.log_path.read_text() if child.log_path.exists() else ""):
        assert child.running, child.reason
        await asyncio.sleep(0.02)


async def test_a_child_gets_its_arguments_and_its_output_is_logged(tmp_path: Path):
    child = _child(tmp_path, "import sys\nprint(sys.argv[1:])\nprint('why', file=sys.stderr)\nsys.exit(3)", "--a", "b")
    await child.start()
    assert await child.wait() == 3
    assert child.reason == "why"
    assert "['--a', 'b']" in child.log_path.read_text()
    assert ChildFailed("child", 3, child.reason, "log").exit_code == 3


async def test_stop_asks_first_and_kills_what_does_not_listen(tmp_path: Path):
    polite = _child(tmp_path, SLEEPER)
    await polite.start()
    await _until_logged(polite, "sleeping")
    assert await polite.stop(20) == -signal.SIGTERM
    deaf = _child(tmp_path, STUBBORN)
    await deaf.start()
    await _until_logged(deaf, "deaf")
    assert await deaf.stop(0.1) == -signal.SIGKILL


def test_a_child_dies_with_its_supervisor_even_when_that_is_killed(tmp_path: Path):
    (tmp_path / "child_module.py").write_text(SLEEPER)
    program = f"""
import asyncio
from pathlib import Path
from isthmus_client.launch import ChildProcess

async def main():
    folder = Path({str(tmp_path)!r})
    child = ChildProcess("c", "child_module", [], folder / "c.log", {{"PYTHONPATH": str(folder)}})
    await child.start()
    print(child.pid, flush=True)
    await child.wait()

asyncio.run(main())
"""
    supervisor = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert supervisor.stdout is not None
        orphan = psutil.Process(int(supervisor.stdout.readline()))
        while "sleeping" not in ((tmp_path / "c.log").read_text() if (tmp_path / "c.log").exists() else ""):
            time.sleep(0.02)
    finally:
        supervisor.kill()
        supervisor.communicate()
    gone, alive = psutil.wait_procs([orphan], timeout=20)
    assert gone
    assert not alive


def test_the_reason_is_the_last_line_that_is_not_a_log_record():
    output = b'isthmus-worker: port taken\n12:00:00.123 INFO    worker  leaving\n{"time": 1}\n'
    assert last_words(output) == "isthmus-worker: port taken"
    assert last_words(b"12:00:00.123 ERROR   worker  out of memory\n") == "12:00:00.123 ERROR   worker  out of memory"
    assert last_words(b"") == "no output"


def test_a_log_never_grows_past_its_limit(tmp_path: Path):
    log = RotatingLog(tmp_path / "x.log", max_bytes=100, keep=2)
    for index in range(40):
        log.write(b"%09d\n" % index)
    log.close()
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["x.log", "x.log.1", "x.log.2"]
    assert all(path.stat().st_size <= 110 for path in tmp_path.iterdir())
    assert (tmp_path / "x.log").read_bytes().endswith(b"000000039\n")


def test_a_taken_port_is_named_before_anything_starts():
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        port = sock.getsockname()[1]
        with pytest.raises(StartError, match=f"--http-port = 127.0.0.1:{port}"):
            choose_ports(2, http=port)


def test_ports_are_all_different():
    ports = choose_ports(5)
    every = [ports.coordinator, ports.router_grpc, ports.router_http, *ports.workers]
    assert len(set(every)) == 8


def test_run_folders_of_ended_runs_are_pruned_and_living_ones_kept(tmp_path: Path):
    for index in range(KEEP_RUNS + 3):
        old = tmp_path / f"2001010{index}-000000-1-1"
        old.mkdir()
        (old / "run.json").write_text(json.dumps({"pid": 1 << 22, "started": 1.0}))
    run = create_run(None, tmp_path)
    assert run.logs.is_dir()
    left = sorted(path.name for path in tmp_path.iterdir())
    assert len(left) == KEEP_RUNS + 1
    assert run.folder.name in left
    assert stop_runs(5, tmp_path) == [], "a run of this very process must not be stopped"


def test_down_stops_the_owner_of_a_run_and_nobody_else(tmp_path: Path):
    owner = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(50)"])
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(50)"])
    try:
        for process, started in ((owner, psutil.Process(owner.pid).create_time()), (bystander, 12345.0)):
            folder = tmp_path / str(process.pid)
            folder.mkdir()
            (folder / "run.json").write_text(json.dumps({"pid": process.pid, "started": started}))
        assert stop_runs(20, tmp_path) == [owner.pid]
        assert owner.wait(20) == -signal.SIGTERM
        assert bystander.poll() is None, "its pid was reused: not the owner"
    finally:
        for process in (owner, bystander):
            process.kill()
            process.wait()

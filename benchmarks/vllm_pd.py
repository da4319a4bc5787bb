"""Prefill and decode on two `vllm serve` on this machine: our connector beside vLLM's NixlConnector.

Same model, same requests, one pair of servers after the other (four at once would not fit into the memory of a small
machine): compare the medians only when nothing else runs. Needs .venv-vllm (tools/setup_vllm.py), and in it, for
NixlConnector: .venv-vllm/bin/pip install --no-deps nixl==1.5.1

    handoff   from sending the decode request to its first token: moving the cache, and one step
    ttft      from sending the prefill request to the first token that the decode streams
    tpot      time between later tokens
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from report import Row, argument_parser, at_most, figure, show

from isthmus_core.process import free_port
from isthmus_worker.fetch_model import fetch_model

ROOT = Path(__file__).resolve().parent.parent
PYTHON, VLLM = ROOT / ".venv-vllm/bin/python", ROOT / ".venv-vllm/bin/vllm"
TOKENS = 24
# The longest leaves room for the answer in the 8,192 tokens of the model.
LENGTHS, MOST_TOKENS = (128, 1024, 8160), 8192
_START_S, _STOP_S = 600.0, 60.0


@dataclass(frozen=True, slots=True)
class Sample:
    """One request. Seconds."""

    ttft: float
    handoff: float
    tpot: float
    text: str


@dataclass(frozen=True, slots=True)
class Servers:
    """Base URLs of a pair, and what its prefill is told."""

    prefill: str
    decode: str
    params: dict[str, Any]


def transfer(connector: str, role: str) -> str:
    """--kv-transfer-config of a server."""
    config: dict[str, Any] = {"kv_connector": connector, "kv_role": role}
    if connector == "IsthmusConnector":
        config["kv_connector_module_path"] = "kvtransfer.integrations.vllm.connector"
    else:
        config["kv_buffer_device"] = "cpu"
    return json.dumps(config)


def command(connector: str, role: str, model: Path, port: int, block: int) -> list[str]:
    """Of a server, with the hub of its host around it when the connector is ours."""
    serve = [
        *(str(VLLM), "serve", str(model), "--port", str(port), "--host", "127.0.0.1", "--served-model-name", "m"),
        *("--dtype", "float32", "--enforce-eager", "--max-model-len", str(MOST_TOKENS), "--no-enable-prefix-caching"),
        *("--block-size", str(block), "--kv-transfer-config", transfer(connector, role)),
    ]
    if connector != "IsthmusConnector":
        return serve
    ours = "context" if role == "kv_producer" else "generation"
    hub = [str(PYTHON), "-m", "kvtransfer.sidecar", "--role", ours, "--listen", f"127.0.0.1:{free_port()}"]
    return [*hub, "--", *serve]


@contextlib.contextmanager
def running(connector: str, model: Path, blocks: tuple[int, int]) -> Iterator[Servers]:
    """Both servers of a pair, ready. Raises RuntimeError with the end of a log when one does not start."""
    environment = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "UCX_TLS": "tcp,self,sm,cma",
    }
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls: list[str] = []
        for role, block in zip(("kv_producer", "kv_consumer"), blocks, strict=True):
            port = free_port()
            environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] = str(free_port())
            log = stack.enter_context((folder / f"{role}.log").open("wb"))
            process = subprocess.Popen(
                command(connector, role, model, port, block),
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            stack.callback(_stop, process)
            urls.append(f"http://127.0.0.1:{port}")
        for url, role in zip(urls, ("kv_producer", "kv_consumer"), strict=True):
            _wait(url, folder / f"{role}.log")
        params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        yield Servers(urls[0], urls[1], params)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(url: str, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        time.sleep(1)
    raise RuntimeError(f"{url} does not serve after {_START_S:g} s:\n{log.read_text(errors='replace')[-3000:]}")


def request(http: httpx.Client, servers: Servers, prompt: list[int]) -> Sample:
    """One split request."""
    body: dict[str, Any] = {"model": "m", "prompt": prompt, "temperature": 0, "ignore_eos": True}
    began = time.perf_counter()
    first = http.post(
        f"{servers.prefill}/v1/completions", json={**body, "max_tokens": 1, "kv_transfer_params": servers.params}
    ).json()
    asked = time.perf_counter()
    decode = {**body, "max_tokens": TOKENS, "stream": True, "kv_transfer_params": first["kv_transfer_params"]}
    times: list[float] = []
    text = ""
    with http.stream("POST", f"{servers.decode}/v1/completions", json=decode) as stream:
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                if choices and choices[0]["text"]:
                    times.append(time.perf_counter())
                    text += choices[0]["text"]
    tpot = (times[-1] - times[0]) / max(1, len(times) - 1)
    return Sample(times[0] - began, times[0] - asked, tpot, text)


def prompt(length: int, number: int) -> list[int]:
    """Another one for every number."""
    return [(number * 977 + place * 37) % 40_000 + 5 for place in range(length)]


def measure(
    connector: str, model: Path, lengths: Sequence[int], rounds: int, blocks: tuple[int, int]
) -> dict[int, list[Sample]]:
    """Samples of one pair by length; a request before them, which connects, is not counted."""
    with running(connector, model, blocks) as servers, httpx.Client(timeout=600) as http:
        request(http, servers, prompt(lengths[0], 0))
        return {
            length: [request(http, servers, prompt(length, number)) for number in range(1, rounds + 1)]
            for length in lengths
        }


def compare(length: int, ours: list[Sample], theirs: list[Sample] | None) -> list[Row]:
    """Medians of one length."""
    rows: list[Row] = []
    for name, most in (("handoff", 0.8), ("ttft", 1.1), ("tpot", 1.1)):
        value = 1000 * statistics.median(getattr(one, name) for one in ours)
        if theirs is None:
            rows.append(figure(f"{length} tokens: {name}", value, "ms"))
        else:
            base = 1000 * statistics.median(getattr(one, name) for one in theirs)
            rows.append(at_most(f"{length} tokens: {name}", value, "ms", base, most))
    if theirs is not None:
        same = sum(a.text == b.text for a, b in zip(ours, theirs, strict=True))
        rows.append(figure(f"{length} tokens: equal texts", same, f"of {len(ours)}"))
    return rows


def main() -> None:
    """The command."""
    parser = argument_parser(__doc__)
    parser.add_argument("--length", type=int, nargs="+", default=LENGTHS, help="tokens of a prompt")
    parser.add_argument("--rounds", type=int, default=10, help="requests of each length")
    parser.add_argument("--unequal", action="store_true", help="blocks of 128 and 32, ours alone: theirs refuses them")
    options = parser.parse_args()
    if max(options.length) > MOST_TOKENS - TOKENS:
        parser.error(f"--length: at most {MOST_TOKENS - TOKENS}, an answer of {TOKENS} tokens follows")
    rounds = 3 if options.quick else options.rounds
    model, blocks = fetch_model(), (128, 32) if options.unequal else (128, 128)
    ours = measure("IsthmusConnector", model, options.length, rounds, blocks)
    theirs = None if options.unequal else measure("NixlConnector", model, options.length, rounds, blocks)
    rows = [row for length in ours for row in compare(length, ours[length], None if theirs is None else theirs[length])]
    show(f"vLLM, blocks of {blocks[0]} and {blocks[1]}, medians of {rounds}", rows, options.json)


if __name__ == "__main__":
    main()

"""The torch engine on the CPU beside transformers' generate, and beside vLLM where it is installed.

    python benchmarks/engine.py [--quick] [--json FILE] [--model FOLDER] [--threads N] [--vllm-python PATH]

Decoding only, greedy, same weights and dtype: tokens after the first of each stream, over the time from first tokens to
last. The engine is the real one: scheduler, block manager and runner, as in an engine process. Every round runs every
case once; the figures are medians. Tokens are compared with those of transformers before anything is timed.

On a machine that others use at the same time, wall-clock times are theirs as much as ours. `--cpu-time --threads 1`
counts CPU seconds instead: of this process, or of all processes of vLLM (those that wait by spinning included).
"""

# torch and transformers are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from engine_vllm import ANSWER
from report import Row, argument_parser, at_least, interleaved, show

from isthmus_core.config import EngineConfig, IsthmusConfig, ModelConfig
from isthmus_core.keys import RequestKey
from isthmus_worker.engine import EngineRequest, RequestType, Sampling
from isthmus_worker.engine_process.build import build_scheduler
from isthmus_worker.engine_process.load import load_model
from isthmus_worker.scheduler import RequestTokens

Prompts = list[list[int]]
STREAMS = 8
PROMPT = 64
LONG_PROMPT = 512
MAX_MODEL_LEN = 2048


class Engine:
    """Scheduler and runner on this thread. `clock` counts seconds."""

    def __init__(self, folder: Path, dtype: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        config = IsthmusConfig(
            model=ModelConfig.model_validate({"path": folder, "dtype": dtype}),
            engine=EngineConfig(num_blocks=1024, prefix_caching=False, max_model_len=MAX_MODEL_LEN),
        )
        model = load_model(config)
        self.vocab_size = model.description.vocab_size
        self._runner = model.runner
        # Events are looked at here instead of being sent.
        self._scheduler = build_scheduler(config, model, self.emit, None)
        self._tokens: dict[RequestKey, list[int]] = {}
        self._ids = iter(range(1 << 41, 1 << 42))

    def emit(self, event: object) -> None:
        """What the scheduler says."""
        if isinstance(event, RequestTokens):
            self._tokens[event.key] += event.chunk.ids

    def decode(self, prompts: Prompts, tokens: int) -> tuple[float, Prompts]:
        """Seconds for `tokens` tokens after the first of every prompt, and all tokens."""
        keys = [RequestKey(next(self._ids)) for _ in prompts]
        self._tokens = {key: [] for key in keys}
        for key, prompt in zip(keys, prompts, strict=True):
            leg = RequestType.CONTEXT_AND_GENERATION
            self._scheduler.submit(EngineRequest(key, leg, tuple(prompt), Sampling(tokens + 1)), time.monotonic())
        self._step_until(lambda: all(self._tokens.values()))
        ahead = sum(len(one) - 1 for one in self._tokens.values())
        began = self._clock()
        self._step_until(lambda: not self._scheduler.live)
        seconds = self._clock() - began
        # Streams that were prefilled first have decoded already while others were not: as many tokens less.
        made = len(prompts) * tokens
        return seconds * made / (made - ahead), list(self._tokens.values())

    def _step_until(self, done: Callable[[], bool]) -> None:
        while not done():
            plan = self._scheduler.plan(time.monotonic())
            self._scheduler.apply(plan, self._runner.execute(plan.rows), frozenset(), time.monotonic())


class Transformers:
    """`generate` of the same checkpoint, one stream. `clock` counts seconds."""

    def __init__(self, folder: Path, dtype: str, clock: Callable[[], float]) -> None:
        self._clock = clock
        from transformers import AutoModelForCausalLM

        self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def decode(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        """As `Engine.decode`: the time for one token is taken off."""
        first, _ = self._generate(prompt, 1)
        seconds, made = self._generate(prompt, tokens + 1)
        return seconds - first, made

    @torch.inference_mode()
    def _generate(self, prompt: list[int], tokens: int) -> tuple[float, list[int]]:
        ids = torch.tensor([prompt])
        began = self._clock()
        made = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            eos_token_id=None,
            pad_token_id=0,
        )
        return self._clock() - began, made[0].tolist()[len(prompt) :]


class Vllm:
    """vLLM in a child process of its own environment. `cpu_time`: CPU seconds of its processes, else wall-clock."""

    def __init__(self, python: Path, folder: Path, dtype: str, cpu_time: bool) -> None:
        self._cpu_time = cpu_time
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        command = [python, Path(__file__).with_name("engine_vllm.py"), folder, dtype, MAX_MODEL_LEN]
        self._child = subprocess.Popen(
            list(map(str, command)), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True
        )
        if self._child.stdin is None or self._child.stdout is None:
            raise RuntimeError("the child was started without pipes")
        self._questions, self._answers = self._child.stdin, self._child.stdout
        self._answer()

    def decode(self, prompts: Prompts, tokens: int) -> float:
        """Seconds, as `Engine.decode`."""
        if not self._cpu_time:
            return self._ask(prompts, tokens + 1) - self._ask(prompts, 1)
        first = self._cpu_seconds(prompts, 1)
        return self._cpu_seconds(prompts, tokens + 1) - first

    def close(self) -> None:
        """Ends the child."""
        self._child.communicate()
        self._log.close()

    def _cpu_seconds(self, prompts: Prompts, tokens: int) -> float:
        before = self._cpu_clock()
        self._ask(prompts, tokens)
        return self._cpu_clock() - before

    def _cpu_clock(self) -> float:
        child = psutil.Process(self._child.pid)
        spent = [one.cpu_times() for one in (child, *child.children(recursive=True))]
        return sum(one.user + one.system for one in spent)

    def _ask(self, prompts: Prompts, tokens: int) -> float:
        self._questions.write(json.dumps([prompts, tokens]) + "\n")
        self._questions.flush()
        return self._answer()

    def _answer(self) -> float:
        for line in self._answers:
            if line.startswith(ANSWER):
                return float(line.removeprefix(ANSWER))
        self._log.seek(0)
        raise RuntimeError("vLLM has ended: " + self._log.read()[-2000:].decode(errors="replace"))


def compare_tokens(engine: Engine, oracle: Transformers, prompts: Prompts, tokens: int) -> None:
    """Raises when the engine says anything but what transformers says."""
    for prompt, mine in zip(prompts, engine.decode(prompts, tokens)[1], strict=True):
        theirs = oracle.decode(prompt, tokens)[1]
        if mine != theirs:
            raise RuntimeError(f"the engine says {mine}, transformers {theirs}")


def measure(engine: Engine, oracle: Transformers, vllm: Vllm | None, quick: bool) -> list[Row]:
    """Rows of the report. A quick run leaves long contexts out."""
    tokens, rounds = (16, 3) if quick else (64, 7)
    draw = np.random.default_rng(0)
    short: Prompts = draw.integers(4, engine.vocab_size, (STREAMS, PROMPT)).tolist()
    prompts = {"1 stream": short[:1], f"{STREAMS} streams": short}
    alone = dict.fromkeys(prompts, short[0])
    if not quick:
        name = f"{STREAMS} streams after {LONG_PROMPT} tokens"
        prompts[name] = draw.integers(4, engine.vocab_size, (STREAMS, LONG_PROMPT)).tolist()
        alone[name] = prompts[name][0]
    cases: dict[str, Callable[[], float]] = {}
    for name, some in prompts.items():
        cases[f"{name}, transformers"] = partial(lambda one: tokens / oracle.decode(one, tokens)[0], alone[name])
        cases[name] = partial(lambda them: len(them) * tokens / engine.decode(them, tokens)[0], some)
        if vllm is not None:
            cases[f"{name}, vllm"] = partial(
                lambda them, child: len(them) * tokens / child.decode(them, tokens), some, vllm
            )
    interleaved(cases, 1)
    rate = interleaved(cases, rounds)
    rows: list[Row] = []
    for name, some in prompts.items():
        least, theirs = (1, "transformers generate") if len(some) == 1 else (3, "1 stream of transformers generate")
        baseline = rate[f"{name}, transformers"]
        rows.append(at_least(f"{name}, beside {theirs}", rate[name], "tokens/s", baseline, least))
        if vllm is not None:
            rows.append(at_least(f"{name}, beside vLLM", rate[name], "tokens/s", rate[f"{name}, vllm"], 1))
    return rows


def main() -> None:
    """Measure, print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", type=Path, help="folder of a checkpoint; default: SmolLM2-135M, fetched once")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="of weights and cache")
    parser.add_argument("--threads", type=int, help="threads of torch, in this process")
    parser.add_argument("--cpu-time", action="store_true", help="count CPU seconds; use with --threads 1")
    parser.add_argument("--vllm-python", type=Path, help="python of an environment that has vllm")
    arguments = parser.parse_args()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    if arguments.model is None:
        from isthmus_worker.fetch_model import fetch_model

        arguments.model = fetch_model()
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    engine = Engine(arguments.model, arguments.dtype, clock)
    oracle = Transformers(arguments.model, arguments.dtype, clock)
    draw = np.random.default_rng(1)
    if arguments.dtype == "float32":
        compare_tokens(engine, oracle, draw.integers(4, engine.vocab_size, (3, 20)).tolist(), 8)
    vllm = None
    if arguments.vllm_python is not None:
        vllm = Vllm(arguments.vllm_python, arguments.model, arguments.dtype, arguments.cpu_time)
    rows = measure(engine, oracle, vllm, arguments.quick)
    title = f"decoding, {arguments.model.name}, {arguments.dtype}, {torch.get_num_threads()} threads"
    title += ", per CPU second" if arguments.cpu_time else ""
    show(title, rows, arguments.json)
    if vllm is not None:
        vllm.close()


if __name__ == "__main__":
    main()

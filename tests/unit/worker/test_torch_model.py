"""The torch runner against transformers: same checkpoint, same greedy tokens, same logits."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from greedy_driver import GREEDY, GreedySequence, blocks_for, open_oracle, oracle_greedy, run_greedy, whole_shape
from isthmus_worker.runner import BatchRow
from isthmus_worker.torch_engine import ModelUnusable, TorchRunner
from isthmus_worker.torch_engine.attention import choose_attention
from isthmus_worker.torch_engine.attention.sdpa import SdpaBackend
from isthmus_worker.torch_engine.batch import plan_step
from isthmus_worker.torch_engine.joint_step import join
from isthmus_worker.torch_engine.kv_pool import KvPool
from isthmus_worker.torch_engine.loader import load_weights
from isthmus_worker.torch_engine.model import Decoder
from isthmus_worker.torch_engine.model_config import read_config
from tiny_models import tiny_llama, tiny_model

NEW_TOKENS = 24
PROMPT_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 300)
SHAPES: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one kv head, tied": {"kv_heads": 1, "tied": True},
    "no grouping, biases": {"kv_heads": 4, "attention_bias": True, "mlp_bias": True},
    "3 of 9 heads, deep": {"heads": 9, "kv_heads": 3, "hidden": 144, "layers": 5, "seed": 3},
    "other rope base": {"rope_theta": 100000.0, "seed": 4},
}


def _prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(4, 320, n).tolist() for n in lengths]


def _runner(folder: Path, num_blocks: int = 128, **options: Any) -> TorchRunner:
    runner = TorchRunner(folder, **options)
    runner.allocate_cache(num_blocks)
    runner.warm_up()
    return runner


def _sequences(prompts: list[list[int]], chunk: int, size: int = 16, num_blocks: int = 128) -> list[GreedySequence]:
    """Each on blocks of its own, in random order."""
    free = np.random.default_rng(1).permutation(num_blocks).tolist()
    counts = [blocks_for(len(prompt) + NEW_TOKENS, size) for prompt in prompts]
    return [GreedySequence(p, [free.pop() for _ in range(n)], chunk) for p, n in zip(prompts, counts, strict=True)]


@pytest.mark.parametrize("name", SHAPES)
def test_greedy_tokens_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    folder = tiny_llama(tmp_path / "model", **SHAPES[name])
    oracle = open_oracle(folder)
    prompts = _prompts()
    expected = [oracle_greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({token for tokens in expected for token in tokens}) > 20  # not one token over and over
    runner = _runner(folder)
    # Chunks of 7 tokens put prefill chunks and decode rows of other requests into one step.
    assert run_greedy(runner, _sequences(prompts, chunk=7), NEW_TOKENS) == expected


@pytest.mark.parametrize("tokens_per_block", [1, 4, 16, 64])
@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_neither_chunks_nor_block_size_change_the_tokens(tmp_path: Path, tokens_per_block: int, chunk: int) -> None:
    folder = tiny_llama(tmp_path / "model")
    oracle = open_oracle(folder)
    prompts = _prompts((1, 16, 33, 130))
    num_blocks = blocks_for(400, tokens_per_block) + 4
    runner = _runner(folder, num_blocks, tokens_per_block=tokens_per_block)
    sequences = _sequences(prompts, chunk, tokens_per_block, num_blocks)
    expected = [oracle_greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts]
    assert run_greedy(runner, sequences, NEW_TOKENS) == expected


def test_rows_of_very_different_length_decode_together(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    oracle = open_oracle(folder)
    prompts = _prompts((1200, 3, 700, 290, 5, 17))
    runner = _runner(folder, 256)
    sequences = _sequences(prompts, 512, num_blocks=256)
    expected = [oracle_greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts]
    assert run_greedy(runner, sequences, NEW_TOKENS) == expected


def test_a_row_does_not_depend_on_its_company(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model")
    prompts = _prompts()
    together = run_greedy(_runner(folder), _sequences(prompts, 7), NEW_TOKENS)
    alone = [run_greedy(_runner(folder), [one], NEW_TOKENS)[0] for one in _sequences(prompts, 64)]
    assert together == alone


def test_only_rows_that_want_a_token_get_one(tmp_path: Path) -> None:
    runner = _runner(tiny_llama(tmp_path / "model"))
    ids = np.arange(10, 20)
    rows = [BatchRow(ids, 0, (np.array([block], np.int32),), want) for block, want in enumerate((GREEDY, (), GREEDY))]
    first, middle, last = runner.execute(rows)
    assert first == last
    assert len(first) == 1
    assert middle == ()
    assert runner.execute([rows[1]]) == [()]
    assert runner.execute([]) == []


def _logits(folder: Path, prompt: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Logits after every position of `prompt`, one chunk a step."""
    config = read_config(folder)
    device = torch.device("cpu")
    with torch.inference_mode():
        model = Decoder(config, 512, dtype, device)
        load_weights(folder, model.targets(), config.tied)
        pool = KvPool(whole_shape(config, dtype), (32,), config.head_dim, dtype, device)
        attention = SdpaBackend(pool)
        blocks = np.arange(32, dtype=np.int32)[::-1].copy()
        found: list[torch.Tensor] = []
        for begin in range(len(prompt)):
            row = BatchRow(np.array(prompt[begin : begin + 1], np.int64), begin, (blocks,), GREEDY)
            plan = plan_step([row], pool.shapes, config.vocab_size, 512)
            pool.begin_step(plan)
            found.append(model.forward(join([row], 1, 0, plan), attention.begin(plan)).clone())
    return torch.cat(found).float()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 2e-4), ("bfloat16", 0.15), ("float16", 0.02)])
@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("Llama", {}),
        ("Llama", {"num_key_value_heads": 4, "attention_bias": True, "mlp_bias": True}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Mistral", {"sliding_window": 20}),
    ],
)
def test_logits_are_those_of_transformers(
    tmp_path: Path, dtype: str, tolerance: float, architecture: str, config: dict[str, Any]
) -> None:
    folder = tiny_model(tmp_path / "model", architecture, dtype=dtype, **config)
    (prompt,) = _prompts((50,))
    with torch.inference_mode():
        expected = open_oracle(folder, dtype)(torch.tensor([prompt])).logits[0].float()
    mine = _logits(folder, prompt, getattr(torch, dtype))
    assert expected.std() > 0.5  # the tolerance means something
    assert (mine - expected).abs().max() < tolerance


def test_dtype_is_the_checkpoints_unless_asked_for(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", dtype="bfloat16")
    auto, wide = TorchRunner(folder).describe(), TorchRunner(folder, dtype="float32").describe()
    assert (auto.kv_dtype, wide.kv_dtype) == ("BF16", "F32")
    assert wide.bytes_per_block == 2 * auto.bytes_per_block
    assert auto.weights_digest == wide.weights_digest
    (prompt,) = _prompts((40,))
    expected = oracle_greedy(open_oracle(folder, "float32"), prompt, NEW_TOKENS)
    runner = _runner(folder, dtype="float32")
    assert run_greedy(runner, _sequences([prompt], 16), NEW_TOKENS) == [expected]


def test_a_float16_checkpoint_is_served_as_it_is(tmp_path: Path) -> None:
    runner = _runner(tiny_llama(tmp_path / "model", dtype="float16"))
    assert runner.describe().kv_dtype == "F16"
    assert len(run_greedy(runner, _sequences(_prompts((20,)), 7), NEW_TOKENS)[0]) == NEW_TOKENS


@pytest.mark.parametrize("tied", [False, True])
def test_shards_of_transformers_are_the_same_model(tmp_path: Path, tied: bool) -> None:
    single = tiny_model(tmp_path / "one", "Qwen3", tie_word_embeddings=tied, head_dim=16)
    sharded = tiny_model(tmp_path / "many", "Qwen3", tie_word_embeddings=tied, head_dim=16, shard_bytes=60_000)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    about, other = TorchRunner(single).describe(), TorchRunner(sharded).describe()
    assert (about.weights_digest, about.attention_digest) == (other.weights_digest, other.attention_digest)
    prompts = _prompts((3, 40))
    oracle = open_oracle(sharded)
    expected = [oracle_greedy(oracle, prompt, NEW_TOKENS) for prompt in prompts]
    assert run_greedy(_runner(sharded), _sequences(prompts, 16), NEW_TOKENS) == expected


def test_large_models_do_without_packed_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_llama(tmp_path / "model")
    prompts = _prompts()
    packed = _runner(folder)
    monkeypatch.setattr("isthmus_worker.torch_engine.model.MAX_PACKED_BYTES", 1000)
    plain = _runner(folder)
    expected = [oracle_greedy(open_oracle(folder), prompt, NEW_TOKENS) for prompt in prompts]
    # Batches of 1 to 12 rows: every way to multiply.
    for count in (1, 2, 3, 5, 12):
        for runner in (packed, plain):
            assert run_greedy(runner, _sequences(prompts[:count], 64), NEW_TOKENS) == expected[:count]


def test_kernels_that_can_not_compute_the_model_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tiny_llama(tmp_path / "model")
    with pytest.raises(ModelUnusable, match=r"engine\.attention = flashinfer: it needs engine\.device = cuda"):
        TorchRunner(folder, attention="flashinfer")
    with caplog.at_level("INFO"):
        for asked in ("auto", "sdpa"):
            assert TorchRunner(folder, attention=asked).describe().kernels == "sdpa"
    assert "attention by sdpa: not flashinfer: it needs engine.device = cuda, which is cpu" in caplog.text


@pytest.mark.parametrize(
    ("architecture", "config", "dtype", "reason"),
    [
        ("Llama", {"head_dim": 64}, torch.float32, "float16 and bfloat16, model.dtype is float32"),
        ("Llama", {"head_dim": 32}, torch.bfloat16, "heads of 64, 128, 256, those of the model are 32"),
        ("Llama", {"head_dim": 64}, torch.float16, "flashinfer-python is not installed"),
    ],
)
def test_the_reason_against_flashinfer_is_told(
    tmp_path: Path, architecture: str, config: dict[str, Any], dtype: torch.dtype, reason: str
) -> None:
    made = read_config(tiny_model(tmp_path / "model", architecture, **config))
    if "not installed" in reason and find_spec("flashinfer"):
        pytest.skip("flashinfer is installed")
    assert reason in choose_attention("auto", made, dtype, torch.device("cuda")).reason
    with pytest.raises(ModelUnusable, match=re.escape(reason)):
        choose_attention("flashinfer", made, dtype, torch.device("cuda"))


def test_flashinfer_is_chosen_for_windows_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("isthmus_worker.torch_engine.attention.why_not_flashinfer", lambda *_: None)
    made = read_config(tiny_model(tmp_path / "model", "Mistral", head_dim=64, sliding_window=64))
    chosen = [choose_attention(asked, made, torch.bfloat16, torch.device("cuda")) for asked in ("auto", "flashinfer")]
    assert [one.name for one in chosen] == ["flashinfer", "flashinfer"]

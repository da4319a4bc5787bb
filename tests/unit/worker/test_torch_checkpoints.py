"""Checkpoints that must load, and checkpoints that must be refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from greedy_driver import GreedySequence, open_oracle, oracle_greedy, run_greedy
from isthmus_worker.torch_engine import ModelUnusable, TorchRunner
from isthmus_worker.torch_engine.model_config import read_config
from tiny_models import tiny_llama, tiny_model

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tiny_llama(tmp_path / "model")


def _change(folder: Path, **changes: Any) -> None:
    """Sets keys of config.json; None removes."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value is not None}))


def _rewrite(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file(weights, folder / WEIGHTS, {"format": "pt"})


def _shard(folder: Path) -> dict[str, str]:
    """Cuts the checkpoint into three files with an index."""
    weights = load_file(folder / WEIGHTS)
    where = {name: f"model-{i % 3}.safetensors" for i, name in enumerate(sorted(weights))}
    for file in set(where.values()):
        save_file({name: weights[name] for name, at in where.items() if at == file}, folder / file, {"format": "pt"})
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return where


def test_shards_are_the_same_model(folder: Path) -> None:
    single = TorchRunner(folder).describe()
    _shard(folder)
    assert TorchRunner(folder).describe() == single


def test_one_changed_weight_is_another_model(folder: Path) -> None:
    before = TorchRunner(folder).describe()
    weights = load_file(folder / WEIGHTS)
    weights["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-3
    _rewrite(folder, weights)
    after = TorchRunner(folder).describe()
    assert after.weights_digest != before.weights_digest
    assert after.attention_digest == before.attention_digest


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 2048}},
        {"rms_norm_eps": 1e-5},
        {"architectures": ["MistralForCausalLM"], "sliding_window": 64},
        {"architectures": ["MistralForCausalLM"]},
    ],
)
def test_another_rope_or_norm_is_another_cache(folder: Path, changes: dict[str, Any]) -> None:
    before = TorchRunner(folder).describe()
    _change(folder, **changes)
    after = TorchRunner(folder).describe()
    assert after.attention_digest != before.attention_digest
    assert after.weights_digest == before.weights_digest


def test_old_spelling_of_rope_dtype_and_defaults(folder: Path) -> None:
    new = read_config(folder)
    _change(folder, rope_parameters=None, rope_theta=10000, rope_scaling=None, dtype=None, head_dim=None)
    _change(folder, torch_dtype="float32", hidden_act=None, attention_bias=None, mlp_bias=None)
    assert read_config(folder) == new


def test_tied_checkpoint_may_repeat_the_matrix_but_not_contradict_it(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "model", tied=True)
    digest = TorchRunner(folder).describe().weights_digest
    weights = load_file(folder / WEIGHTS)
    _rewrite(folder, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()})
    runner = TorchRunner(folder)
    assert runner.describe().weights_digest == digest
    runner.allocate_cache(4)
    answer = run_greedy(runner, [GreedySequence([9, 8, 7], [2])], 8)[0]
    assert answer == oracle_greedy(open_oracle(folder), [9, 8, 7], 8)
    _rewrite(folder, {**weights, "lm_head.weight": weights["model.embed_tokens.weight"] * 2})
    with pytest.raises(ModelUnusable, match="tie_word_embeddings"):
        TorchRunner(folder)


def test_old_exporters_rotary_buffers_are_ignored(folder: Path) -> None:
    before = TorchRunner(folder).describe()
    _rewrite(folder, {**load_file(folder / WEIGHTS), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})
    assert TorchRunner(folder).describe() == before


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, 'architectures = ["GPT2LMHeadModel"] is not supported, only'),
        ({"architectures": None}, "architectures = null"),
        ({"rope_parameters": {"rope_type": "longrope", "factor": 2.0}}, 'rope_parameters.rope_type = "longrope"'),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "rope_parameters.low_freq_factor is missing"),
        ({"rope_parameters": {"rope_type": "default", "short_factor": [1.0]}}, "rope_parameters.short_factor is not"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention is not"),
        ({"rope_scaling": {"type": "su", "factor": 2.0}}, 'rope_scaling.type = "su"'),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor is missing"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor = '2'"),
        ({"rope_scaling": 2}, "rope_scaling = 2"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_parameters.rope_theta = -1.0"),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = "),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ({"num_hidden_layers": "two"}, "num_hidden_layers = 'two'"),
        ({"attention_bias": 1}, "attention_bias = 1"),
        ({"num_key_value_heads": 3}, "multiple of num_key_value_heads = 3"),
        ({"head_dim": 15}, "head_dim = 15"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps = inf"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan"),
        ({"dtype": "int8"}, 'dtype = "int8"'),
    ],
)
def test_config_that_is_not_computed_is_refused_by_name(folder: Path, changes: dict[str, Any], message: str) -> None:
    _change(folder, **changes)
    with pytest.raises(ModelUnusable) as raised:
        TorchRunner(folder)
    assert message in str(raised.value)
    assert "config.json" in str(raised.value)


def test_all_problems_of_a_config_are_told_at_once(folder: Path) -> None:
    _change(folder, sliding_window=8, vocab_size=None, hidden_act="relu")
    with pytest.raises(ModelUnusable) as raised:
        TorchRunner(folder)
    assert all(name in str(raised.value) for name in ("sliding_window", "vocab_size", "hidden_act"))


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_config_that_is_no_json_object(folder: Path, text: str) -> None:
    (folder / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ModelUnusable, match=r"config\.json"):
        TorchRunner(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types names 1 layers of num_hidden_layers = 2"),
        ({"layer_types": ["full_attention", "linear_attention"]}, "layer_types = "),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types asks for sliding_attention"),
        ({"use_sliding_window": True, "sliding_window": 0}, "sliding_window = 0"),
        ({"use_sliding_window": True, "max_window_layers": -1}, "max_window_layers = -1"),
        ({"use_sliding_window": "yes"}, "use_sliding_window = 'yes'"),
        ({"num_experts": 8}, "num_experts = 8"),
    ],
)
def test_windows_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    folder = tiny_model(tmp_path / "model", "Qwen2")
    _change(folder, layer_types=None)
    TorchRunner(folder)
    _change(folder, **changes)
    with pytest.raises(ModelUnusable) as raised:
        TorchRunner(folder)
    assert message in str(raised.value)


def test_all_wrong_tensors_are_told_at_once(folder: Path) -> None:
    weights = load_file(folder / WEIGHTS)
    del weights["model.norm.weight"], weights["model.layers.1.self_attn.k_proj.weight"]
    weights["model.layers.0.mlp.up_proj.weight"] = torch.zeros(10, 64)
    weights["model.layers.0.mlp.down_proj.weight"] = weights["model.layers.0.mlp.down_proj.weight"].to(torch.float64)
    weights["model.layers.0.self_attn.q_proj.bias"] = torch.zeros(64)
    _rewrite(folder, weights)
    with pytest.raises(ModelUnusable) as raised:
        TorchRunner(folder)
    text = str(raised.value)
    assert "missing: model.layers.1.self_attn.k_proj.weight, model.norm.weight" in text
    assert "model.layers.0.mlp.up_proj.weight has shape (10, 64), config.json asks for (192, 64)" in text
    assert "model.layers.0.mlp.down_proj.weight has dtype F64" in text
    assert "unexpected: model.layers.0.self_attn.q_proj.bias" in text


@pytest.mark.parametrize("keep", [0, 4, 1000, -1])
def test_truncated_file_is_named(folder: Path, keep: int) -> None:
    path = folder / WEIGHTS
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelUnusable, match=rf"{WEIGHTS}: is not a readable safetensors file"):
        TorchRunner(folder)


def test_missing_files_are_named(folder: Path) -> None:
    where = _shard(folder)
    victim = sorted(set(where.values()))[1]
    (folder / victim).unlink()
    with pytest.raises(ModelUnusable, match=victim):
        TorchRunner(folder)
    (folder / INDEX).write_text("{}")
    with pytest.raises(ModelUnusable, match="weight_map"):
        TorchRunner(folder)
    (folder / INDEX).unlink()
    with pytest.raises(ModelUnusable, match=WEIGHTS):
        TorchRunner(folder)
    with pytest.raises(ModelUnusable, match=r"config\.json"):
        TorchRunner(folder / "absent")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a GPU")
def test_device_that_is_not_there(folder: Path) -> None:
    with pytest.raises(ModelUnusable, match=r"engine\.device = cuda:3: torch sees 0"):
        TorchRunner(folder, device="cuda:3")

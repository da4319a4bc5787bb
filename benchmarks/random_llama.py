"""A checkpoint of random weights in the shape of a Llama, quickly: a real one would travel for an hour."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

# Large files are read and hashed side by side.
SHARD_BYTES = 2 << 30
# Llama 3.1 8B.
LLAMA_8B: dict[str, Any] = {
    "vocab_size": 128_256,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
}
# The same ways in seconds on two cores.
SMALL: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
}


def random_llama(folder: Path, sizes: dict[str, Any], device: str) -> Path:
    """Writes the folder, in bfloat16; the weights are made on `device`. No tokenizer: prompts are tokens."""
    folder.mkdir(parents=True)
    config = LlamaConfig(**sizes, rope_parameters={"rope_type": "default", "rope_theta": 500_000.0}, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tuple(one.shape) for name, one in LlamaForCausalLM(config).named_parameters()}
    torch.manual_seed(1)
    places: dict[str, str] = {}
    shard: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        weight = torch.ones(shape) if "norm" in name else torch.randn(shape, device=device) / math.sqrt(shape[-1])
        shard[name] = weight.to(torch.bfloat16).cpu()
        if sum(one.nbytes for one in shard.values()) >= SHARD_BYTES:
            _write(folder, shard, places)
            shard = {}
    _write(folder, shard, places)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


def _write(folder: Path, shard: dict[str, torch.Tensor], places: dict[str, str]) -> None:
    if shard:
        path = folder / f"model-{len(set(places.values())):05}.safetensors"
        save_file(shard, path, metadata={"format": "pt"})
        places.update(dict.fromkeys(shard, path.name))

"""The seeded random models of the parity tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tiny_models import tiny_model

VOCAB = 8192


def llama(folder: Path, kv_heads: int = 4) -> Path:
    """8 layers, hidden size 256, 8 heads."""
    return tiny_model(folder / f"llama-{kv_heads}", **_sizes(kv_heads))


def sliding(folder: Path) -> Path:
    """The same sizes as a Qwen3 whose odd layers see 40 tokens."""
    return tiny_model(
        folder / "sliding",
        "Qwen3",
        head_dim=32,
        use_sliding_window=True,
        sliding_window=40,
        max_window_layers=0,
        layer_types=["full_attention", "sliding_attention"] * 4,
        **_sizes(4),
    )


def _sizes(kv_heads: int) -> dict[str, Any]:
    return {
        "seed": 5,
        "vocab_size": VOCAB,
        "hidden_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 1024,
        "initializer_range": 0.05,
    }

"""Seeded random checkpoints in transformers' format, small enough for every test."""

# torch and transformers are typed in part only.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

FIRST_BYTE_ID = 4
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
_MARKER = "tiny_model.json"
_SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    # Large enough that greedy tokens differ from prompt to prompt instead of collapsing to one.
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": EOS_ID,
    "pad_token_id": 3,
}


def tiny_model(
    path: Path,
    architecture: str = "Llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    shard_bytes: int | None = None,
    **config: Any,
) -> Path:
    """Writes a checkpoint into folder `path` (made if absent) and returns it; an equal one already there is kept.

    `architecture`: "Llama", "Mistral", "Qwen2" or "Qwen3"; `config` goes to its configuration class, over small sizes
    (intermediate_size is 3 * hidden_size). `shard_bytes`: cut into files of at most so many bytes, with an index.

    The weights are a function of the arguments only; biases and norms are random too, or a wrong one would pass unseen.
    The tokenizer is byte-level: ids 0-3 are <unk>, <s>, </s>, <pad>, the 256 bytes follow in the order of the
    byte-level alphabet, ids above them are fillers; needs vocab_size >= 260.
    """
    config = {**_SIZES, **config}
    config.setdefault("intermediate_size", 3 * config["hidden_size"])
    if config["vocab_size"] < FIRST_BYTE_ID + 256:
        raise ValueError(f"vocab_size = {config['vocab_size']}: a byte-level tokenizer needs {FIRST_BYTE_ID + 256}")
    recipe = json.loads(json.dumps([architecture, seed, dtype, shard_bytes, config]))
    marker = path / _MARKER
    if marker.is_file() and json.loads(marker.read_text()) == recipe:
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    try:
        _write_model(work, architecture, seed, dtype, shard_bytes, config)
        _write_tokenizer(work, config["vocab_size"], config["max_position_embeddings"])
        (work / _MARKER).write_text(json.dumps(recipe))
        if path.exists():
            shutil.rmtree(path)
        os.replace(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


def tiny_llama(
    path: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 320,
    tied: bool = False,
    rope_theta: float = 10000.0,
    **more: Any,
) -> Path:
    """`tiny_model` of the commonest architecture, in short words."""
    return tiny_model(
        path,
        num_hidden_layers=layers,
        hidden_size=hidden,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": rope_theta},
        **more,
    )


def _write_model(
    folder: Path, architecture: str, seed: int, dtype: str, shard_bytes: int | None, config: dict[str, Any]
) -> None:
    import torch
    import transformers

    made = getattr(transformers, f"{architecture}Config")(**config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = getattr(transformers, f"{architecture}ForCausalLM")(made)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.1)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    size = {} if shard_bytes is None else {"max_shard_size": shard_bytes}
    model.to(dtype=getattr(torch, dtype)).save_pretrained(folder, **size)


def _write_tokenizer(folder: Path, vocab_size: int, max_length: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL_TOKENS, *alphabet]
    names += [f"<filler_{i}>" for i in range(len(names), vocab_size)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)

"""Seeded random Llama checkpoints in transformers' format, small enough for every test."""

# torch and transformers are typed in part only.
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

FIRST_BYTE_ID = 4
SPECIAL_TOKENS = ("<unk>", "<s>", "</s>", "<pad>")
EOS_ID = 2
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}\n{{ message['content'] }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class _Shape:
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    vocab: int
    max_position: int
    seed: int
    tied: bool
    dtype: str
    intermediate: int
    rope_theta: float
    attention_bias: bool
    mlp_bias: bool


def tiny_llama(
    path: Path,
    *,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 320,
    max_position: int = 4096,
    seed: int = 0,
    tied: bool = False,
    dtype: str = "float32",
    intermediate: int | None = None,
    rope_theta: float = 10000.0,
    attention_bias: bool = False,
    mlp_bias: bool = False,
) -> Path:
    """Writes a checkpoint into folder `path` (made if absent) and returns it; an equal one already there is kept.

    The weights are a function of the arguments only; `intermediate` is 3 * hidden by default. The tokenizer is
    byte-level: ids 0-3 are <unk>, <s>, </s>, <pad>, the 256 bytes follow in the order of the byte-level alphabet, ids
    above them are fillers; needs vocab >= 260. Biases, when asked for, are random, or a wrong bias would pass unseen.
    """
    if vocab < FIRST_BYTE_ID + 256:
        raise ValueError(f"vocab = {vocab}: a byte-level tokenizer needs at least {FIRST_BYTE_ID + 256}")
    shape = _Shape(
        layers, hidden, heads, kv_heads, vocab, max_position, seed, tied, dtype,
        hidden * 3 if intermediate is None else intermediate, rope_theta, attention_bias, mlp_bias,
    )  # fmt: skip
    marker = path / "tiny_llama.json"
    if marker.is_file() and json.loads(marker.read_text()) == asdict(shape):
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f"{path.name}.", dir=path.parent))
    try:
        _write_model(work, shape)
        _write_tokenizer(work, shape)
        (work / marker.name).write_text(json.dumps(asdict(shape)))
        if path.exists():
            shutil.rmtree(path)
        os.replace(work, path)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return path


def _write_model(folder: Path, shape: _Shape) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.max_position,
        tie_word_embeddings=shape.tied,
        attention_bias=shape.attention_bias,
        mlp_bias=shape.mlp_bias,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        # Large enough that greedy tokens differ from prompt to prompt instead of collapsing to one.
        initializer_range=0.1,
        bos_token_id=1,
        eos_token_id=EOS_ID,
        pad_token_id=3,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.seed)
        model = LlamaForCausalLM(config)
        for name, parameter in model.named_parameters():
            if name.endswith(".bias"):
                torch.nn.init.normal_(parameter, std=0.1)
            elif "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    typed: torch.nn.Module = torch.nn.Module.to(model, dtype=getattr(torch, shape.dtype))
    assert isinstance(typed, LlamaForCausalLM)
    typed.save_pretrained(folder)


def _write_tokenizer(folder: Path, shape: _Shape) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    names = [*SPECIAL_TOKENS, *alphabet]
    names += [f"<filler_{i}>" for i in range(len(names), shape.vocab)]
    tokenizer = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        model_max_length=shape.max_position,
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(folder)

"""GGUF to a folder of float32 safetensors, by transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def convert_gguf(gguf: Path, folder: Path) -> None:
    """Writes model, tokenizer (with chat template) and generation config of `gguf` into the new `folder`."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer: Any = AutoTokenizer.from_pretrained(**where)
    quantised: Any = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    # A model that says it is quantised can not be saved, although its weights are plain float32 by now.
    config: Any = quantised.config
    del config.quantization_config
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

"""How many token ids the mock takes. It says printable characters only, whatever it hears."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from isthmus_core.errors import ConfigError

if TYPE_CHECKING:
    from isthmus_core.config import ModelConfig

# 256 byte values and the end of an answer, which the mock itself never says.
BYTES = 257
# The ids that it says must exist.
_LEAST = 127


def vocabulary(model: ModelConfig) -> int:
    """Token ids lie in [0, this): bytes, or those of the tokenizer in `model.path`. Raises ConfigError when the folder
    does not tell how many there are, or there are too few."""
    if model.tokenizer == "byte" or model.path is None:
        return BYTES
    file = model.path / "config.json"
    try:
        loaded: Any = json.loads(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path = {model.path}: config.json can not be read: {error}") from error
    size: Any = loaded.get("vocab_size") if isinstance(loaded, dict) else None  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
    if not isinstance(size, int) or size < _LEAST:
        raise ConfigError(f"{file}: vocab_size = {size}: the mock engine needs a number of at least {_LEAST}")
    return size

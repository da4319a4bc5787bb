"""Text to token ids and back. The only place of the system that does either.

A model folder's tokenizer.json is read by `PreTrainedTokenizerFast`; `AutoTokenizer` would pull torch in.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from jinja2.exceptions import TemplateError
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast

from isthmus_core.config import ModelConfig
from isthmus_core.errors import ConfigError
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.chat import Conversation
from isthmus_router.pieces import TokenPieces
from isthmus_router.sampling import SamplingDefaults, read_defaults


class ChatRefused(ValueError):
    """The model's chat template can not express a conversation, or there is no template. The text says why."""


class Detokenizer(Protocol):
    """Turns the tokens of one answer into text, piece by piece. Never returns half a character."""

    def push(self, ids: Sequence[int]) -> str:
        """Text that became complete with these ids; may be empty."""
        ...

    def finish(self) -> str:
        """What is left when the answer ends inside a character (U+FFFD for each broken part)."""
        ...


class Tokenizer(Protocol):
    """Tokenizer of one model. Its methods may be called from several threads at once."""

    @property
    def vocab_size(self) -> int:
        """Ids lie in [0, vocab_size)."""
        ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end an answer."""
        ...

    @property
    def defaults(self) -> SamplingDefaults:
        """Sampling values of requests that name none."""
        ...

    @property
    def longest_token(self) -> int | None:
        """Most bytes of text that one token can stand for; None when there is no such number."""
        ...

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Ids of plain text; with `special` with the special tokens that the model expects around it."""
        ...

    def encode_chat(self, chat: Conversation) -> list[int]:
        """Ids of a conversation in the model's chat template. Raises ChatRefused."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ids, all at once."""
        ...

    def detokenizer(self, *, skip_special: bool = True) -> Detokenizer:
        """A fresh detokenizer, for one answer. With `skip_special` special tokens have no text."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token stands for: those of its own, which need not be whole characters. Special tokens have
        their name."""
        ...


class FastDetokenizer:
    """Streaming detokenizer over a `tokenizers` backend. With `skip_special` special tokens have no text."""

    def __init__(self, backend: Backend, *, skip_special: bool = True) -> None:
        self._backend = backend
        self._skip_special = skip_special
        self._stream = DecodeStream(skip_special_tokens=skip_special)
        self._shown: list[int] = []
        self._held: list[int] = []

    def push(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        fresh = list(ids)
        text = self._stream.step(self._backend, fresh)
        self._held.extend(fresh)
        if text is None:
            return ""
        # The last shown piece is the context in which the held ids must be decoded (spaces depend on it).
        self._shown, self._held = self._held, []
        return text

    def finish(self) -> str:
        if not self._held:
            return ""
        before = self._backend.decode(self._shown, skip_special_tokens=self._skip_special)
        after = self._backend.decode(self._shown + self._held, skip_special_tokens=self._skip_special)
        self._held = []
        return after[len(before) :]


class FastTokenizer:
    """Tokenizer of a model folder."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerFast,
        eos_ids: tuple[int, ...],
        vocab_size: int,
        defaults: SamplingDefaults,
    ) -> None:
        self._tokenizer: Any = tokenizer  # transformers is typed in part only
        self._backend: Backend = tokenizer.backend_tokenizer
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._defaults = defaults
        self._pieces = TokenPieces(self._backend)

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return self._eos_ids

    @property
    def defaults(self) -> SamplingDefaults:
        return self._defaults

    @property
    def longest_token(self) -> int | None:
        return self._pieces.longest

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return self._encode(text, special=special)

    def encode_chat(self, chat: Conversation) -> list[int]:
        if not self._tokenizer.chat_template:
            raise ChatRefused("the model has no chat template; send a prompt instead of messages")
        try:
            text = self._tokenizer.apply_chat_template(
                [turn.row() for turn in chat.turns],
                tools=[dict(tool) for tool in chat.tools] or None,
                tokenize=False,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                **chat.arguments,
            )
        except (TemplateError, TypeError, ValueError) as error:
            # Templates refuse what they can not express (order of roles, a system turn) by raising.
            raise ChatRefused(f"the model's chat template refuses them: {error}") from error
        # The template wrote the special tokens itself.
        return self._encode(text, special=False)

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._backend.decode(list(ids), skip_special_tokens=skip_special)

    def detokenizer(self, *, skip_special: bool = True) -> FastDetokenizer:
        return FastDetokenizer(self._backend, skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        return self._pieces.bytes_of(token)

    def _encode(self, text: str, *, special: bool) -> list[int]:
        # The batch call lets go of the interpreter lock, `encode` does not.
        return self._backend.encode_batch_fast([text], add_special_tokens=special)[0].ids


def open_tokenizer(model: ModelConfig) -> Tokenizer:
    """The tokenizer that the configuration names. Raises ConfigError naming the setting and the missing file."""
    if model.tokenizer == "byte":
        return ByteTokenizer()
    if model.path is None:
        raise ConfigError("model.path is not set: write the model's folder, or model.tokenizer: byte for a mock engine")
    file = model.path / "tokenizer.json"
    if not file.is_file():
        raise ConfigError(f"model.path = {model.path}: no tokenizer.json there")
    loader: Any = PreTrainedTokenizerFast  # transformers is typed in part only
    try:
        tokenizer: PreTrainedTokenizerFast = loader.from_pretrained(str(model.path), local_files_only=True)
    except Exception as error:
        # tokenizers raises bare Exception for a file that it can not parse.
        raise ConfigError(f"{file} can not be read: {error}") from error
    config = _read_json(model.path / "config.json")
    generation = _read_json(model.path / "generation_config.json")
    eos = _ids(generation.get("eos_token_id")) or _ids(config.get("eos_token_id")) or _ids(tokenizer.eos_token_id)
    vocab_size = config.get("vocab_size")
    size = vocab_size if isinstance(vocab_size, int) else len(tokenizer)
    return FastTokenizer(tokenizer, eos, size, read_defaults(generation, model.path / "generation_config.json"))


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        loaded = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(loaded, dict):
        raise ConfigError(f"{path}: the top level must be an object, not {type(loaded).__name__}")
    return cast("dict[str, Any]", loaded)


def _ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list):
        return tuple(item for item in cast("list[Any]", value) if isinstance(item, int))
    return (value,) if isinstance(value, int) else ()

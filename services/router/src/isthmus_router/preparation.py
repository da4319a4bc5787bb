"""From a client's request to token ids and a token budget: everything that can be refused before the coordinator is
asked."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from concurrent.futures import Executor
from typing import assert_never

from isthmus_core.errors import InvalidRequest, UnknownModel, shorten
from isthmus_router.requests import ChatInput, TextInput, TokenInput
from isthmus_router.tokenizer import ChatRefused, Tokenizer

ROLES = ("system", "user", "assistant")
# About 2 ms of tokenising; longer inputs go to a thread so that other streams keep their pace.
INLINE_BYTES = 4096
# Templates cost some 10 µs a turn.
INLINE_TURNS = 32


class ContextLengthExceeded(InvalidRequest):
    """Prompt and output do not fit the model."""


def resolve_model(name: str, tokenizers: Mapping[str, Tokenizer]) -> tuple[str, Tokenizer]:
    """The served name and tokenizer that `name` means; an empty name means the only model. Raises UnknownModel, or
    InvalidRequest for an empty name when there are several models."""
    if not name:
        if len(tokenizers) != 1:
            raise InvalidRequest("model", "''", f"name one of {', '.join(sorted(tokenizers))}")
        name = next(iter(tokenizers))
    tokenizer = tokenizers.get(name)
    if tokenizer is None:
        raise UnknownModel(name, sorted(tokenizers))
    return name, tokenizer


def budget(
    prompt_tokens: int,
    limit: int,
    *,
    requested: int | None,
    default: int | None,
    input_field: str,
    max_tokens_field: str,
) -> int:
    """Tokens that may be generated. `limit`: prompt plus output. Raises ContextLengthExceeded or InvalidRequest."""
    left = limit - prompt_tokens
    if left < 1:
        raise ContextLengthExceeded(
            input_field, f"{prompt_tokens} tokens", f"the model takes {limit} tokens, output included; shorten it"
        )
    if requested is None:
        return left if default is None else min(default, left)
    if requested < 1:
        raise InvalidRequest(max_tokens_field, str(requested), "use at least 1")
    if requested > left:
        raise ContextLengthExceeded(
            max_tokens_field,
            str(requested),
            f"the model takes {limit} tokens and the prompt has {prompt_tokens}; use at most {left}",
        )
    return requested


async def tokenise(
    tokenizer: Tokenizer, source: TextInput | TokenInput | ChatInput, *, max_bytes: int, executor: Executor
) -> list[int]:
    """Ids of the input, at least one. Long inputs are tokenised on `executor`. Raises InvalidRequest."""
    match source:
        case TokenInput():
            ids = _checked_ids(source, tokenizer.vocab_size)
        case TextInput():
            size = _size(source.text, source.field)
            _check_size(size, max_bytes, source.field)
            if size <= INLINE_BYTES:
                ids = tokenizer.encode(source.text)
            else:
                ids = await asyncio.get_running_loop().run_in_executor(executor, tokenizer.encode, source.text)
        case ChatInput():
            ids = await _tokenise_chat(tokenizer, source, max_bytes, executor)
        case _:
            assert_never(source)
    if not ids:
        raise InvalidRequest(source.field, "no tokens", "send at least one token")
    return ids


async def _tokenise_chat(tokenizer: Tokenizer, chat: ChatInput, max_bytes: int, executor: Executor) -> list[int]:
    if not chat.turns:
        raise InvalidRequest(chat.field, "[]", "send at least one message")
    size = 0
    for index, turn in enumerate(chat.turns):
        if turn.role not in ROLES:
            raise InvalidRequest(f"{chat.field}[{index}].role", repr(shorten(turn.role)), f"use {', '.join(ROLES)}")
        size += _size(turn.content, f"{chat.field}[{index}].content")
    _check_size(size, max_bytes, chat.field)
    try:
        if size <= INLINE_BYTES and len(chat.turns) <= INLINE_TURNS:
            return tokenizer.encode_chat(chat.turns)
        return await asyncio.get_running_loop().run_in_executor(executor, tokenizer.encode_chat, chat.turns)
    except ChatRefused as error:
        roles = ", ".join(turn.role for turn in chat.turns)
        raise InvalidRequest(chat.field, f"[{roles}]", str(error)) from error


def _checked_ids(source: TokenInput, vocab_size: int) -> list[int]:
    ids = list(source.ids)
    if ids and not 0 <= min(ids) <= max(ids) < vocab_size:
        index = next(i for i, token in enumerate(ids) if not 0 <= token < vocab_size)
        raise InvalidRequest(f"{source.field}[{index}]", str(ids[index]), f"token ids are 0 to {vocab_size - 1}")
    return ids


def _size(text: str, field: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise InvalidRequest(field, f"half a character at {error.start}", "send valid Unicode text") from error


def _check_size(size: int, limit: int, field: str) -> None:
    if size > limit:
        raise InvalidRequest(field, f"{size} bytes", f"send at most {limit} bytes of text")

"""From a client's request to token ids and a token budget: everything that can be refused before the coordinator is
asked."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import assert_never

from isthmus_core.errors import InvalidRequest, UnknownModel, shorten
from isthmus_router.chat import RESERVED_ARGUMENTS, ROLES, Turn
from isthmus_router.requests import ChatInput, TextInput, TokenInput
from isthmus_router.tokenizer import ChatRefused, Tokenizer

# About 2 ms of tokenising; longer inputs go to a thread so that other streams keep their pace.
INLINE_BYTES = 4096
# Templates cost some 10 µs a turn.
INLINE_TURNS = 32
MAX_TURNS = 8192


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


def split_adapter(name: str, tokenizers: Collection[str]) -> tuple[str, str]:
    """Name of a model and of a LoRA adapter of it ("" = none), of "MODEL:ADAPTER"; a model that is itself called so
    wins."""
    model, _, adapter = name.partition(":")
    return (model, adapter) if adapter and name not in tokenizers else (name, "")


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
    tokenizer: Tokenizer,
    source: TextInput | TokenInput | ChatInput,
    *,
    max_bytes: int,
    executor: Executor,
    limit: int | None = None,
) -> list[int]:
    """Ids of the input, at least one. Long inputs are tokenised on `executor`. `limit`: tokens that the model takes;
    text that can not fit is refused unread. Raises InvalidRequest."""
    most = None
    if limit is not None and tokenizer.longest_token is not None:
        most = limit * tokenizer.longest_token
    match source:
        case TokenInput():
            ids = _checked_ids(source, tokenizer.vocab_size)
        case TextInput():
            size = _size(source.text, source.field)
            _check_size(size, max_bytes, source.field)
            _check_fits(size, most, limit, source.field)
            if size <= INLINE_BYTES:
                ids = tokenizer.encode(source.text, special=source.special)
            else:
                encode = partial(tokenizer.encode, source.text, special=source.special)
                ids = await asyncio.get_running_loop().run_in_executor(executor, encode)
        case ChatInput():
            size = _check_chat(source)
            _check_size(size, max_bytes, source.field)
            _check_fits(size, most, limit, source.field)
            ids = await _tokenise_chat(tokenizer, source, size, executor)
        case _:
            assert_never(source)
    if not ids:
        raise InvalidRequest(source.field, "no tokens", "send at least one token")
    return ids


async def detokenise(tokenizer: Tokenizer, source: TokenInput, *, skip_special: bool, executor: Executor) -> str:
    """Text of token ids. Long lists are decoded on `executor`. Raises InvalidRequest."""
    ids = _checked_ids(source, tokenizer.vocab_size)
    decode = partial(tokenizer.decode, ids, skip_special=skip_special)
    return decode() if len(ids) <= INLINE_BYTES else await asyncio.get_running_loop().run_in_executor(executor, decode)


def _check_chat(source: ChatInput) -> int:
    """Bytes of a conversation. Raises InvalidRequest for one that no template can express."""
    chat = source.chat
    reserved = sorted(RESERVED_ARGUMENTS & chat.arguments.keys())
    if reserved:
        where = f"{source.arguments_field}.{reserved[0]}"
        raise InvalidRequest(where, "set", "leave it out: it is not an argument of the template")
    if chat.continue_final_message and chat.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message", "true", "send add_generation_prompt: false with it; the last turn stays open"
        )
    return _check_turns(chat.turns, source.field)


async def _tokenise_chat(tokenizer: Tokenizer, source: ChatInput, size: int, executor: Executor) -> list[int]:
    chat = source.chat
    size += sum(len(json.dumps(dict(tool))) for tool in chat.tools)
    try:
        if size <= INLINE_BYTES and len(chat.turns) <= INLINE_TURNS:
            return tokenizer.encode_chat(chat)
        return await asyncio.get_running_loop().run_in_executor(executor, tokenizer.encode_chat, chat)
    except ChatRefused as error:
        roles = ", ".join(turn.role for turn in chat.turns)
        raise InvalidRequest(source.field, f"[{roles}]", str(error)) from error


def _check_turns(turns: Sequence[Turn], field: str) -> int:
    """Bytes of all turns. Raises InvalidRequest."""
    if not 1 <= len(turns) <= MAX_TURNS:
        raise InvalidRequest(field, f"{len(turns)} messages", f"send 1 to {MAX_TURNS} messages")
    size = 0
    for index, turn in enumerate(turns):
        where = f"{field}[{index}]"
        if turn.role not in ROLES:
            raise InvalidRequest(f"{where}.role", repr(shorten(turn.role)), f"use {', '.join(ROLES)}")
        if turn.tool_calls and turn.role != "assistant":
            raise InvalidRequest(f"{where}.tool_calls", turn.role, "only the assistant makes tool calls")
        size += _size(turn.content, f"{where}.content")
        size += sum(len(json.dumps(dict(call.arguments))) for call in turn.tool_calls)
    return size


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


def _check_fits(size: int, most: int | None, limit: int | None, field: str) -> None:
    if most is not None and size > most:
        raise ContextLengthExceeded(
            field, f"{size} bytes", f"the model takes {limit} tokens, output included, which is less; shorten it"
        )


def _check_size(size: int, limit: int, field: str) -> None:
    if size > limit:
        raise InvalidRequest(field, f"{size} bytes", f"send at most {limit} bytes of text")

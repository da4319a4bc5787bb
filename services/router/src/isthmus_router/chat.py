"""A conversation as the model's chat template sees it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from pydantic_core import from_json

from isthmus_core.errors import InvalidRequest, shorten

ROLES = ("system", "user", "assistant", "tool")
# What the template gets from the conversation itself, or what rendering does: no template argument may stand for it.
RESERVED_ARGUMENTS = frozenset(
    (
        "messages",
        "conversation",
        "tools",
        "documents",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    )
)


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made. `arguments`: a JSON object."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn; `role` is one of ROLES. `tool_call_id`: the call that a tool's turn answers."""

    role: str
    content: str = ""
    name: str | None = None
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None

    def row(self) -> dict[str, Any]:
        """As templates expect it: OpenAI's names, arguments as an object, absent things left out."""
        row: dict[str, Any] = {"role": self.role, "content": self.content}
        if self.name is not None:
            row["name"] = self.name
        if self.tool_call_id is not None:
            row["tool_call_id"] = self.tool_call_id
        if self.tool_calls:
            row["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in self.tool_calls
            ]
        return row


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns, oldest first, and how to render them.

    `tools`: function schemas in OpenAI's shape. `arguments`: further variables of the template. With
    `continue_final_message` the last turn is left open and the model goes on in it.
    """

    turns: tuple[Turn, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    add_generation_prompt: bool = True
    continue_final_message: bool = False


def parse_object(text: str, where: str) -> dict[str, Any]:
    """The JSON object in `text`; empty text is an empty object. Raises InvalidRequest naming `where`."""
    if not text:
        return {}
    try:
        # Strict where the json module is not: no half characters, no NaN, no endless nesting.
        value = from_json(text, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(where, repr(shorten(text)), f"send a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise InvalidRequest(where, repr(shorten(text)), "send a JSON object")
    return cast("dict[str, Any]", value)

"""Bodies of the OpenAI endpoints.

Three kinds of fields: those that do something here, those that change nothing (`user`, `seed` when greedy, …), and
those that would change the answer and are not supported: accepted only with their neutral value, so that no client is
fooled by an option that does nothing. Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar, cast

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from isthmus_core.errors import InvalidRequest, shorten

GREEDY = "decoding is greedy in this version; leave it out or send 0"


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def _neutral(*accepted: Any) -> Callable[[Any], Any]:
    """Validator of a field that is not supported: only None and these values pass."""

    def check(value: Any) -> Any:
        # By type too: True == 1 and 1 == 1.0, but only numbers stand for numbers.
        same = (value == item and isinstance(value, bool) == isinstance(item, bool) for item in accepted)
        if value is None or any(same):
            return value
        listed = f"; leave it out or send {accepted[0]!r}" if accepted else "; leave it out"
        raise ValueError(f"not supported in this version{listed}")

    return check


def _greedy(value: float | None) -> float | None:
    if value is not None and value != 0:
        raise ValueError(GREEDY)
    return value


Unsupported = Annotated[Any, AfterValidator(_neutral())]
Off = Annotated[Any, AfterValidator(_neutral(False))]
Zero = Annotated[Any, AfterValidator(_neutral(0))]
One = Annotated[Any, AfterValidator(_neutral(1))]
EmptyList = Annotated[Any, AfterValidator(_neutral([]))]
EmptyObject = Annotated[Any, AfterValidator(_neutral({}))]
Ignored = Any


class StreamOptions(_Body):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Common(_Body):
    """Fields of both endpoints."""

    model: str = ""
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    temperature: Annotated[float | None, AfterValidator(_greedy)] = None
    top_p: Annotated[float | None, Field(gt=0, le=1)] = None
    # Change nothing.
    seed: int | None = None
    user: str | None = None
    # Would change the answer.
    n: One = None
    stop: EmptyList = None
    logit_bias: EmptyObject = None
    presence_penalty: Zero = None
    frequency_penalty: Zero = None

    @model_validator(mode="after")
    def _check(self) -> _Common:
        if self.top_p is not None and self.top_p != 1 and self.temperature is None:
            raise ValueError(f"top_p: sampling is not supported; {GREEDY} as temperature, or send top_p 1")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        """True when a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(_Body):
    """A part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


class ChatMessage(_Body):
    """A turn. The fields that an assistant's answer carries are accepted when they say nothing."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]
    name: Unsupported = None
    refusal: Unsupported = None
    tool_calls: EmptyList = None
    function_call: Unsupported = None
    audio: Unsupported = None
    annotations: EmptyList = None

    @property
    def text(self) -> str:
        """Content as one text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatCompletionRequest(_Common):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(fail_fast=True)]
    max_completion_tokens: int | None = None
    # Change nothing.
    metadata: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    parallel_tool_calls: Ignored = None
    service_tier: Annotated[Any, AfterValidator(_neutral("auto", "default"))] = None
    # Would change the answer.
    logprobs: Off = None
    top_logprobs: Zero = None
    response_format: Annotated[Any, AfterValidator(_neutral({"type": "text"}))] = None
    modalities: Annotated[Any, AfterValidator(_neutral(["text"]))] = None
    tools: EmptyList = None
    tool_choice: Annotated[Any, AfterValidator(_neutral("none", "auto"))] = None
    functions: EmptyList = None
    function_call: Annotated[Any, AfterValidator(_neutral("none", "auto"))] = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    prediction: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    store: Off = None

    @model_validator(mode="after")
    def _one_limit(self) -> ChatCompletionRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: send max_completion_tokens or max_tokens, not both")
        return self


class CompletionRequest(_Common):
    """`POST /v1/completions`. One prompt per request: text or token ids, bare or as a list of one."""

    prompt: (
        str
        | Annotated[list[str], Field(fail_fast=True)]
        | Annotated[list[int], Field(fail_fast=True)]
        | Annotated[list[Annotated[list[int], Field(fail_fast=True)]], Field(fail_fast=True)]
    )
    # Would change the answer.
    best_of: One = None
    echo: Off = None
    logprobs: Unsupported = None
    suffix: Annotated[Any, AfterValidator(_neutral(""))] = None


BodyType = TypeVar("BodyType", ChatCompletionRequest, CompletionRequest)

# pydantic puts the branch of a union that it tried into the location.
_BRANCHES = frozenset(("str", "int", "TextPart"))
# Listing every problem of a large broken body would take longer than anything else here.
_MAX_LISTED = 200


def parse_body(kind: type[BodyType], body: bytes) -> BodyType:
    """The request in a JSON body. Raises InvalidRequest naming the first wrong field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > _MAX_LISTED:
            raise InvalidRequest("body", f"{error.error_count()} problems", "send an OpenAI request body") from None
        problems = error.errors(include_url=False)
    first = _path(problems[0]["loc"])
    # Of the branches of a union the one that got furthest says most.
    problem = max(
        (item for item in problems if _path(item["loc"]).startswith(first)), key=lambda item: len(item["loc"])
    )
    where, message = _path(problem["loc"]), problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "json_invalid":
        raise InvalidRequest("body", f"{len(body)} bytes", message)
    if problem["type"] == "extra_forbidden":
        raise InvalidRequest(where, _show(problem["input"]), "unknown field; leave it out")
    if not where and ": " in message:
        where, _, message = message.partition(": ")
        raise InvalidRequest(where, "as sent", message)
    value = "absent" if problem["type"] == "missing" else _show(problem["input"])
    raise InvalidRequest(where or "body", value, message)


def _show(value: Any) -> str:
    if isinstance(value, list | dict):
        size = len(cast("list[Any] | dict[Any, Any]", value))
        return f"{'a list' if isinstance(value, list) else 'an object'} of {size}"
    return repr(shorten(value) if isinstance(value, str) else value)


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content` of a location, without the branches of unions."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES and "[" not in part:
            path += f".{part}" if path else part
    return shorten(path)

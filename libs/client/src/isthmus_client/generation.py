"""What a client sends and gets: prompts, options, parts of answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack, cast

from isthmus.v1 import generation_pb2, inference_service_pb2

from isthmus_client.timeline import Timeline, timeline_from_report
from isthmus_core import token_ids

FINISH_REASONS = {1: "stop", 2: "length"}


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the assistant made; `arguments` is a JSON object."""

    name: str
    arguments: Mapping[str, Any]
    id: str = ""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation; `role` is "system", "user", "assistant" or "tool"."""

    role: str
    content: str
    name: str = ""
    tool_calls: Sequence[ToolCall] = ()
    tool_call_id: str = ""


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict[str, Any])


Prompt = str | Sequence[int] | Sequence[Message]


class Options(TypedDict, total=False):
    """Options of a request; each is explained at `isthmus.v1.InferenceServiceGenerateRequest` or `SamplingOptions`.

    What is left out is the model's recommended value, else OpenAI's default. `temperature` 0 is greedy.
    """

    model: str
    max_tokens: int | None
    ignore_eos: bool
    request_id: int
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float | None
    logit_bias: Mapping[int, float]
    min_tokens: int
    n: int
    logprobs: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop: bool
    keep_special_tokens: bool
    cache_salt: bytes
    tools: Sequence[Tool]
    template_arguments: Mapping[str, Any]
    continue_final_message: bool


_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "min_tokens",
    "n",
    "logprobs",
)
_PLAIN = (
    "model",
    "max_tokens",
    "ignore_eos",
    "request_id",
    "stop_token_ids",
    "include_stop",
    "keep_special_tokens",
    "cache_salt",
)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Log probabilities at one position: of the chosen token, and (token id, log probability) of the best ones."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class End:
    """End of a request. `reason`: why the last answer to end did: "stop" or "length". `retries`: why instances were
    given up on the way, in order."""

    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    timeline: Timeline
    retries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Part:
    """Part of answer `index`: new text (never half a character) and its token ids.

    `reason` ("stop" or "length") is set on an answer's last part; `stopped_by` is then the stop string or stop token
    that ended it, if one did. `end` is set on the last part of all, which has no text.
    """

    text: str
    token_ids: tuple[int, ...]
    request_id: int
    index: int = 0
    logprobs: tuple[Logprobs, ...] = ()
    reason: str | None = None
    stopped_by: str | int | None = None
    end: End | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer. `end` tells about the request, which may have other answers."""

    text: str
    token_ids: tuple[int, ...]
    request_id: int
    reason: str
    stopped_by: str | int | None
    logprobs: tuple[Logprobs, ...]
    end: End


def build_request(prompt: Prompt, **options: Unpack[Options]) -> inference_service_pb2.InferenceServiceGenerateRequest:
    """The request for a prompt: text, token ids, or messages (which go through the model's chat template).

    Raises ValueError for a prompt of several kinds and for chat options without messages, TypeError for an unknown
    option.
    """
    unknown = options.keys() - Options.__annotations__.keys()
    if unknown:
        raise TypeError(f"unknown option {', '.join(sorted(unknown))}")
    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    request = inference_service_pb2.InferenceServiceGenerateRequest(**_pick(given, _PLAIN))
    stop = options.get("stop", ())
    request.stop.extend([stop] if isinstance(stop, str) else stop)
    request.sampling.CopyFrom(inference_service_pb2.SamplingOptions(**_pick(given, _SAMPLING)))
    for token, bias in options.get("logit_bias", {}).items():
        request.sampling.logit_bias.add(token_id=token, bias=bias)
    _set_input(request, prompt, options)
    return request


def _pick(given: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: given[name] for name in names if name in given}


def _set_input(
    request: inference_service_pb2.InferenceServiceGenerateRequest, prompt: Prompt, options: Options
) -> None:
    if not isinstance(prompt, str) and prompt and all(isinstance(item, Message) for item in prompt):
        request.chat.CopyFrom(_chat(cast("Sequence[Message]", prompt), options))
        return
    for name in ("tools", "template_arguments", "continue_final_message"):
        if options.get(name):
            raise ValueError(f"{name} needs messages as the prompt")
    if isinstance(prompt, str):
        request.prompt = prompt
    elif all(isinstance(item, int) for item in prompt):
        request.prompt_token_ids.CopyFrom(inference_service_pb2.TokenInput(ids=cast("Sequence[int]", prompt)))
    else:
        raise ValueError("prompt mixes messages and token ids; give one kind")


def _chat(messages: Sequence[Message], options: Options) -> inference_service_pb2.ChatInput:
    chat = inference_service_pb2.ChatInput(continue_final_message=options.get("continue_final_message", False))
    for message in messages:
        row = chat.messages.add(
            role=message.role, content=message.content, name=message.name, tool_call_id=message.tool_call_id
        )
        for call in message.tool_calls:
            row.tool_calls.add(id=call.id, name=call.name, arguments_json=json.dumps(dict(call.arguments)))
    for tool in options.get("tools", ()):
        parameters = json.dumps(dict(tool.parameters))
        chat.tools.add(name=tool.name, description=tool.description, parameters_json=parameters)
    if arguments := options.get("template_arguments"):
        chat.template_arguments_json = json.dumps(dict(arguments))
    return chat


def parse_part(
    response: inference_service_pb2.InferenceServiceGenerateResponse, request_id: int, last_reason: str
) -> Part:
    """The part in a message. `last_reason`: why the answer that ended last did."""
    if response.HasField("finished"):
        finished = response.finished
        end = End(
            last_reason,
            finished.prompt_tokens,
            finished.completion_tokens,
            finished.cached_tokens,
            timeline_from_report(finished.report),
            tuple(finished.report.retries),
        )
        return Part("", (), request_id, end=end)
    reason = None
    if response.finish_reason:
        reason = FINISH_REASONS.get(response.finish_reason, f"unknown reason {response.finish_reason}")
    kind = response.WhichOneof("stopped_by")
    return Part(
        response.text,
        tuple(response.token_ids),
        request_id,
        response.index,
        tuple(_logprobs(entry) for entry in response.logprobs),
        reason,
        None if kind is None else getattr(response, kind),
    )


def _logprobs(entry: generation_pb2.TokenLogprobs) -> Logprobs:
    top = token_ids.unpack(entry.top_tokens.le_uint32)
    return Logprobs(entry.logprob, tuple(zip(top, entry.top_logprobs, strict=True)))

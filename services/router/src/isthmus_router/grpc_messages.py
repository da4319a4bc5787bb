"""Messages of `InferenceService` to and from the router's own types."""

from __future__ import annotations

from typing import Any

from isthmus.v1 import common_pb2, generation_pb2, inference_service_pb2

from isthmus_core import token_ids
from isthmus_core.errors import InvalidRequest
from isthmus_core.tracing import TraceContext
from isthmus_router.affinity import check_session
from isthmus_router.chat import Conversation, ToolCall, Turn, parse_object
from isthmus_router.quota import Quota
from isthmus_router.requests import ChatInput, End, GenerateRequest, Logprobs, Part, TextInput, TokenInput
from isthmus_router.sampling import SamplingOptions
from isthmus_router.schedules import Wish
from isthmus_router.structure import check_texts

OPERATION = "isthmus.v1.InferenceService/Generate"
_Request = inference_service_pb2.InferenceServiceGenerateRequest
_Response = inference_service_pb2.InferenceServiceGenerateResponse
_Sampling = inference_service_pb2.SamplingOptions


def parse_generate(
    request: _Request,
    timeout_s: float,
    trace: TraceContext | None,
    *,
    session: str = "",
    tenant: str = "",
    quota: Quota | None = None,
) -> GenerateRequest:
    """The request in a message; `session` as the call's metadata says, `tenant` and `quota` of who calls. Raises
    InvalidRequest."""
    if request.WhichOneof("input") == "prompt_token_ids":
        source: TextInput | TokenInput | ChatInput = TokenInput(
            tuple(request.prompt_token_ids.ids), "prompt_token_ids.ids"
        )
    else:
        source = parse_text(request, special=True, known="prompt, chat and prompt_token_ids")
    return GenerateRequest(
        operation=OPERATION,
        model=request.model,
        input=source,
        timeout_s=timeout_s,
        max_tokens=request.max_tokens if request.HasField("max_tokens") else None,
        sampling=_sampling(request),
        cache_salt=request.cache_salt,
        request_id=request.request_id,
        wish=_wish(int(request.schedule)),
        session=check_session(request.session_id or session, "session_id"),
        tenant=tenant,
        quota=quota,
        trace=trace,
    )


def _wish(number: int) -> Wish | None:
    if number == inference_service_pb2.REQUEST_SCHEDULE_UNSPECIFIED:
        return None
    try:
        return Wish(number)
    except ValueError:
        raise InvalidRequest("schedule", str(number), f"use 0 or one of {[wish.value for wish in Wish]}") from None


def parse_text(
    request: _Request | inference_service_pb2.TokenizeRequest, *, special: bool, known: str
) -> TextInput | ChatInput:
    """The text or conversation in a message; `known` lists the inputs that it may have. Raises InvalidRequest."""
    kind = request.WhichOneof("input")
    if kind == "prompt":
        return TextInput(request.prompt, special=special)
    if kind == "chat":
        return ChatInput(_conversation(request.chat), "chat.messages", "chat.template_arguments_json")
    raise InvalidRequest("input", "absent", f"set one of {known}")


def to_response(part: Part | End) -> _Response:
    """Message of a part."""
    if isinstance(part, End):
        finished = inference_service_pb2.GenerateFinished(
            prompt_tokens=part.prompt_tokens,
            completion_tokens=part.completion_tokens,
            cached_tokens=part.cached_tokens,
            report=part.report,
        )
        return _Response(finished=finished)
    response = _Response(
        text=part.text,
        token_ids=part.token_ids,
        index=part.index,
        logprobs=[_logprobs(entry) for entry in part.logprobs],
    )
    if part.reason is not None:
        response.finish_reason = generation_pb2.FinishReason.Name(part.reason.value)  # type: ignore[assignment]
    if isinstance(part.stopped_by, str):
        response.stop = part.stopped_by
    elif part.stopped_by is not None:
        response.stop_token_id = part.stopped_by
    return response


def _sampling(request: _Request) -> SamplingOptions:
    asked = request.sampling

    def optional(name: str) -> Any:
        return getattr(asked, name) if asked.HasField(name) else None  # type: ignore[arg-type]

    return SamplingOptions(
        temperature=optional("temperature"),
        top_p=optional("top_p"),
        top_k=optional("top_k"),
        min_p=optional("min_p"),
        seed=optional("seed"),
        presence_penalty=asked.presence_penalty,
        frequency_penalty=asked.frequency_penalty,
        repetition_penalty=optional("repetition_penalty"),
        logit_bias=tuple((entry.token_id, entry.bias) for entry in asked.logit_bias),
        min_tokens=asked.min_tokens,
        stop_token_ids=tuple(request.stop_token_ids),
        ignore_eos=request.ignore_eos,
        n=asked.n or 1,
        logprobs=optional("logprobs"),
        stop=tuple(request.stop),
        include_stop=request.include_stop,
        skip_special=not request.keep_special_tokens,
        prefix="sampling.",
    )


def _conversation(chat: inference_service_pb2.ChatInput) -> Conversation:
    texts = [tool.parameters_json for tool in chat.tools]
    texts += [call.arguments_json for message in chat.messages for call in message.tool_calls]
    check_texts([*texts, chat.template_arguments_json], "chat")
    return Conversation(
        turns=tuple(_turn(message, f"chat.messages[{index}]") for index, message in enumerate(chat.messages)),
        tools=tuple(_tool(tool, f"chat.tools[{index}]") for index, tool in enumerate(chat.tools)),
        arguments=parse_object(chat.template_arguments_json, "chat.template_arguments_json"),
        add_generation_prompt=not chat.continue_final_message,
        continue_final_message=chat.continue_final_message,
    )


def _turn(message: inference_service_pb2.ChatMessage, where: str) -> Turn:
    calls = tuple(
        ToolCall(call.id, call.name, parse_object(call.arguments_json, f"{where}.tool_calls[{index}].arguments_json"))
        for index, call in enumerate(message.tool_calls)
    )
    return Turn(message.role, message.content, message.name or None, calls, message.tool_call_id or None)


def _tool(tool: inference_service_pb2.Tool, where: str) -> dict[str, Any]:
    if not tool.name:
        raise InvalidRequest(f"{where}.name", "''", "name the function")
    parameters = parse_object(tool.parameters_json, f"{where}.parameters_json")
    function: dict[str, Any] = {"name": tool.name, "description": tool.description, "parameters": parameters}
    return {"type": "function", "function": function}


def _logprobs(entry: Logprobs) -> generation_pb2.TokenLogprobs:
    return generation_pb2.TokenLogprobs(
        logprob=entry.chosen.logprob,
        top_tokens=common_pb2.TokenIds(le_uint32=token_ids.pack(rated.token for rated in entry.top)),
        top_logprobs=[rated.logprob for rated in entry.top],
    )

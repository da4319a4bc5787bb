"""From the bodies of the OpenAI endpoints to the router's own requests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

from isthmus_core.errors import InvalidRequest, shorten
from isthmus_core.tracing import TraceContext
from isthmus_router.chat import Conversation, ToolCall, Turn, parse_object
from isthmus_router.http.schemas import (
    ChatCompletionRequest,
    ChatMessage,
    CompletionRequest,
    ConversationBody,
    GenerationBody,
    ToolBody,
)
from isthmus_router.quota import Quota
from isthmus_router.requests import ChatInput, GenerateRequest, TextInput, TokenInput
from isthmus_router.sampling import SamplingOptions
from isthmus_router.schedules import Wish

# What OpenAI's completions endpoint generates when nothing is said.
COMPLETION_DEFAULT_MAX_TOKENS = 16
# Answers to all prompts of one body.
MAX_CHOICES = 128


@dataclass(frozen=True, slots=True)
class Arrival:
    """What a request has besides its body."""

    timeout_s: float
    arrived: float
    arrived_ns: int
    request_id: int
    label: str
    trace: TraceContext | None
    session: str = ""
    tenant: str = ""
    quota: Quota | None = None


def chat_request(body: ChatCompletionRequest, arrival: Arrival) -> GenerateRequest:
    """The request of a chat body. Raises InvalidRequest."""
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    newer = body.max_completion_tokens is not None
    return GenerateRequest(
        operation="POST /v1/chat/completions",
        model=body.model,
        input=chat_input(body, use_tools=body.tool_choice != "none"),
        timeout_s=arrival.timeout_s,
        max_tokens=body.max_completion_tokens if newer else body.max_tokens,
        max_tokens_field="max_completion_tokens" if newer else "max_tokens",
        sampling=sampling_options(body, logprobs, "top_logprobs"),
        cache_salt=(body.cache_salt or "").encode(),
        request_id=arrival.request_id,
        wish=wish(body),
        session=arrival.session,
        tenant=arrival.tenant,
        quota=arrival.quota,
        label=arrival.label,
        trace=arrival.trace,
        arrived=arrival.arrived,
        arrived_ns=arrival.arrived_ns,
    )


def completion_requests(body: CompletionRequest, arrival: Arrival) -> list[GenerateRequest]:
    """One request for each prompt of a body. Raises InvalidRequest."""
    prompts = _prompts(body)
    n = 1 if body.n is None else body.n
    if len(prompts) * n > MAX_CHOICES and len(prompts) > 1:
        raise InvalidRequest(
            "prompt", f"{len(prompts)} prompts with n = {n}", f"ask for at most {MAX_CHOICES} answers in one request"
        )
    sampling = sampling_options(body, body.logprobs, "logprobs")
    return [
        GenerateRequest(
            operation="POST /v1/completions",
            model=body.model,
            input=prompt,
            timeout_s=arrival.timeout_s,
            max_tokens=body.max_tokens,
            default_max_tokens=COMPLETION_DEFAULT_MAX_TOKENS,
            sampling=sampling,
            cache_salt=(body.cache_salt or "").encode(),
            # The client's id names one request; of several each has its own.
            request_id=arrival.request_id if len(prompts) == 1 else 0,
            wish=wish(body),
            session=arrival.session,
            tenant=arrival.tenant,
            quota=arrival.quota,
            label=arrival.label,
            trace=arrival.trace,
            arrived=arrival.arrived,
            arrived_ns=arrival.arrived_ns,
        )
        for prompt in prompts
    ]


def wish(body: GenerationBody) -> Wish | None:
    """How the client wants the request to be divided."""
    return None if body.schedule is None else Wish[body.schedule.upper()]


def chat_input(body: ConversationBody, *, use_tools: bool = True) -> ChatInput:
    """The conversation of a body. Raises InvalidRequest."""
    continued = bool(body.continue_final_message)
    prompted = (not continued) if body.add_generation_prompt is None else body.add_generation_prompt
    chat = Conversation(
        turns=tuple(_turn(message, f"messages[{index}]") for index, message in enumerate(body.messages)),
        tools=tuple(_tool(tool) for tool in body.tools or ()) if use_tools else (),
        arguments=body.chat_template_kwargs or {},
        add_generation_prompt=prompted,
        continue_final_message=continued,
    )
    return ChatInput(chat)


def sampling_options(body: GenerationBody, logprobs: int | None, logprobs_field: str) -> SamplingOptions:
    """The sampling options of a body. Raises InvalidRequest."""
    stop = body.stop if body.stop is not None else ()
    seed = body.seed
    if seed is not None and not -(1 << 63) <= seed < (1 << 64):
        raise InvalidRequest("seed", str(seed), "use a 64-bit number")
    return SamplingOptions(
        temperature=body.temperature,
        top_p=body.top_p,
        # vLLM's way to say "all".
        top_k=0 if body.top_k == -1 else body.top_k,
        min_p=body.min_p,
        seed=seed,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=body.repetition_penalty,
        logit_bias=_logit_bias(body.logit_bias or {}),
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        n=1 if body.n is None else body.n,
        logprobs=logprobs,
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        logprobs_field=logprobs_field,
    )


def _logit_bias(entries: dict[str, float]) -> tuple[tuple[int, float], ...]:
    biases: dict[int, float] = {}
    for name, bias in entries.items():
        # At most ten digits: int() of a very long text is slow.
        if not (name.isascii() and name.isdigit() and len(name) <= 10):
            raise InvalidRequest("logit_bias", repr(shorten(name)), "the keys are token ids")
        biases[int(name)] = bias
    return tuple(biases.items())


def _turn(message: ChatMessage, where: str) -> Turn:
    calls = tuple(
        ToolCall(
            call.id,
            call.function.name,
            parse_object(call.function.arguments, f"{where}.tool_calls[{index}].function.arguments"),
        )
        for index, call in enumerate(message.tool_calls or ())
    )
    # "developer" is the newer name of the system's turn.
    role = "system" if message.role == "developer" else message.role
    return Turn(role, message.text, message.name, calls, message.tool_call_id)


def _tool(tool: ToolBody) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.function.name, "description": tool.function.description or ""}
    function["parameters"] = tool.function.parameters or {"type": "object", "properties": {}}
    return {"type": "function", "function": function}


def _prompts(body: CompletionRequest) -> list[TextInput | TokenInput]:
    prompt, special = body.prompt, body.add_special_tokens is not False
    if isinstance(prompt, str):
        return [TextInput(prompt, special=special)]
    if not prompt:
        raise InvalidRequest("prompt", "[]", "send at least one prompt or token")
    if isinstance(prompt[0], int):
        return [TokenInput(tuple(cast("list[int]", prompt)))]
    if len(prompt) > MAX_CHOICES:
        raise InvalidRequest("prompt", f"a list of {len(prompt)}", f"send at most {MAX_CHOICES} prompts")
    inputs: list[TextInput | TokenInput] = []
    for index, item in enumerate(prompt):
        where = f"prompt[{index}]"
        if isinstance(item, str):
            inputs.append(TextInput(item, where, special))
        else:
            inputs.append(TokenInput(tuple(cast("list[int]", item)), where))
    return inputs

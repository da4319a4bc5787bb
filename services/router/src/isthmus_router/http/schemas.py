"""Bodies of the OpenAI endpoints, with the further sampling fields that vLLM's clients know."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from isthmus_router.http.fields import (
    FAST,
    Body,
    EmptyList,
    EmptyText,
    Ignored,
    JsonObject,
    Off,
    On,
    One,
    TokenIds,
    Unsupported,
    Zero,
    neutral,
)

MAX_TOOLS = 128
MAX_PARTS = 1024


class StreamOptions(Body):
    """`stream_options`."""

    include_usage: bool | None = None
    include_obfuscation: Ignored = None
    continuous_usage_stats: Off = None


class GenerationBody(Body):
    """Fields of both generating endpoints. Ranges are checked with the sampling options."""

    model: str = ""
    max_tokens: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    seed: int | None = None
    stop: str | Annotated[list[str], FAST] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # As vLLM has them.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: int | None = None
    stop_token_ids: TokenIds | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    cache_salt: Annotated[str, Field(max_length=1024)] | None = None
    # How the request shall be divided between instances; the router decides when it is not set.
    schedule: Literal["context_first", "generation_first", "unsplit"] | None = None
    # Change nothing.
    user: Ignored = None
    # Would change the answer.
    spaces_between_special_tokens: On = None
    priority: Zero = None

    @model_validator(mode="after")
    def _check_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed with stream: true")
        return self

    @property
    def include_usage(self) -> bool:
        """True when a stream ends with a chunk that carries the usage."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)


class TextPart(Body):
    """A part of a message's content. Only text is supported."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """`tool_calls[].function`. `arguments` is a JSON object as text."""

    name: Annotated[str, Field(min_length=1)]
    arguments: str


class ToolCallBody(Body):
    """A call that the assistant made."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Body):
    """A turn. The fields that an assistant's answer carries are accepted when they say nothing."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_PARTS)] | None = None
    name: str | None = None
    tool_calls: Annotated[list[ToolCallBody], FAST] | None = None
    tool_call_id: str | None = None
    refusal: Unsupported = None
    function_call: Unsupported = None
    audio: Unsupported = None
    annotations: EmptyList = None

    @model_validator(mode="after")
    def _check_role(self) -> ChatMessage:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content: send text or a list of text parts")
        if self.tool_calls and self.role != "assistant":
            raise ValueError("tool_calls: only the assistant makes tool calls")
        if (self.tool_call_id is None) is (self.role == "tool"):
            raise ValueError("tool_call_id: it belongs to a tool's turn, and a tool's turn needs it")
        return self

    @property
    def text(self) -> str:
        """Content as one text."""
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""


class FunctionBody(Body):
    """`tools[].function`."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    description: str | None = None
    parameters: JsonObject | None = None
    strict: Off = None


class ToolBody(Body):
    """A function that the model may call."""

    type: Literal["function"]
    function: FunctionBody


class ConversationBody(Body):
    """What the chat template needs."""

    messages: Annotated[list[ChatMessage], FAST]
    tools: Annotated[list[ToolBody], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None


class ChatCompletionRequest(GenerationBody, ConversationBody):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    # Tools go into the template; the model's answer stays text, so nothing can be forced.
    tool_choice: Annotated[Any, AfterValidator(neutral("auto", "none"))] = None
    # Change nothing.
    metadata: Ignored = None
    safety_identifier: Ignored = None
    prompt_cache_key: Ignored = None
    parallel_tool_calls: Ignored = None
    service_tier: Annotated[Any, AfterValidator(neutral("auto", "default"))] = None
    # Would change the answer.
    response_format: Annotated[Any, AfterValidator(neutral({"type": "text"}))] = None
    modalities: Annotated[Any, AfterValidator(neutral(["text"]))] = None
    functions: EmptyList = None
    function_call: Annotated[Any, AfterValidator(neutral("none", "auto"))] = None
    reasoning_effort: Unsupported = None
    verbosity: Unsupported = None
    prediction: Unsupported = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    store: Off = None
    echo: Off = None

    @model_validator(mode="after")
    def _check_pairs(self) -> ChatCompletionRequest:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise ValueError("max_tokens: send max_completion_tokens or max_tokens, not both")
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs: only allowed with logprobs: true")
        return self


class CompletionRequest(GenerationBody):
    """`POST /v1/completions`. Prompts are texts or token ids; a list of them makes that many requests."""

    prompt: str | Annotated[list[str], FAST] | TokenIds | Annotated[list[TokenIds], FAST]
    logprobs: int | None = None
    add_special_tokens: bool | None = None
    # Would change the answer.
    best_of: One = None
    echo: Off = None
    suffix: EmptyText = None
    response_format: Annotated[Any, AfterValidator(neutral({"type": "text"}))] = None


class TokenizeTextRequest(Body):
    """`POST /tokenize` with a prompt."""

    model: str = ""
    prompt: str
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatRequest(ConversationBody):
    """`POST /tokenize` with messages."""

    model: str = ""
    add_special_tokens: Off = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`."""

    model: str = ""
    tokens: TokenIds

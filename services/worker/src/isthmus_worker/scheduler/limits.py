"""What an instance accepts, judged when a request is submitted."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_core.errors import InvalidRequest
from isthmus_worker.engine import EngineRequest, RequestType

_LEG_OF_ROLE = {
    "context": RequestType.CONTEXT_ONLY,
    "generation": RequestType.GENERATION_ONLY,
    "context_and_generation": RequestType.CONTEXT_AND_GENERATION,
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the model, the cache and the batch. `role` as in worker.role."""

    role: str
    vocab_size: int
    max_model_len: int
    tokens_per_block: int
    num_blocks: int
    max_running: int
    max_batch_tokens: int
    max_waiting: int

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest when the request can never run here, naming the field and what would be accepted."""
        leg = _LEG_OF_ROLE[self.role]
        if request.request_type is not leg:
            raise InvalidRequest(
                "request_type", request.request_type.name, f"this instance has role {self.role} and takes {leg.name}"
            )
        self._check_tokens("prompt", request.prompt)
        max_tokens = request.sampling.max_tokens
        if max_tokens < 1:
            raise InvalidRequest("sampling.max_tokens", str(max_tokens), "use at least 1")
        self._check_context_phase(request)
        self._check_length(request)

    def _check_tokens(self, field: str, tokens: tuple[int, ...]) -> None:
        if not tokens:
            raise InvalidRequest(field, "empty", "send at least one token")
        for wrong in (max(tokens), min(tokens)):
            if not 0 <= wrong < self.vocab_size:
                raise InvalidRequest(field, f"token {wrong}", f"token ids must lie in [0, {self.vocab_size})")

    def _check_context_phase(self, request: EngineRequest) -> None:
        phase = request.context_phase
        if request.request_type is not RequestType.GENERATION_ONLY:
            if phase is not None:
                raise InvalidRequest("context_phase", "present", f"leave it out ({request.request_type.name})")
            return
        if phase is None:
            raise InvalidRequest("context_phase", "absent", "send what the context leg answered")
        if phase.key != request.key:
            raise InvalidRequest("context_phase.key", str(phase.key), f"both legs must have one key, {request.key}")
        if phase.prompt_tokens != len(request.prompt):
            remedy = f"must be the length of the prompt, {len(request.prompt)}"
            raise InvalidRequest("context_phase.prompt_tokens", str(phase.prompt_tokens), remedy)
        self._check_tokens("context_phase.first_tokens", phase.first_tokens)
        if len(phase.first_tokens) >= request.sampling.max_tokens:
            raise InvalidRequest(
                "sampling.max_tokens",
                str(request.sampling.max_tokens),
                f"the context leg has made {len(phase.first_tokens)} tokens: nothing is left to generate",
            )
        if not set(phase.first_tokens).isdisjoint(request.sampling.stop_token_ids):
            raise InvalidRequest(
                "context_phase.first_tokens", str(phase.first_tokens), "a stop token is among them: nothing is left"
            )

    def _check_length(self, request: EngineRequest) -> None:
        prompt, max_tokens = len(request.prompt), request.sampling.max_tokens
        if prompt >= self.max_model_len:
            raise InvalidRequest(
                "prompt",
                f"{prompt} tokens",
                f"at most {self.max_model_len - 1} tokens: prompt and output share {self.max_model_len} positions",
            )
        if prompt + max_tokens > self.max_model_len:
            raise InvalidRequest(
                "sampling.max_tokens",
                str(max_tokens),
                f"at most {self.max_model_len - prompt} after a prompt of {prompt} tokens: both share "
                f"{self.max_model_len} positions",
            )
        # A context leg never holds more than its prompt and the first token.
        output = 1 if request.request_type is RequestType.CONTEXT_ONLY else max_tokens
        capacity = self.num_blocks * self.tokens_per_block
        if -(-(prompt + output) // self.tokens_per_block) > self.num_blocks:
            raise InvalidRequest(
                "sampling.max_tokens" if prompt + 1 <= capacity else "prompt",
                f"{prompt} prompt tokens + {output}",
                f"the KV cache of this instance holds {capacity} tokens",
            )

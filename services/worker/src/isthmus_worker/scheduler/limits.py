"""What an instance accepts, judged when a request is submitted."""

from __future__ import annotations

from dataclasses import dataclass

from isthmus_core.errors import InvalidRequest
from isthmus_worker.engine import EngineRequest, RequestType, Sampling, Tokens
from isthmus_worker.sampling import check_sampling

_LEGS_OF_ROLE = {
    "context": (RequestType.CONTEXT_ONLY,),
    "generation": (RequestType.GENERATION_ONLY, RequestType.CONTEXT_AND_GENERATION),
    "context_and_generation": (RequestType.CONTEXT_AND_GENERATION,),
    # The hub knows the role of the moment and refuses what is not for it.
    "any": tuple(RequestType),
}


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the model, the cache and the batch. `role` as in worker.role, or "any" where that can change.
    `draft_tokens`: guesses that a context leg sends along with its first token. `adapters`: names of LoRA adapters.
    `fill_gate`: decoding waits until so many caches have arrived since the instance was idle."""

    role: str
    vocab_size: int
    max_model_len: int
    tokens_per_block: int
    num_blocks: int
    max_running: int
    max_batch_tokens: int
    max_waiting: int
    draft_tokens: int = 0
    adapters: tuple[str, ...] = ()
    fill_gate: int = 0

    def check(self, request: EngineRequest) -> None:
        """Raises InvalidRequest when the request can never run here, naming the field and what would be accepted."""
        legs = _LEGS_OF_ROLE[self.role]
        if request.request_type not in legs:
            names = " and ".join(leg.name for leg in legs)
            raise InvalidRequest(
                "request_type", request.request_type.name, f"this instance has role {self.role} and takes {names}"
            )
        if request.adapter and request.adapter not in self.adapters:
            known = f"known here are {', '.join(sorted(self.adapters))}" if self.adapters else "this instance has none"
            raise InvalidRequest("adapter", request.adapter, known)
        self._check_tokens("prompt", request.prompt)
        check_sampling(request.sampling, self.vocab_size)
        self._check_context_phase(request)
        self._check_length(request)
        self._check_answers(request)

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
        if request.context is not None:
            return  # see `check_first_tokens`
        if phase is None:
            raise InvalidRequest("context_phase", "absent", "send what the context leg answered")
        if phase.key != request.key:
            raise InvalidRequest("context_phase.key", str(phase.key), f"both legs must have one key, {request.key}")
        if phase.prompt_tokens != len(request.prompt):
            remedy = f"must be the length of the prompt, {len(request.prompt)}"
            raise InvalidRequest("context_phase.prompt_tokens", str(phase.prompt_tokens), remedy)
        self.check_first_tokens(phase.first_tokens, request.sampling)
        if all(chunk.reason is not None for chunk in phase.first_tokens):
            raise InvalidRequest("context_phase.first_tokens", "every answer has ended", "nothing is left to generate")

    def check_first_tokens(self, chunks: tuple[Tokens, ...], sampling: Sampling) -> None:
        """Raises InvalidRequest unless these can be what the context leg of such a request has sampled."""
        field = "context_phase.first_tokens"
        if [one.sample for one in chunks] != list(range(sampling.n)):
            samples = ", ".join(str(one.sample) for one in chunks)
            raise InvalidRequest(field, f"answers {samples}", f"send one chunk for each answer in [0, {sampling.n})")
        for chunk in chunks:
            self._check_tokens(field, chunk.ids)
            if chunk.drafts:
                self._check_tokens(f"{field}.draft_tokens", chunk.drafts)
            if len(chunk.ids) > sampling.max_tokens:
                raise InvalidRequest(field, f"{len(chunk.ids)} tokens", f"at most {sampling.max_tokens} (max_tokens)")
        going_on = [chunk.ids for chunk in chunks if chunk.reason is None]
        longest = max((len(ids) for ids in going_on), default=0)
        if longest >= sampling.max_tokens:
            raise InvalidRequest(
                "sampling.max_tokens",
                str(sampling.max_tokens),
                f"the context leg has made {longest} tokens: nothing is left to generate",
            )
        stop = set(sampling.stop_token_ids)
        if any(not stop.isdisjoint(ids) for ids in going_on):
            raise InvalidRequest(field, str(going_on), "a stop token is in an answer that has not ended")

    def _check_length(self, request: EngineRequest) -> None:
        prompt, max_tokens = len(request.prompt), request.sampling.max_tokens
        if request.sampling.resumed >= prompt:
            raise InvalidRequest("sampling.resumed_tokens", str(request.sampling.resumed), f"use less than {prompt}")
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

    def _check_answers(self, request: EngineRequest) -> None:
        """All answers must fit into the batch and, when they part from each other, into the cache."""
        n, prompt = request.sampling.n, len(request.prompt)
        if n > self.max_running:
            raise InvalidRequest(
                "sampling.n", str(n), f"this instance runs {self.max_running} answers (engine.max_running)"
            )
        if request.request_type is RequestType.CONTEXT_ONLY:
            return
        full = prompt // self.tokens_per_block
        # The prompt and the first token, and one token more before the first of them can be preempted.
        own = -(-(prompt + self._longest_first(request) + 1) // self.tokens_per_block) - full
        if full + n * own > self.num_blocks:
            raise InvalidRequest(
                "sampling.n",
                str(n),
                f"{n} answers to {prompt} prompt tokens take {full + n * own} KV blocks, this instance has "
                f"{self.num_blocks}",
            )

    def _longest_first(self, request: EngineRequest) -> int:
        phase = request.context_phase
        return 0 if phase is None else max(len(chunk.ids) for chunk in phase.first_tokens)

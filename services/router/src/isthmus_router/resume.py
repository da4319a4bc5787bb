"""What another try at a request has to do: go on behind the tokens that the client has. Pure.

The answers' tokens become part of the prompt. Random numbers depend on (seed, index of the answer, absolute position)
and on nothing else, so a seeded answer goes on as it would have; so does a greedy one, as far as a model computes the
same logits for a prompt as token by token. Penalties and min_tokens count what was said before (`Sampling.resumed`).
Several answers no longer have one prompt: each unfinished one becomes a try of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from isthmus_core import token_ids
from isthmus_router.ports import Sampling, Tokens


@dataclass(frozen=True, slots=True)
class Work:
    """One try. `sample`: which answer it is, None for all `sampling.n` of them. `prompt`: little-endian u32."""

    prompt: bytes
    sampling: Sampling
    sample: int | None = None

    def named(self, tokens: Tokens) -> Tokens:
        """Tokens of this try, under the number that their answer has for the client."""
        return tokens if self.sample is None else replace(tokens, sample=self.sample)


class Said:
    """Tokens of each answer so far, as the workers sent them."""

    def __init__(self, n: int) -> None:
        self._tokens: list[list[int]] = [[] for _ in range(n)]
        self._ended = [False] * n

    def add(self, chunk: Tokens) -> None:
        """New tokens of an answer."""
        self._tokens[chunk.sample].extend(chunk.ids)
        self._ended[chunk.sample] |= chunk.reason is not None

    def end(self, sample: int) -> None:
        """The answer is over for the client, whatever the workers know of it."""
        self._ended[sample] = True

    def rest(self, prompt: bytes, sampling: Sampling) -> Sequence[Work]:
        """What is left to do; nothing when every answer has ended."""
        if not any(self._tokens) and not any(self._ended):
            return (Work(prompt, sampling),)
        return tuple(
            Work(
                prompt + token_ids.pack(tokens),
                replace(
                    sampling,
                    max_tokens=sampling.max_tokens - len(tokens),
                    n=1,
                    resumed=len(tokens),
                    first_sample=sample,
                ),
                sample,
            )
            for sample, (tokens, ended) in enumerate(zip(self._tokens, self._ended, strict=True))
            if not ended
        )

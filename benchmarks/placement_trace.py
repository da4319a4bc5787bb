"""A multi-turn trace from public descriptions of chat traffic: many conversations share a few system prompts, every
turn sends the whole history again.

    system prompts   20, of 128 to 1,024 tokens; how often each is used follows Zipf's law (1 / rank)
    conversations    geometric, 4 turns on average
    lengths          log-normal with the means that the vLLM paper gives for ShareGPT: 161 tokens in, 338 out
    times            conversations begin as a Poisson process, 2 to 30 s lie between an answer and the next turn

The trace is a list of arrivals in order of time. Tokens are numbers that are a function of (conversation, position), or
of (system prompt, position) in the beginning, so that equal histories are equal prompts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

SYSTEM_PROMPTS = 20
TURNS, IN, OUT = 4, 161, 338
Tokens = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request: at `at` seconds a turn of a conversation sends `prompt_tokens` tokens and gets `answer_tokens`."""

    at: float
    conversation: int
    turn: int
    system: int
    system_tokens: int
    prompt_tokens: int
    answer_tokens: int

    def tokens(self) -> Tokens:
        """The prompt."""
        first = np.arange(self.system_tokens, dtype=np.uint32) * 31 + self.system * 1_000_003
        rest = np.arange(self.prompt_tokens - self.system_tokens, dtype=np.uint32) * 17 + self.conversation * 7919 + 13
        return np.concatenate([first, rest]).astype(np.uint32)


def make_trace(conversations: int, starts_per_s: float, seed: int = 0) -> list[Arrival]:
    """The trace of that many conversations, of which `starts_per_s` begin each second on average."""
    rng = np.random.default_rng(seed)
    systems = np.exp(rng.uniform(np.log(128), np.log(1024), SYSTEM_PROMPTS)).astype(int)
    shares = 1 / np.arange(1, SYSTEM_PROMPTS + 1)
    begins = np.cumsum(rng.exponential(1 / starts_per_s, conversations))
    found: list[Arrival] = []
    for number in range(conversations):
        system = int(rng.choice(SYSTEM_PROMPTS, p=shares / shares.sum()))
        at, length = float(begins[number]), int(systems[system])
        for turn in range(int(rng.geometric(1 / TURNS))):
            user, answer = (min(max(4, int(rng.lognormal(np.log(mean) - 0.5, 1.0))), 4096) for mean in (IN, OUT))
            length += user
            found.append(Arrival(at, number, turn, system, int(systems[system]), length, answer))
            length += answer
            at += answer * 0.02 + float(rng.uniform(2, 30))
    return sorted(found, key=lambda one: one.at)

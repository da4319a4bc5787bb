"""Log probabilities in OpenAI's two formats."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Any

from isthmus_router.requests import Logprobs, RatedToken

# JSON has no infinity; OpenAI writes this for "very unlikely".
LEAST = -9999.0


def chat_logprobs(entries: Sequence[Logprobs]) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = [{**_entry(entry.chosen), "top_logprobs": [_entry(rated) for rated in entry.top]} for entry in entries]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """`logprobs` of a text choice, part by part: `text_offset` counts the characters of the answer so far."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def push(self, entries: Sequence[Logprobs]) -> dict[str, Any]:
        """The fields for further tokens."""
        offsets: list[int] = []
        for entry in entries:
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(entry.chosen.raw))
        return {
            "tokens": [shown(entry.chosen) for entry in entries],
            "token_logprobs": [finite(entry.chosen.logprob) for entry in entries],
            # OpenAI counts the chosen token in even when it is not among the best.
            "top_logprobs": [
                {shown(rated): finite(rated.logprob) for rated in (*entry.top, entry.chosen)} if entry.top else None
                for entry in entries
            ],
            "text_offset": offsets,
        }


def shown(rated: RatedToken) -> str:
    """A token as text; bytes that are no whole characters are written out (`\\xf0`)."""
    return rated.raw.decode("utf-8", "backslashreplace")


def finite(logprob: float) -> float:
    """`logprob`, as JSON can carry it."""
    return logprob if logprob > LEAST else LEAST


def _entry(rated: RatedToken) -> dict[str, Any]:
    return {"token": shown(rated), "logprob": finite(rated.logprob), "bytes": list(rated.raw)}

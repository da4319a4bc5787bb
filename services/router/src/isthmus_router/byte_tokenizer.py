"""The built-in tokenizer of mock clusters: a token is a byte."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

END = 256


class _Turn(Protocol):
    @property
    def role(self) -> str: ...

    @property
    def content(self) -> str: ...


class ByteDetokenizer:
    """Streams UTF-8 that is cut anywhere; ids that are no bytes have no text."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        """Text that became complete with these ids."""
        return self._decoder.decode(bytes(token for token in ids if token < END))

    def finish(self) -> str:
        """U+FFFD when the answer ends inside a character."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """Id = byte value of the UTF-8 text; 256 ends an answer. Chat: one `role: content` line per turn."""

    vocab_size = END + 1
    eos_ids = (END,)

    def encode(self, text: str) -> list[int]:
        """Bytes of the text."""
        return list(text.encode())

    def encode_chat(self, turns: Sequence[_Turn]) -> list[int]:
        """Bytes of the conversation and of the opening of the answer."""
        lines = [f"{turn.role}: {turn.content}\n" for turn in turns]
        return self.encode("".join(lines) + "assistant:")

    def detokenizer(self) -> ByteDetokenizer:
        """A fresh detokenizer."""
        return ByteDetokenizer()

"""The built-in tokenizer of mock clusters: a token is a byte."""

from __future__ import annotations

import codecs
import json
from collections.abc import Sequence

from isthmus_router.chat import Conversation
from isthmus_router.sampling import SamplingDefaults

END = 256
END_NAME = "<end>"


class ByteDetokenizer:
    """Streams UTF-8 that is cut anywhere. The end has its name as text unless special tokens are skipped."""

    def __init__(self, *, skip_special: bool = True) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._end = b"" if skip_special else END_NAME.encode()

    def push(self, ids: Sequence[int]) -> str:
        """Text that became complete with these ids."""
        return self._decoder.decode(b"".join(bytes((token,)) if token < END else self._end for token in ids))

    def finish(self) -> str:
        """U+FFFD when the answer ends inside a character."""
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """Id = byte value of the UTF-8 text; 256 ends an answer. Chat: one `role: content` line per turn."""

    vocab_size = END + 1
    eos_ids = (END,)
    longest_token = 1
    # The mock engine is meant to be predictable.
    defaults = SamplingDefaults(temperature=0.0)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Bytes of the text."""
        return list(text.encode())

    def encode_chat(self, chat: Conversation) -> list[int]:
        """Bytes of the conversation and of the opening of the answer."""
        lines = [f"tools: {json.dumps([dict(tool) for tool in chat.tools])}\n"] if chat.tools else []
        for turn in chat.turns:
            calls = [f" {call.name}({json.dumps(dict(call.arguments))})" for call in turn.tool_calls]
            lines.append(f"{turn.role}: {turn.content}{''.join(calls)}\n")
        if chat.continue_final_message and lines:
            lines[-1] = lines[-1].removesuffix("\n")
        return self.encode("".join(lines) + ("assistant:" if chat.add_generation_prompt else ""))

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of bytes; U+FFFD for what is no UTF-8."""
        detokenizer = self.detokenizer(skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.finish()

    def detokenizer(self, *, skip_special: bool = True) -> ByteDetokenizer:
        """A fresh detokenizer."""
        return ByteDetokenizer(skip_special=skip_special)

    def token_bytes(self, token: int) -> bytes:
        """The byte, or the name of the end."""
        return bytes((token,)) if token < END else END_NAME.encode()

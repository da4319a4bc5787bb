"""What single tokens stand for, in bytes: log probabilities show tokens that need not be whole characters."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers.pre_tokenizers import ByteLevel

_BYTE_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_METASPACE = "▁"


def _byte_alphabet() -> dict[str, int]:
    """Byte of each character that byte-level vocabularies write it as: printable bytes stand for themselves, the others
    follow from U+0100 on in their order."""
    alphabet = set(ByteLevel.alphabet())
    table = {chr(byte): byte for byte in range(256) if chr(byte) in alphabet}
    others = sorted(alphabet - table.keys())
    missing = [byte for byte in range(256) if byte not in table.values()]
    return table | dict(zip(others, missing, strict=True))


class TokenPieces:
    """Bytes of the tokens of a backend. Thread-safe."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._added = {token: str(added.content) for token, added in backend.get_added_tokens_decoder().items()}
        kinds = _decoder_kinds(backend)
        self._byte_level = "ByteLevel" in kinds
        self._fallback = "ByteFallback" in kinds
        self._metaspace = "Metaspace" in kinds or f'"{_METASPACE}"' in kinds
        self._alphabet = _byte_alphabet()
        self.longest = self._longest()

    def bytes_of(self, token: int) -> bytes:
        """Bytes of a token; of an id without a token none."""
        added = self._added.get(token)
        if added is not None:
            return added.encode()
        piece = self._backend.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level and all(char in self._alphabet for char in piece):
            return bytes(self._alphabet[char] for char in piece)
        if self._fallback and (match := _BYTE_FALLBACK.fullmatch(piece)):
            return bytes((int(match.group(1), 16),))
        return (piece.replace(_METASPACE, " ") if self._metaspace else piece).encode()

    def _longest(self) -> int | None:
        """Most bytes of text that one token can stand for; None when text may vanish on its way to tokens, as it can in
        other vocabularies than plain byte-level ones."""
        added = self._backend.get_added_tokens_decoder().values()
        if not self._byte_level or self._backend.normalizer is not None:
            return None
        if any(token.lstrip or token.rstrip for token in added):
            return None
        # In a byte-level vocabulary a character stands for a byte.
        pieces = max(map(len, self._backend.get_vocab(with_added_tokens=False)), default=0)
        return max([pieces, *(len(name.encode()) for name in self._added.values())])


def _decoder_kinds(backend: Backend) -> frozenset[str]:
    """Names of the steps of a backend's decoder; a Replace step counts as what it replaces, in quotes."""
    decoder: Any = json.loads(backend.to_str()).get("decoder")
    kinds: set[str] = set()
    waiting: list[Any] = [decoder]
    while waiting:
        step = waiting.pop()
        if isinstance(step, dict):
            kinds.add(str(step.get("type")))  # type: ignore[arg-type]
            pattern: Any = step.get("pattern")  # type: ignore[assignment]
            if isinstance(pattern, dict):
                kinds.add(f'"{pattern.get("String")}"')  # type: ignore[arg-type]
            waiting.extend(step.get("decoders", ()))  # type: ignore[arg-type]
    return frozenset(kinds)

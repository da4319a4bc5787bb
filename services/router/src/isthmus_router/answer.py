"""The answers of a request, from tokens to text: detokenised, cut at stop strings, counted. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from isthmus_core.errors import InternalError
from isthmus_router.ports import FinishReason, TokenLogprobs, Tokens
from isthmus_router.requests import Logprobs, Part, RatedToken
from isthmus_router.stops import StopScanner
from isthmus_router.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class TextRules:
    """What ends an answer's text. `stop_token_ids`: their text is not shown. `include_stop`: unless this is set, for
    stop tokens and stop strings alike. Stop strings count after the answer's first `min_tokens` tokens."""

    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    include_stop: bool = False
    min_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """What new tokens add: text that may be shown now (may be empty), the tokens, and, on the last piece, why the
    answer ended; `stopped_by`: the stop string or stop token that ended it, None for the model's own end."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    reason: FinishReason | None = None
    stopped_by: str | int | None = None


class AnswerText:
    """Turns the token chunks of one answer into pieces of text."""

    def __init__(self, detokenizer: Detokenizer, rules: TextRules, eos_ids: Sequence[int] = ()) -> None:
        self._detokenizer = detokenizer
        self._rules = rules
        self._eos_ids = frozenset(eos_ids)
        self._scanner = StopScanner(rules.stop) if rules.stop else None
        self.tokens = 0
        self.ended = False

    def push(self, chunk: Tokens) -> Piece | None:
        """The piece of a chunk; None for one that has nothing to show, which includes all after the end."""
        if self.ended or (not chunk.ids and chunk.reason is None):
            return None
        piece = self._plain(chunk) if self._scanner is None else self._scanned(chunk, self._scanner)
        self.tokens += len(piece.token_ids)
        self.ended = piece.reason is not None
        return piece

    def _plain(self, chunk: Tokens) -> Piece:
        ids = chunk.ids
        if chunk.reason is None:
            return Piece(self._detokenizer.push(ids), ids, chunk.logprobs)
        shown, stopped_by = self._end(chunk)
        text = self._detokenizer.push(shown) + self._detokenizer.finish()
        return Piece(text, ids, chunk.logprobs, chunk.reason, stopped_by)

    def _scanned(self, chunk: Tokens, scanner: StopScanner) -> Piece:
        shown, stopped_by = (chunk.ids, None) if chunk.reason is None else self._end(chunk)
        texts: list[str] = []
        # Token by token, so that the count and the log probabilities end with the token that completes the match.
        for count, token in enumerate(shown, 1):
            text = self._detokenizer.push((token,))
            if self.tokens + count <= self._rules.min_tokens:
                texts.append(text)
                continue
            free, stop = scanner.push(text)
            texts.append(free)
            if stop is not None:
                texts.append(stop if self._rules.include_stop else "")
                return Piece("".join(texts), chunk.ids[:count], chunk.logprobs[:count], FinishReason.STOP, stop)
        if chunk.reason is None:
            return Piece("".join(texts), chunk.ids, chunk.logprobs)
        free, stop = scanner.push(self._detokenizer.finish())
        texts.append(free)
        if stop is not None:
            texts.append(stop if self._rules.include_stop else "")
            return Piece("".join(texts), chunk.ids, chunk.logprobs, FinishReason.STOP, stop)
        texts.append(scanner.finish())
        return Piece("".join(texts), chunk.ids, chunk.logprobs, chunk.reason, stopped_by)

    def _end(self, chunk: Tokens) -> tuple[tuple[int, ...], int | None]:
        """Tokens of a last chunk that have text, and the stop token that ended it (not the model's own)."""
        last = chunk.ids[-1] if chunk.ids else None
        if chunk.reason is not FinishReason.STOP or last not in self._rules.stop_token_ids:
            return chunk.ids, None
        # Whether or not the vocabulary marks the token as special.
        shown = chunk.ids if self._rules.include_stop else chunk.ids[:-1]
        return shown, None if last in self._eos_ids else last


class Answers:
    """All `n` answers of a request. `token_bytes`: the bytes of a token, for log probabilities."""

    def __init__(
        self,
        request_id: int,
        n: int,
        rules: TextRules,
        eos_ids: Sequence[int],
        detokenizer: Callable[[], Detokenizer],
        token_bytes: Callable[[int], bytes],
    ) -> None:
        self._request_id = request_id
        self._answers = [AnswerText(detokenizer(), rules, eos_ids) for _ in range(n)]
        self._told_to_end = [False] * n
        self._token_bytes = token_bytes
        self.reasons: list[FinishReason] = []

    @property
    def tokens(self) -> int:
        """Tokens of all answers."""
        return sum(answer.tokens for answer in self._answers)

    @property
    def cut_short(self) -> bool:
        """True when every answer has ended, and some at a stop string that the worker knows nothing of."""
        return all(answer.ended for answer in self._answers) and not all(self._told_to_end)

    def push(self, chunk: Tokens) -> Part | None:
        """The part that a worker's chunk becomes; None when it shows nothing."""
        self._told_to_end[chunk.sample] |= chunk.reason is not None
        piece = self._answers[chunk.sample].push(chunk)
        if piece is None:
            return None
        if piece.reason is not None:
            self.reasons.append(piece.reason)
        pairs = zip(piece.token_ids, piece.logprobs, strict=bool(piece.logprobs))
        logprobs = tuple(self._rated(token, entry) for token, entry in pairs)
        return Part(
            self._request_id,
            chunk.sample,
            piece.text,
            piece.token_ids,
            logprobs,
            piece.reason,
            piece.stopped_by,
        )

    def check_ended(self) -> None:
        """Raises InternalError unless every answer has ended."""
        open_answers = [index for index, answer in enumerate(self._answers) if not answer.ended]
        if open_answers:
            raise InternalError(f"request {self._request_id} ended without an end of answers {open_answers}")

    def _rated(self, token: int, entry: TokenLogprobs) -> Logprobs:
        top = tuple(RatedToken(other, self._token_bytes(other), logprob) for other, logprob in entry.top)
        return Logprobs(RatedToken(token, self._token_bytes(token), entry.logprob), top)

"""Stop strings: found wherever the text is cut, nothing shown that must not be, nothing held back that need not be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from isthmus_router.answer import Answers, TextRules
from isthmus_router.byte_tokenizer import ByteTokenizer
from isthmus_router.ports import FinishReason, TokenLogprobs, Tokens
from isthmus_router.requests import Part
from isthmus_router.stops import StopScanner

LETTERS = st.text(alphabet="abé", max_size=30)
STOPS = st.lists(st.text(alphabet="abé", min_size=1, max_size=5), min_size=1, max_size=4)


def expected(text: str, stops: list[str]) -> tuple[str, str | None]:
    """By brute force: the match that is complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end - len(stop)], stop
    return text, None


def held(text: str, stops: list[str]) -> int:
    """Length of the longest end of the text that begins a stop string."""
    return max(size for stop in stops for size in range(len(stop)) if text.endswith(stop[:size]))


@given(LETTERS, STOPS, st.integers(1, 7))
def test_the_outcome_does_not_depend_on_the_cuts(text: str, stops: list[str], size: int) -> None:
    scanner = StopScanner(stops)
    shown, found = "", None
    for start in range(0, len(text), size):
        piece, found = scanner.push(text[start : start + size])
        shown += piece
        if found is not None:
            break
        seen = text[: start + size]
        assert seen == shown + seen[len(shown) :]
        assert len(seen) - len(shown) == held(seen, stops), "exactly what may still become a stop string is held back"
    else:
        shown += scanner.finish()
    assert (shown, found) == expected(text, stops)


def answer(
    chunks: list[Tokens], *, stop: tuple[str, ...] = (), n: int = 1, eos: tuple[int, ...] = (256,), **rules: object
) -> tuple[list[Part], Answers]:
    tokenizer = ByteTokenizer()
    stop_ids = rules.pop("stop_token_ids", frozenset(eos))
    made = TextRules(stop, stop_ids, **rules)  # type: ignore[arg-type]
    answers = Answers(7, n, made, eos, tokenizer.detokenizer, tokenizer.token_bytes)
    return [part for chunk in chunks if (part := answers.push(chunk)) is not None], answers


def tokens(text: str, reason: FinishReason | None = None, sample: int = 0) -> Tokens:
    return Tokens(tuple(text.encode()), sample, reason=reason)


def text_of(parts: list[Part]) -> str:
    return "".join(part.text for part in parts)


@pytest.mark.parametrize("size", [1, 2, 3, 50])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_over_tokens_and_chunks(size: int, include: bool) -> None:
    raw = b"Say STOP. More"
    chunks = [Tokens(tuple(raw[i : i + size])) for i in range(0, len(raw), size)]
    parts, answers = answer(chunks, stop=("STOP.",), include_stop=include)
    assert text_of(parts) == ("Say STOP." if include else "Say ")
    assert (parts[-1].reason, parts[-1].stopped_by) == (FinishReason.STOP, "STOP.")
    assert answers.tokens == len("Say STOP."), "tokens behind the match do not count"
    assert answers.cut_short


def test_text_that_only_began_a_stop_string_comes_with_the_end() -> None:
    parts, answers = answer([tokens("half ST"), tokens("", FinishReason.LENGTH)], stop=("STOP",))
    assert [part.text for part in parts] == ["half ", "ST"]
    assert parts[-1].reason is FinishReason.LENGTH
    assert not answers.cut_short, "the worker knows that it is over"


def test_a_stop_string_that_the_last_chunk_completes_is_why_it_ended() -> None:
    parts, _ = answer([tokens("a STOP", FinishReason.LENGTH)], stop=("STOP",))
    assert (text_of(parts), parts[-1].reason, parts[-1].stopped_by) == ("a ", FinishReason.STOP, "STOP")


def test_stop_strings_count_after_the_least_number_of_tokens() -> None:
    chunks = [tokens(char) for char in "..a."]
    parts, answers = answer(chunks, stop=(".",), min_tokens=2)
    assert (text_of(parts), answers.tokens) == ("..a", 4)


@pytest.mark.parametrize(("include", "shown"), [(False, "hi"), (True, "hi!")])
def test_a_stop_token_has_text_only_when_asked_for(include: bool, shown: str) -> None:
    ids = frozenset((ord("!"), 256))
    parts, _ = answer([tokens("hi!", FinishReason.STOP)], stop_token_ids=ids, include_stop=include)
    assert (text_of(parts), parts[-1].stopped_by) == (shown, ord("!"))
    parts, _ = answer([Tokens((104, 256), reason=FinishReason.STOP)], stop_token_ids=ids, include_stop=include)
    assert (text_of(parts), parts[-1].stopped_by) == ("h", None), "the model's own end is no stop token"


def test_answers_are_apart() -> None:
    first, *rest = "é".encode()
    chunks = [
        Tokens((first,), 0),
        Tokens((first,), 1),
        tokens("x", None, 2),
        Tokens(tuple(rest), 1),
        tokens("S", None, 2),
    ]
    parts, answers = answer([*chunks, Tokens(tuple(rest), 0)], n=3, stop=("S",))
    assert "".join(part.text for part in parts if part.index == 0) == "é"
    assert "".join(part.text for part in parts if part.index == 1) == "é"
    assert [part.reason for part in parts if part.index == 2] == [None, FinishReason.STOP]
    assert not answers.cut_short, "two answers go on"
    late = [tokens("later", FinishReason.LENGTH, 2)]
    assert [answers.push(chunk) for chunk in late] == [None], "nothing follows a stop string"


def test_log_probabilities_end_with_the_token_that_completes_a_stop_string() -> None:
    rated = tuple(TokenLogprobs(-float(i), ((104 + i, -float(i)),)) for i in range(4))
    parts, _ = answer([Tokens((104, 46, 46, 105), logprobs=rated)], stop=("..",))
    (part,) = parts
    assert part.token_ids == (104, 46, 46)
    assert [entry.chosen.raw for entry in part.logprobs] == [b"h", b".", b"."]
    assert [entry.top[0].token for entry in part.logprobs] == [104, 105, 106]

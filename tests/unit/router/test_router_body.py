"""What a body may hold is counted before it is parsed; several streams are read as one."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request

from isthmus_core.errors import DeadlineExceeded, InvalidRequest
from isthmus_router.http.body import read_body
from isthmus_router.http.parse import parse_body
from isthmus_router.http.schemas import CompletionRequest
from isthmus_router.merge import merged
from isthmus_router.structure import MAX_NODES, MAX_VALUES, check_texts, count_structure

NAMES = st.text(alphabet=',"\\[', max_size=3)
JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='a,[{"\\é', max_size=8),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=30,
)


def structure(value: object) -> tuple[int, int]:
    """Commas, and opening brackets and colons, that JSON needs for a value."""
    if isinstance(value, list | dict):
        inner = [structure(item) for item in (value.values() if isinstance(value, dict) else value)]
        own = 1 + (len(value) if isinstance(value, dict) else 0)
        return max(len(value) - 1, 0) + sum(row[0] for row in inner), own + sum(row[1] for row in inner)
    return 0, 0


@pytest.mark.parametrize("slice_bytes", [1, 2, 7, 1 << 16])
@settings(deadline=None)
@given(value=JSON)
def test_structure_is_counted_outside_of_strings_only(slice_bytes: int, value: object) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("isthmus_router.structure._SLICE", slice_bytes)
        *_, last = [(0, 0), *count_structure(json.dumps(value).encode())]
    assert last == structure(value)


def request(*pieces: bytes | None) -> Request:
    """A request whose body comes in pieces; None waits for ever."""
    waiting = list(pieces)

    async def receive() -> dict[str, object]:
        piece = waiting.pop(0) if waiting else b""
        if piece is None:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": piece, "more_body": bool(waiting)}

    return Request({"type": "http", "method": "POST", "path": "/", "headers": []}, receive)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":[' + b"1," * (MAX_VALUES + 1) + b"1]}",
        b'{"prompt":[' + b"[1]," * (MAX_NODES + 1) + b"[1]]}",
        b"[" * (MAX_NODES + 1),
        b"{" + b'"":1,' * (MAX_NODES + 1) + b"}",
    ],
)
async def test_too_many_values_are_refused_unparsed(body: bytes) -> None:
    with pytest.raises(InvalidRequest, match="values"):
        await read_body(request(body), 10_000_000, 5)


@pytest.mark.parametrize(
    ("sent", "message"),
    [
        ({"echo": True}, "echo = true: not supported; leave it out or send false"),
        ({"suffix": "x"}, "suffix = 'x': not supported; leave it out or send \"\""),
        ({"max_tokens": True}, "max_tokens = true: Input should be a valid integer"),
        ({"model": None}, "model = null: Input should be a valid string"),
    ],
)
def test_values_are_named_as_json_writes_them(sent: dict[str, object], message: str) -> None:
    body = json.dumps({"model": "m", "prompt": "p", **sent}).encode()
    with pytest.raises(InvalidRequest) as caught:
        parse_body(CompletionRequest, body)
    assert str(caught.value) == message


async def test_text_may_hold_any_number_of_commas_and_brackets() -> None:
    body = json.dumps({"prompt": '[{,\\"' * (MAX_VALUES + 1)}).encode()
    assert await read_body(request(body[:1000], body[1000:]), 10_000_000, 20) == body


async def test_a_body_that_does_not_come_ends_at_the_limit() -> None:
    with pytest.raises(DeadlineExceeded, match="request body"):
        await read_body(request(b'{"prompt":', None), 10_000, 0.1)


class Source:
    """A stream of numbers; `closed` tells that it has been ended."""

    def __init__(self, last: int, error: Exception | None = None) -> None:
        self.last, self.error = last, error
        self.sent = 0
        self.closed = False

    async def run(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(self.last):
                self.sent = number + 1
                yield number
            if self.error is not None:
                raise self.error
        finally:
            self.closed = True


async def test_merged_streams_come_whole_and_in_order() -> None:
    sources = [Source(3), Source(0), Source(5)]
    async with aclosing(merged([source.run() for source in sources])) as items:
        rows = [item async for item in items]
    for number, source in enumerate(sources):
        assert [value for index, value in rows if index == number] == list(range(source.last))
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("count", [1, 3])
async def test_the_first_error_ends_every_stream(count: int) -> None:
    sources = [Source(2, KeyError("x")), *(Source(1000) for _ in range(count - 1))]
    with pytest.raises(KeyError):
        _ = [item async for item in merged([source.run() for source in sources])]
    assert all(source.closed for source in sources)


async def test_a_reader_that_leaves_ends_every_stream_and_none_has_run_ahead() -> None:
    sources = [Source(1000), Source(1000)]
    async with aclosing(merged([source.run() for source in sources])) as items:
        for _ in range(4):
            await anext(items)
        await asyncio.sleep(0.02)
    assert all(source.closed for source in sources)
    assert sum(source.sent for source in sources) <= 4 + len(sources)


def test_several_texts_share_the_bounds() -> None:
    half = "[" * (MAX_NODES // 2) + "]" * (MAX_NODES // 2)
    quoted = json.dumps({"text": "[" * MAX_NODES})
    check_texts([half, quoted], "chat")
    with pytest.raises(InvalidRequest, match="chat"):
        check_texts([half, quoted, half], "chat")
    with pytest.raises(InvalidRequest, match="values"):
        check_texts(["[" + "1," * (MAX_VALUES + 1) + "1]"], "chat")

"""How much structure a JSON text has, counted before anything parses it.

A parser holds the interpreter while it works, and so every other stream of this router. What it costs depends on the
number of values, not on the number of bytes: text is cheap, a million little lists are not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from isthmus_core.errors import InvalidRequest

# Some 25 ms of parsing each. Longer prompts of token ids fit into a gRPC message.
MAX_VALUES = 1 << 18
# Lists, objects, and names in objects: each costs as much as a dozen numbers.
MAX_NODES = 1 << 15
# Part of a body that is looked at without a break: well below a millisecond.
_SLICE = 1 << 16
_STRINGS_PER_SLICE = 256
_INSIDE = re.compile(rb'(?:[^"\\]+|\\.)*', re.DOTALL)
_QUOTE, _BACKSLASH = ord('"'), ord("\\")


def within_bounds(text: bytes) -> bool:
    """True when the text surely has no more than the bounds. Counting everything is nearly free and an upper bound;
    text in strings makes it too high."""
    return text.count(b",") <= MAX_VALUES and _nodes(text, 0, len(text)) <= MAX_NODES


def too_many(where: str) -> InvalidRequest:
    """The error for more than the bounds."""
    found = f"more than {MAX_VALUES} values or {MAX_NODES} lists, objects and names"
    return InvalidRequest(where, found, "send fewer in one request")


def check_texts(texts: Sequence[str], where: str) -> None:
    """Raises InvalidRequest when several JSON texts together have more than the bounds."""
    raw = [text.encode("utf-8", "surrogatepass") for text in texts]
    if within_bounds(b"".join(raw)):
        return
    values = nodes = 0
    for text in raw:
        more_values = more_nodes = 0
        for more_values, more_nodes in count_structure(text):
            if values + more_values > MAX_VALUES or nodes + more_nodes > MAX_NODES:
                raise too_many(where)
        values, nodes = values + more_values, nodes + more_nodes


def _nodes(body: bytes, begin: int, end: int) -> int:
    return sum(body.count(mark, begin, end) for mark in (b"[", b"{", b":"))


def count_structure(body: bytes) -> Iterator[tuple[int, int]]:
    """(commas; opening brackets and colons) outside of strings so far, slice after slice; the last is for all."""
    position = commas = nodes = 0
    in_string = False
    while position < len(body):
        limit = min(position + _SLICE, len(body))
        for _ in range(_STRINGS_PER_SLICE):
            if position >= limit:
                break
            if in_string:
                found = _INSIDE.match(body, position, limit)
                position = limit if found is None else found.end()
                if position < limit and body[position] == _QUOTE:
                    in_string = False
                    position += 1
                elif position < limit and body[position] == _BACKSLASH:
                    position += 2  # the slice ends between a backslash and what it escapes
                continue
            quote = body.find(b'"', position, limit)
            end = limit if quote < 0 else quote
            commas += body.count(b",", position, end)
            nodes += _nodes(body, position, end)
            in_string = quote >= 0
            position = end + in_string
        yield commas, nodes

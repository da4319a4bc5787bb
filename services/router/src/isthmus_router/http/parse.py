"""From the bytes of a body to its schema, with errors that name the field."""

from __future__ import annotations

import json
from typing import Any, TypeVar, cast

from pydantic import ValidationError
from pydantic_core import from_json

from isthmus_core.errors import InvalidRequest, shorten
from isthmus_router.http.fields import Body

BodyType = TypeVar("BodyType", bound=Body)

# pydantic puts the branch of a union that it tried into the location.
_BRANCHES = frozenset(("str", "int", "TextPart"))
# Listing every problem of a large broken body would take longer than anything else here.
_MAX_LISTED = 200


def parse_body(kind: type[BodyType], body: bytes) -> BodyType:
    """The request in a JSON body. Raises InvalidRequest naming the first wrong field."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        if error.error_count() > _MAX_LISTED:
            raise InvalidRequest("body", f"{error.error_count()} problems", "send an OpenAI request body") from None
        problems = error.errors(include_url=False)
    first = _path(problems[0]["loc"])
    # Of the branches of a union the one that got furthest says most.
    problem = max(
        (item for item in problems if _path(item["loc"]).startswith(first)), key=lambda item: len(item["loc"])
    )
    where, message = _path(problem["loc"]), problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "json_invalid":
        raise InvalidRequest("body", f"{len(body)} bytes", message)
    if problem["type"] == "extra_forbidden":
        raise InvalidRequest(where, _show(problem["input"]), "unknown field; leave it out")
    # Validators of whole objects begin with the name of the field.
    name, colon, rest = message.partition(": ")
    if colon and problem["type"] == "value_error" and name.isidentifier():
        where = f"{where}.{name}" if where else name
        raise InvalidRequest(where, "as sent", rest)
    value = "absent" if problem["type"] == "missing" else _show(problem["input"])
    raise InvalidRequest(where or "body", value, message)


def parse_keys(body: bytes) -> frozenset[str]:
    """Names of the fields of a JSON body; none when it is no object."""
    try:
        value: Any = from_json(body)
    except ValueError:
        return frozenset()
    return frozenset(cast("dict[str, Any]", value)) if isinstance(value, dict) else frozenset()


def _show(value: Any) -> str:
    if isinstance(value, list | dict):
        size = len(cast("list[Any] | dict[Any, Any]", value))
        return f"{'a list' if isinstance(value, list) else 'an object'} of {size}"
    if value is None or isinstance(value, bool):
        return json.dumps(value)  # as the client wrote it
    return repr(shorten(value) if isinstance(value, str) else value)


def _path(loc: tuple[int | str, ...]) -> str:
    """`messages[0].content` of a location, without the branches of unions."""
    path = ""
    for part in loc:
        if isinstance(part, int):
            path += f"[{part}]"
        elif part not in _BRANCHES and "[" not in part:
            path += f".{part}" if path else part
    return shorten(path)

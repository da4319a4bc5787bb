"""Building blocks of the bodies' schemas.

Three kinds of fields: those that do something here, those that change nothing (`user`, `metadata`, …), and those that
would change the answer and are not supported: accepted only with their neutral value, so that no client is fooled by an
option that does nothing. Anything else is refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field


class Body(BaseModel):
    """Base of all bodies: no unknown fields, no conversions."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def neutral(*accepted: Any) -> Callable[[Any], Any]:
    """Validator of a field that is not supported: only None and these values pass."""

    def check(value: Any) -> Any:
        # By type too: True == 1 and 1 == 1.0, but only numbers stand for numbers.
        same = (value == item and isinstance(value, bool) == isinstance(item, bool) for item in accepted)
        if value is None or any(same):
            return value
        listed = f"; leave it out or send {json.dumps(accepted[0])}" if accepted else "; leave it out"
        raise ValueError(f"not supported{listed}")

    return check


Unsupported = Annotated[Any, AfterValidator(neutral())]
Off = Annotated[Any, AfterValidator(neutral(False))]
On = Annotated[Any, AfterValidator(neutral(True))]
Zero = Annotated[Any, AfterValidator(neutral(0))]
One = Annotated[Any, AfterValidator(neutral(1))]
EmptyList = Annotated[Any, AfterValidator(neutral([]))]
EmptyText = Annotated[Any, AfterValidator(neutral(""))]
Ignored = Any
# The first wrong element of a long list is enough.
FAST = Field(fail_fast=True)
TokenIds = Annotated[list[int], FAST]
JsonObject = dict[str, Any]

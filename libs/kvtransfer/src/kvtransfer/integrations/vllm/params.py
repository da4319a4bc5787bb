"""kv_transfer_params of a request: what a proxy carries from the prefill's answer to the decode's request.

    to the prefill      {"do_remote_decode": true}                          and what its answer brings back:
    to the decode       {"do_remote_prefill": true, "request": "ID.ATTEMPT", "endpoint": "HOST:PORT",
                         "instance_id": NAME, "incarnation": HEX, "tokens": N}

The request may be named by the caller of the prefill ("request"); otherwise a number is drawn. Numbers travel as text:
they do not fit into what JavaScript calls a number.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from isthmus_core.errors import InvalidRequest
from isthmus_core.ids import MAX_GLOBAL_ID, MIN_GLOBAL_ID, check_request_id
from isthmus_core.trace_context import TraceContext, parse_traceparent
from kvtransfer.errors import KVTransferError
from kvtransfer.ports import Holder, RequestKey
from kvtransfer.rank_info import INCARNATION_BYTES


class ParamsInvalid(KVTransferError):
    """kv_transfer_params that can not be understood. Names the field, its value and what is expected."""

    def __init__(self, field: str, value: object, expected: str) -> None:
        super().__init__(f"kv_transfer_params.{field} = {value!r}: expected {expected}")


@dataclass(frozen=True, slots=True)
class PrefillLeg:
    """The request only computes its prompt; the cache is fetched by somebody else. `waits`: so many answers of a decode
    that was started at the same time; 0: the decode comes later."""

    key: RequestKey
    waits: int = 0


@dataclass(frozen=True, slots=True)
class DecodeLeg:
    """The cache of the first `tokens` tokens is at `holder`; `waits`: it will be, its prefill was started at the same
    time, and what that samples for answer `answer` comes behind the prompt."""

    key: RequestKey
    holder: Holder
    tokens: int
    trace: TraceContext | None = None
    waits: bool = False
    answer: int = 0


def read_params(raw: Mapping[str, Any] | None) -> PrefillLeg | DecodeLeg | None:
    """What a request is part of; None: of nothing. Raises ParamsInvalid."""
    if not raw:
        return None
    if raw.get("do_remote_decode"):
        given, waits = raw.get("request"), raw.get("waits", 0)
        if type(waits) is not int or waits < 0:
            raise ParamsInvalid("waits", waits, "the number of answers that wait for the cache")
        return PrefillLeg(draw_key() if given is None else _key(given), waits)
    if not raw.get("do_remote_prefill"):
        return None
    tokens = raw.get("tokens")
    if type(tokens) is not int or tokens < 1:
        raise ParamsInvalid("tokens", tokens, "the number of tokens that the prefill computed")
    dp_rank = raw.get("dp_rank", 0)
    if type(dp_rank) is not int or dp_rank < 0:
        raise ParamsInvalid("dp_rank", dp_rank, "the attention-dp group of the prefill")
    holder = Holder(_text(raw, "endpoint"), _text(raw, "instance_id"), _incarnation(raw), dp_rank)
    trace = raw.get("traceparent")
    context = parse_traceparent(trace) if isinstance(trace, str) else None
    answer = raw.get("answer", 0)
    if type(answer) is not int or answer < 0:
        raise ParamsInvalid("answer", answer, "the number of an answer")
    return DecodeLeg(_key(raw.get("request")), holder, tokens, context, raw.get("waits") is True, answer)


def prefill_params(leg: PrefillLeg) -> dict[str, Any]:
    """For the request of a prefill whose number is known."""
    params: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "request": _name(leg.key)}
    return {**params, "waits": leg.waits} if leg.waits else params


def decode_params(leg: DecodeLeg) -> dict[str, Any]:
    """For the request of a decode."""
    params = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "request": _name(leg.key),
        "endpoint": leg.holder.endpoint,
        "instance_id": leg.holder.instance_id,
        "incarnation": leg.holder.incarnation.hex(),
        "tokens": leg.tokens,
    }
    if leg.holder.dp_rank:
        params["dp_rank"] = leg.holder.dp_rank
    if leg.trace is not None:
        params["traceparent"] = leg.trace.to_traceparent()
    if leg.waits:
        params["waits"], params["answer"] = True, leg.answer
    return params


def draw_key() -> RequestKey:
    """A number that nobody else has drawn, with all but certainty."""
    return RequestKey(MIN_GLOBAL_ID + secrets.randbelow(MAX_GLOBAL_ID - MIN_GLOBAL_ID), 0)


def _name(key: RequestKey) -> str:
    return f"{key.request_id}.{key.attempt}"


def _key(value: object) -> RequestKey:
    expected = f"text NUMBER.ATTEMPT, NUMBER in [{MIN_GLOBAL_ID}, {MAX_GLOBAL_ID})"
    number, dot, attempt = value.partition(".") if isinstance(value, str) else ("", "", "")
    if not (dot and number.isdecimal() and attempt.isdecimal()) or int(attempt) >= 1 << 32:
        raise ParamsInvalid("request", value, expected)
    try:
        check_request_id(int(number))
    except InvalidRequest as error:
        raise ParamsInvalid("request", value, expected) from error
    return RequestKey(int(number), int(attempt))


def _text(raw: Mapping[str, Any], field: str) -> str:
    value = raw.get(field)
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise ParamsInvalid(field, value, "text, as the answer of the prefill says it")
    return value


def _incarnation(raw: Mapping[str, Any]) -> bytes:
    value = _text(raw, "incarnation")
    try:
        incarnation = bytes.fromhex(value)
    except ValueError:
        incarnation = b""
    if len(incarnation) != INCARNATION_BYTES:
        raise ParamsInvalid("incarnation", value, f"{INCARNATION_BYTES} bytes in hexadecimal")
    return incarnation

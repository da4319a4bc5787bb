"""Notices of many writers in one message, as columns: what a large instance says for one request.

le_uint64    request id, receive, bytes, descriptors, bounced bytes
le_uint32    attempt, src rank, dst rank, outcome, not held, chunks, number of extents, path, reason
le_float64   seconds: queue, plan, post, wire, predicted
extents      layer group, view, tokens from and to, layers from and to
texts        what `path` and `reason` count from 1 on; 0 is no text
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, chain, repeat
from struct import Struct, unpack
from struct import error as StructError
from typing import TYPE_CHECKING, cast

from isthmus.v1 import transfer_pb2

from isthmus_core.ids import MAX_GLOBAL_ID, MIN_GLOBAL_ID
from kvtransfer.errors import WireError
from kvtransfer.ports import Extent, RequestKey, TokenRange, TransferNotice, TransferStats, WriterOutcome
from kvtransfer.wire._columns import columns_from_bytes, is_same, joined_columns, mapped, named_rows
from kvtransfer.wire._read import MAX_REASON_SENT, MAX_TEXT, limited, text
from kvtransfer.wire.common import local_id
from kvtransfer.wire.stages import MAX_SECONDS, read_stages, write_stages

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_NOTICES = 1 << 16
MAX_EXTENTS = 1 << 17

# Extents of a notice that is read at the first glance.
_FEW = 64
_FIVE_LARGE, _NINE_SMALL, _FIVE_TIMES, _SIX_SMALL = Struct("<5Q"), Struct("<9I"), Struct("<5d"), Struct("<6I")
_NO_STAGES = TransferStats()[9:]
_OUTCOMES = {one.value: one for one in WriterOutcome}
_NUMBERS = {one: one.value for one in WriterOutcome}


def write_notices(notices: Sequence[TransferNotice], into: transfer_pb2.TransferNotices) -> None:
    """Fills a field of a message. Reasons are shortened to a size that every reader accepts. Raises ValueError for a
    local request id (those never travel) and for a negative number."""
    count = len(notices)
    if count == 1:
        write_notice(notices[0], into)
        return
    into.SetInParent()
    if not count:
        return
    keys, src, dst, outcomes, extents, reasons, stats, not_held, receives, chunks = zip(*notices, strict=True)
    size, descriptors, paths, queue, plan, post, wire, bounced, predicted, *stages, whys = zip(*stats, strict=True)
    ids, attempts = zip(*keys, strict=True)
    if min(ids) < MIN_GLOBAL_ID or max(ids) >= MAX_GLOBAL_ID:
        raise ValueError(f"a request id of {sorted(set(ids))} is not in [2^40, 2^63): local ids never travel")
    texts: dict[str, int] = {"": 0}
    path_numbers = mapped(lambda one: texts.setdefault(one, len(texts)), paths)
    reason_numbers = mapped(lambda one: texts.setdefault(one[:MAX_REASON_SENT], len(texts)), reasons)
    into.count = count
    into.le_uint64 = joined_columns("Q", (ids, receives, size, descriptors, bounced))
    numbers, counts = mapped(_NUMBERS.__getitem__, outcomes), mapped(len, extents)
    small = (attempts, src, dst, numbers, not_held, chunks, counts, path_numbers, reason_numbers)
    into.le_uint32 = joined_columns("I", small)
    times = (queue, plan, post, wire, predicted)
    if min(map(min, times)) < 0:
        raise ValueError(f"duration of {min(map(min, times))} s is negative")
    into.le_float64 = joined_columns("d", times)
    every = list(chain.from_iterable(extents))
    if every:
        into.extents = _extents_to_bytes(every)
    into.texts.extend(list(texts)[1:])
    write_stages(stages, whys, into)


def notices_to_pb(notices: Sequence[TransferNotice]) -> transfer_pb2.TransferNotices:
    """The message by itself."""
    pb = transfer_pb2.TransferNotices()
    write_notices(notices, pb)
    return pb


def notices_from_pb(pb: transfer_pb2.TransferNotices, field: str = "transfer_notices") -> tuple[TransferNotice, ...]:
    """Raises WireError for an unknown outcome, missing columns or extents that run backwards."""
    count = pb.count
    if count > MAX_NOTICES:
        raise WireError(f"{field}.count", f"{count} notices, at most {MAX_NOTICES} are accepted")
    if count == 1 and (one := _read_one(pb)) is not None:
        return (one,)
    if not count:
        return ()
    ids, receives, size, descriptors, bounced = columns_from_bytes("Q", pb.le_uint64, count, 5, f"{field}.le_uint64")
    attempts, src, dst, outcomes, not_held, chunks, extents, paths, reasons = columns_from_bytes(
        "I", pb.le_uint32, count, 9, f"{field}.le_uint32"
    )
    times = columns_from_bytes("d", pb.le_float64, count, 5, f"{field}.le_float64")
    _check_ids(ids, field)
    _check_times(times, field)
    texts = _texts(pb, max(*paths, *reasons), field)
    known = mapped(_OUTCOMES.get, outcomes)
    if None in known:
        raise WireError(f"{field}.outcome", f"unknown value {outcomes[known.index(None)]}")
    if any(not_held):
        _check_not_held(not_held, known, field)
    queue, plan, post, wire, predicted = times
    named = mapped(texts.__getitem__, paths)
    stages = [repeat(value, count) for value in _NO_STAGES]
    columns = (size, descriptors, named, queue, plan, post, wire, bounced, predicted, *stages)
    stats = named_rows(TransferStats, columns)
    keys = [RequestKey(ids[0], attempts[0])] * count if is_same(ids) and is_same(attempts) else None
    notices = (
        keys or named_rows(RequestKey, (ids, attempts)),
        src,
        dst,
        known,
        _extents(pb.extents, extents, f"{field}.extents"),
        mapped(texts.__getitem__, reasons),
        read_stages(stats, pb, field),
        mapped(bool, not_held),
        receives,
        chunks,
    )
    return tuple(named_rows(TransferNotice, notices))


def write_notice(notice: TransferNotice, into: transfer_pb2.TransferNotices) -> None:
    """All that an instance of one rank ever says: a third of the cost of columns. As `write_notices`."""
    (request_id, attempt), src, dst, outcome, extents, reason, stats, not_held, receive, chunks = notice
    size, descriptors, path, queue, plan, post, wire, bounced, predicted, credit, gather, scatter, way = stats
    if not MIN_GLOBAL_ID <= request_id < MAX_GLOBAL_ID:
        raise local_id(request_id)
    if queue < 0 or plan < 0 or post < 0 or wire < 0 or predicted < 0:
        raise ValueError(f"a duration of {stats} is negative")
    count, named = len(extents), 0
    if path:
        into.texts.append(path)
        named = 1
    explained = 0
    if reason:
        into.texts.append(reason[:MAX_REASON_SENT])
        explained = named + 1
    into.count = 1
    try:
        into.le_uint64 = _FIVE_LARGE.pack(request_id, receive, size, descriptors, bounced)
        into.le_uint32 = _NINE_SMALL.pack(
            attempt, src, dst, _NUMBERS[outcome], not_held, chunks, count, named, explained
        )
        into.le_float64 = _FIVE_TIMES.pack(queue, plan, post, wire, predicted)
    except StructError as error:
        raise ValueError(f"a number of {notice} does not fit: {error}") from error
    if count == 1:
        into.extents = _extent_to_bytes(extents[0])
    elif count:
        into.extents = _extents_to_bytes(extents)
    if bounced or way:
        write_stages(((credit,), (gather,), (scatter,)), (way,), into)


def _read_one(pb: transfer_pb2.TransferNotices) -> TransferNotice | None:
    """A single notice whose parts look right at the first glance; None leaves it to the general way, which says what is
    wrong with it."""
    large, small, times, data = pb.le_uint64, pb.le_uint32, pb.le_float64, pb.extents
    if (len(large), len(small), len(times)) != (40, 36, 40):
        return None
    request_id, receive, size, descriptors, bounced = _FIVE_LARGE.unpack(large)
    numbers: tuple[int, ...] = _NINE_SMALL.unpack(small)
    attempt, src, dst, number, not_held, chunks, extents, path, reason = numbers
    queue, plan, post, wire, predicted = _FIVE_TIMES.unpack(times)
    if len(data) != 24 * extents or extents > _FEW:
        return None
    places = (_extent(*_SIX_SMALL.unpack(data)),) if extents == 1 else _read_few(data, extents)
    outcome = _OUTCOMES.get(number)
    texts = pb.texts if path or reason else ()
    fits = queue >= 0 and plan >= 0 and post >= 0 and wire >= 0 and predicted >= 0
    fits = fits and queue + plan + post + wire + predicted < MAX_SECONDS and MIN_GLOBAL_ID <= request_id < MAX_GLOBAL_ID
    count = len(texts)
    if not fits or outcome is None or None in places or not_held or path > count or reason > count:
        return None
    named, why = texts[path - 1] if path else "", texts[reason - 1] if reason else ""
    if len(named) > MAX_TEXT or len(why) > MAX_TEXT:
        return None
    stats = TransferStats(size, descriptors, named, queue, plan, post, wire, bounced, predicted)
    if pb.le_stages or pb.le_whys:
        (stats,) = read_stages((stats,), pb, "transfer_notices")
    key = RequestKey(request_id, attempt)
    delivered = cast("tuple[Extent, ...]", places)
    return TransferNotice(key, src, dst, outcome, delivered, why, stats, False, receive, chunks)


def _read_few(data: bytes, count: int) -> tuple[Extent | None, ...]:
    numbers = unpack(f"<{6 * count}I", data)
    return tuple(_extent(*numbers[at::count]) for at in range(count))


def _extent_to_bytes(one: Extent) -> bytes:
    tokens = one.tokens
    return _SIX_SMALL.pack(one.layer_group, one.view, tokens.begin, tokens.end, one.layer_begin, one.layer_end)


def _extents_to_bytes(extents: Sequence[Extent]) -> bytes:
    columns = [
        [one.layer_group for one in extents],
        [one.view for one in extents],
        [one.tokens.begin for one in extents],
        [one.tokens.end for one in extents],
        [one.layer_begin for one in extents],
        [one.layer_end for one in extents],
    ]
    return joined_columns("I", columns)


def _extents(data: bytes, counts: Sequence[int], field: str) -> list[tuple[Extent, ...]]:
    """Those of each notice."""
    total = sum(counts)
    if total > MAX_EXTENTS:
        raise WireError(field, f"{total} extents, at most {MAX_EXTENTS} are accepted")
    columns = columns_from_bytes("I", data, total, 6, field)
    if total and all(map(is_same, columns)):
        read = (_extent(*(column[0] for column in columns)),) * total
    else:
        read = tuple(map(_extent, *columns))
    if None in read:
        wrong = [column[read.index(None)] for column in columns]
        raise WireError(field, f"tokens [{wrong[2]}, {wrong[3]}), layers [{wrong[4]}, {wrong[5]}) run backwards")
    every = cast("tuple[Extent, ...]", read)
    if total == len(counts) and is_same(counts):
        return list(zip(every))
    return [every[end - count : end] for end, count in zip(accumulate(counts), counts, strict=True)]


@lru_cache(maxsize=1024)
def _extent(layer_group: int, view: int, begin: int, end: int, layer_begin: int, layer_end: int) -> Extent | None:
    """None when it runs backwards. The notices of one request say much the same: its writers share the tokens and most
    of the layers."""
    if begin > end or layer_begin >= layer_end:
        return None
    return Extent(layer_group, view, TokenRange(begin, end), layer_begin, layer_end)


def _check_ids(ids: Sequence[int], field: str) -> None:
    if min(ids) < MIN_GLOBAL_ID or max(ids) >= MAX_GLOBAL_ID:
        wrong = next(one for one in ids if not MIN_GLOBAL_ID <= one < MAX_GLOBAL_ID)
        raise WireError(f"{field}.request_id", f"{wrong} is not in [2^40, 2^63)")


def _check_times(times: Sequence[Sequence[float]], field: str) -> None:
    for name, column in zip(("queue", "plan", "post", "wire", "predicted"), times, strict=True):
        # Not the other way round: nothing is true of NaN.
        if not (min(column) >= 0 and sum(column) < MAX_SECONDS):
            raise WireError(f"{field}.{name}", f"{list(column)[:4]} s are not durations from 0 on")


def _check_not_held(not_held: Sequence[int], outcomes: Sequence[WriterOutcome | None], field: str) -> None:
    for flag, outcome in zip(not_held, outcomes, strict=True):
        if flag and outcome is not WriterOutcome.NEVER_STARTED:
            raise WireError(f"{field}.not_held", "true although the writer has started")


def _texts(pb: transfer_pb2.TransferNotices, last: int, field: str) -> list[str]:
    limited(pb.texts, 2 * MAX_NOTICES, f"{field}.texts")
    if last > len(pb.texts):
        raise WireError(f"{field}.texts", f"{len(pb.texts)} texts, number {last} is named")
    return ["", *(text(one, f"{field}.texts") for one in pb.texts)]

"""The parts of `TransferStats` that most notices do without: stages of chunks, and why the bytes went this way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvtransfer.errors import WireError
from kvtransfer.wire._columns import columns_from_bytes, columns_to_bytes, joined_columns
from kvtransfer.wire._read import MAX_REASON_SENT, text

if TYPE_CHECKING:
    from collections.abc import Sequence

    from isthmus.v1 import transfer_pb2

    from kvtransfer.ports import TransferStats

# Longer than any transfer that anybody waits for.
MAX_SECONDS = 1e9


def write_stages(times: Sequence[Sequence[float]], whys: Sequence[str], into: transfer_pb2.TransferNotices) -> None:
    """Appends to a message whose other columns and texts are filled. `times`: columns of credit, gather and scatter.
    Raises ValueError for a negative duration."""
    if any(map(any, times)):
        if min(map(min, times)) < 0:
            raise ValueError(f"duration of {min(map(min, times))} s is negative")
        into.le_stages = joined_columns("d", times)
    if any(whys):
        texts: list[str] = []
        numbers: list[int] = []
        first = len(into.texts) + 1
        for why in whys:
            if why:
                texts.append(why[:MAX_REASON_SENT])
            numbers.append(first + len(texts) - 1 if why else 0)
        into.le_whys = columns_to_bytes("I", len(numbers), numbers)
        into.texts.extend(texts)


def read_stages(
    stats: Sequence[TransferStats], pb: transfer_pb2.TransferNotices, field: str
) -> Sequence[TransferStats]:
    """`stats`, with what the message says besides. Raises WireError for durations that are none and missing texts."""
    if pb.le_stages:
        stages = columns_from_bytes("d", pb.le_stages, len(stats), 3, f"{field}.le_stages")
        for column in stages:
            # Not the other way round: nothing is true of NaN.
            if not (min(column) >= 0 and sum(column) < MAX_SECONDS):
                raise WireError(f"{field}.le_stages", f"{list(column)[:4]} s are not durations from 0 on")
        stats = [
            one._replace(credit=credit, gather=gather, scatter=scatter)
            for one, credit, gather, scatter in zip(stats, *stages, strict=True)
        ]
    if pb.le_whys:
        numbers: Sequence[int]
        (numbers,) = columns_from_bytes("I", pb.le_whys, len(stats), 1, f"{field}.le_whys")
        if max(numbers) > len(pb.texts):
            raise WireError(f"{field}.texts", f"{len(pb.texts)} texts, number {max(numbers)} is named")
        texts: list[str] = list(pb.texts)
        stats = [
            one._replace(why=text(texts[number - 1], f"{field}.texts")) if number else one
            for one, number in zip(stats, numbers, strict=True)
        ]
    return stats

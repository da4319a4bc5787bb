"""rank_ipc.proto: the values behind its frames, and the conversion of both directions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from google.protobuf.message import DecodeError
from isthmus.v1 import rank_ipc_pb2

from isthmus_core.framing import FrameError
from isthmus_worker.engine import Sampling
from isthmus_worker.runner import BatchRow, Draw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

_NO_TOKENS: NDArray[np.int64] = np.empty(0, np.int64)
# A rank that draws no tokens only has to know after which tokens one is wanted.
_WANTED = Draw(Sampling(1), 0, _NO_TOKENS, _NO_TOKENS)


@dataclass(frozen=True, slots=True)
class Loaded:
    """A rank has its part of the model. `digests`: of the tensors it has hashed; `num_blocks`: what its memory holds of
    each block list."""

    rank: int
    kv_dtype: str
    attention_digest: bytes
    digests: dict[str, bytes]
    num_blocks: tuple[int, ...]
    device: str


@dataclass(frozen=True, slots=True)
class Begin:
    """All ranks meet at `port`; `num_blocks` of each block list on every rank."""

    port: int
    backend: str
    num_blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Step:
    """Step `number`: the rows of all groups."""

    number: int
    rows: list[BatchRow]


@dataclass(frozen=True, slots=True)
class Copy:
    """Blocks int32[N] of block list `number` of one group, whole."""

    dp_rank: int
    number: int
    sources: NDArray[np.int32]
    destinations: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Zero:
    """Forget the warm-up."""


@dataclass(frozen=True, slots=True)
class Done:
    """A command was carried out."""


Command = Begin | Step | Copy | Zero
Answer = Loaded | Done


def command_to_bytes(command: Command) -> bytes:
    """One frame."""
    pb = rank_ipc_pb2.LeaderCommand()
    match command:
        case Begin(port, backend, num_blocks):
            pb.begin.CopyFrom(rank_ipc_pb2.BeginRank(port=port, backend=backend, num_blocks=num_blocks))
        case Step(number, rows):
            pb.step.CopyFrom(_step_to_pb(number, rows))
        case Copy(dp_rank, number, sources, destinations):
            copy = rank_ipc_pb2.CopyRankBlocks(
                dp_rank=dp_rank, block_list=number, le_sources=_le(sources), le_destinations=_le(destinations)
            )
            pb.copy.CopyFrom(copy)
        case Zero():
            pb.zero.SetInParent()
    return pb.SerializeToString()


def command_from_bytes(frame: bytes) -> Command:
    """Raises FrameError for what is not a command."""
    pb = rank_ipc_pb2.LeaderCommand()
    try:
        pb.ParseFromString(frame)
        match pb.WhichOneof("body"):
            case "begin":
                return Begin(pb.begin.port, pb.begin.backend, tuple(pb.begin.num_blocks))
            case "step":
                return Step(pb.step.number, _rows(pb.step))
            case "copy":
                copy = pb.copy
                return Copy(copy.dp_rank, copy.block_list, _i32(copy.le_sources), _i32(copy.le_destinations))
            case "zero":
                return Zero()
            case _:
                raise ValueError("a command without a body")
    except (DecodeError, ValueError) as error:
        raise FrameError(f"the first rank sent a malformed frame: {error}") from error


def answer_to_bytes(answer: Answer) -> bytes:
    """One frame."""
    pb = rank_ipc_pb2.FollowerAnswer()
    match answer:
        case Loaded():
            pb.loaded.rank, pb.loaded.kv_dtype, pb.loaded.device = answer.rank, answer.kv_dtype, answer.device
            pb.loaded.attention_digest = answer.attention_digest
            pb.loaded.num_blocks.extend(answer.num_blocks)
            for name, digest in answer.digests.items():
                pb.loaded.digests.add(name=name, digest=digest)
        case Done():
            pb.done.SetInParent()
    return pb.SerializeToString()


def answer_from_bytes(frame: bytes) -> Answer:
    """Raises FrameError for what is not an answer."""
    pb = rank_ipc_pb2.FollowerAnswer()
    try:
        pb.ParseFromString(frame)
    except DecodeError as error:
        raise FrameError(f"a rank sent a malformed frame: {error}") from error
    if pb.HasField("done"):
        return Done()
    one = pb.loaded
    digests = {tensor.name: tensor.digest for tensor in one.digests}
    return Loaded(one.rank, one.kv_dtype, one.attention_digest, digests, tuple(one.num_blocks), one.device)


def _step_to_pb(number: int, rows: Sequence[BatchRow]) -> rank_ipc_pb2.RankStep:
    backs = [row.backs for row in rows]
    table = np.array(
        [(len(row.token_ids), row.start, row.dp_rank, len(own)) for row, own in zip(rows, backs, strict=True)], np.int32
    )
    lists = [one for row in rows for one in row.blocks]
    return rank_ipc_pb2.RankStep(
        number=number,
        le_token_ids=np.concatenate([row.token_ids for row in rows]).astype("<u4").tobytes(),
        le_rows=_le(table),
        le_backs=_le(np.array([back for own in backs for back in own], np.int32)),
        le_block_counts=_le(np.array([len(one) for one in lists], np.int32)),
        le_blocks=_le(np.concatenate(lists)),
        block_lists=len(rows[0].blocks),
    )


def _rows(pb: rank_ipc_pb2.RankStep) -> list[BatchRow]:
    table = _i32(pb.le_rows).reshape(-1, 4)
    tokens = np.frombuffer(pb.le_token_ids, "<u4").astype(np.int64)
    ids = np.split(tokens, np.cumsum(table[:, 0])[:-1])
    blocks = np.split(_i32(pb.le_blocks), np.cumsum(_i32(pb.le_block_counts))[:-1])
    backs = np.split(_i32(pb.le_backs), np.cumsum(table[:, 3])[:-1])
    width = pb.block_lists
    if len(blocks) != width * len(table):
        raise ValueError(f"{len(blocks)} block lists of {len(table)} rows, each must have {width}")
    return [
        BatchRow(
            ids[at],
            start,
            tuple(blocks[at * width : (at + 1) * width]),
            tuple(replace(_WANTED, back=back) for back in backs[at].tolist()),
            dp_rank,
        )
        for at, (_, start, dp_rank, _) in enumerate(table.tolist())
    ]


def _le(values: NDArray[np.int32]) -> bytes:
    return values.astype("<i4", copy=False).tobytes()


def _i32(data: bytes) -> NDArray[np.int32]:
    return np.frombuffer(data, "<i4").astype(np.int32, copy=False)

"""How long a transfer takes, direct and bounced, on a path whose costs are known. Pure arithmetic.

direct    write + bytes / rate + descriptors * post
bounced   max(credit, gather) + write of the first chunk + the slowest stage of every other one + scatter of the last
            + credit + chunks * chunk
            the first chunk is gathered while its room is asked for; gather, write and scatter of different chunks
            overlap; where the sender's copies and writes take turns on one processor, gather and write are one stage;
            `depth` chunks go round in credit + gather + write + scatter, which is a stage too; telling the peer of the
            last chunk and hearing that it is scattered is taken to last as long as asking for the first one

Of more than four chunks the first and the last are a quarter of the others: before the first write and after the last
one nothing overlaps.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

# Chunks that are all alike.
_FEW = 4


@dataclass(frozen=True, slots=True)
class PathCost:
    """Seconds and bytes per second.

    write_s        a small write, from the post until it is over
    post_s         every further descriptor of a write
    rate           bytes of a large write
    gather_rate    bytes of a gather; `scatter_rate` of a scatter
    fragment_s     every fragment of a gather or scatter
    chunk_s        what a chunk costs besides: notices, launches, a look at events
    credit_s       from asking for room for a chunk until it may be written
    overlaps       a gather runs while a write is under way
    """

    write_s: float
    post_s: float
    rate: float
    gather_rate: float
    scatter_rate: float
    fragment_s: float
    chunk_s: float
    credit_s: float
    overlaps: bool


@dataclass(frozen=True, slots=True)
class Shape:
    """A transfer: its bytes, the descriptors of a direct write, the fragments that a gather copies, and the blocks that
    the destination lists."""

    nbytes: int
    descriptors: int
    fragments: int
    blocks: int


@dataclass(frozen=True, slots=True)
class ChunkLimits:
    """Bytes of the smallest and the largest chunk; `room`, bytes of all chunks of a transfer that are under way, and
    how many these are at most."""

    smallest: int
    largest: int
    room: int = 1 << 62
    depth: int = 4


@dataclass(frozen=True, slots=True)
class Bounced:
    """A way to bounce: bytes of a chunk, seconds until the cache is there, and until the writer is done, how many
    chunks there are, and how many of them at once."""

    chunk_bytes: int
    total_s: float
    writer_s: float
    chunks: int
    depth: int


def direct_s(cost: PathCost, shape: Shape) -> float:
    """Seconds of a direct write."""
    return cost.write_s + shape.nbytes / cost.rate + shape.descriptors * cost.post_s


def cut(nbytes: int, chunk_bytes: int) -> tuple[int, int]:
    """Bytes of the first and of the last chunk, and how many others lie between them, none larger than `chunk_bytes`.
    (0, n): n chunks alike, few enough that two more would cost more than they save."""
    if nbytes <= _FEW * chunk_bytes:
        return 0, max(1, ceil(nbytes / chunk_bytes))
    edge = max(1, chunk_bytes // 4)
    return edge, ceil((nbytes - 2 * edge) / chunk_bytes)


def bounced(cost: PathCost, shape: Shape, chunk_bytes: int, depth: int = 4) -> Bounced:
    """Seconds with chunks of at most `chunk_bytes`, at most `depth` of them at once."""
    edge, between = cut(shape.nbytes, chunk_bytes)
    size = (shape.nbytes - 2 * edge) / between
    chunks = between + (2 if edge else 0)
    fragment = cost.fragment_s * shape.fragments / max(1, shape.nbytes)
    gather, scatter = 1 / cost.gather_rate + fragment, 1 / cost.scatter_rate + fragment
    first = edge or size
    write, around = cost.write_s + size / cost.rate, cost.credit_s + size * (gather + scatter)
    slowest = max(size * gather, write, size * scatter) if cost.overlaps else max(size * gather + write, size * scatter)
    # One more than keeps the slowest stage busy; others would only take room from other transfers.
    depth = min(depth, 1 + ceil((around + write) / slowest), chunks)
    if chunks > depth:
        slowest = max(slowest, (around + write) / depth)
    writer = max(cost.credit_s, first * gather) + cost.write_s + first / cost.rate + chunks * cost.chunk_s
    writer += between * slowest + cost.write_s + edge / cost.rate if edge else (between - 1) * slowest
    return Bounced(chunk_bytes, writer + first * scatter + cost.credit_s, writer, chunks, depth)


def gather_s(cost: PathCost, nbytes: int, fragments: int) -> float:
    """Seconds of gathering everything, chunk after chunk."""
    return nbytes / cost.gather_rate + fragments * cost.fragment_s


def best_bounced(cost: PathCost, shape: Shape, limits: ChunkLimits) -> Bounced:
    """Of the chunk sizes `smallest` * 2^k up to `largest`, the fastest; the larger one of equals."""
    sizes = [limits.smallest]
    while sizes[-1] * 2 <= limits.largest and sizes[-1] < shape.nbytes:
        sizes.append(sizes[-1] * 2)
    ways = (bounced(cost, shape, size, max(1, min(limits.depth, limits.room // size))) for size in reversed(sizes))
    return min(ways, key=lambda one: one.total_s)

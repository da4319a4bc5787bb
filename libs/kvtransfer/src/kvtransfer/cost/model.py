"""How long a transfer takes, direct and bounced, on a path whose costs are known. Pure arithmetic.

direct    write + bytes / rate + descriptors * post
bounced   2 * credit + (gather + write + scatter) of one chunk + (chunks - 1) * the slowest stage
            gather, write and scatter of different chunks overlap; where the sender's copies and writes take turns
            on one processor, gather and write are one stage; telling the peer of the last chunk and hearing that it
            is scattered is taken to last as long as asking for the first one
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True, slots=True)
class PathCost:
    """Seconds and bytes per second.

    write_s        a small write, from the post until it is over
    post_s         every further descriptor of a write
    rate           bytes of a large write
    gather_rate    bytes of a gather; `scatter_rate` of a scatter
    fragment_s     every fragment of a gather or scatter
    chunk_s        what a chunk costs besides: notices, launches, a look at events
    credit_s       until the first chunk may be written
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
class Bounced:
    """A way to bounce: bytes of a chunk, seconds until the cache is there, and until the writer is done, and how many
    chunks there are."""

    chunk_bytes: int
    total_s: float
    writer_s: float
    chunks: int


def direct_s(cost: PathCost, shape: Shape) -> float:
    """Seconds of a direct write."""
    return cost.write_s + shape.nbytes / cost.rate + shape.descriptors * cost.post_s


def bounced(cost: PathCost, shape: Shape, chunk_bytes: int) -> Bounced:
    """Seconds with chunks of at most `chunk_bytes`."""
    chunks = max(1, ceil(shape.nbytes / chunk_bytes))
    size, fragments = shape.nbytes / chunks, shape.fragments / chunks
    gather = size / cost.gather_rate + fragments * cost.fragment_s
    scatter = size / cost.scatter_rate + fragments * cost.fragment_s
    write = cost.write_s + size / cost.rate
    if cost.overlaps:
        first, slowest = gather + write, max(gather, write, scatter)
    else:
        first, slowest = gather + write, max(gather + write, scatter)
    writer = cost.credit_s + chunks * cost.chunk_s + first + (chunks - 1) * slowest
    return Bounced(chunk_bytes, writer + scatter + cost.credit_s, writer, chunks)


def gather_s(cost: PathCost, nbytes: int, fragments: int) -> float:
    """Seconds of gathering everything, chunk after chunk."""
    return nbytes / cost.gather_rate + fragments * cost.fragment_s


def best_bounced(cost: PathCost, shape: Shape, smallest: int, largest: int) -> Bounced:
    """Of the chunk sizes `smallest` * 2^k up to `largest`, the fastest; the larger one of equals."""
    sizes = [smallest]
    while sizes[-1] * 2 <= largest and sizes[-1] < shape.nbytes:
        sizes.append(sizes[-1] * 2)
    return min((bounced(cost, shape, size) for size in reversed(sizes)), key=lambda one: one.total_s)

"""The CUDA copy of a packed range: one launch for a chunk, addresses computed on the device from the factored plan.

    program (run r, piece p, tile)   packed = base + row * begin + …   (as `kvtransfer.packed` says)
                                     cache  = address + stride * block + step * phase

Every unit is made of whole bytes (`Packed.whole_bytes`). Nothing is written out for each fragment: R + P table rows
instead of R x P. Import only where triton is installed.
"""

# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownParameterType=false, reportMissingParameterType=false, reportUntypedFunctionDecorator=false
# pyright: reportUnknownArgumentType=false
from __future__ import annotations

import triton
import triton.language as tl


# One binary for all values: a compilation takes a second, and a request must not wait for one.
@triton.jit(do_not_specialize=["chunk", "begin", "end", "first_run", "num_pieces", "tokens", "at"])
def copy_packed(
    runs,  # int64[R, 8]: address, stride, step, unit, before, row, prefix, token_major
    pieces,  # int64[P, 6]: block, phase, begin, tokens, before, count
    chunk: tl.int64,  # address of packed byte `begin`
    begin: tl.int64,
    end: tl.int64,
    first_run: tl.int64,
    num_pieces: tl.int64,
    tokens: tl.int64,  # of the group
    at: tl.int64,  # packed bit where the group begins
    UNIT: tl.constexpr,  # elements of one token of a run
    WIDTH: tl.constexpr,  # bytes of an element: 1, 2, 4, 8
    ALIGNED: tl.constexpr,  # everything is a multiple of 16 bytes
    GATHER: tl.constexpr,
    TILE: tl.constexpr,
):
    """Copies what of the packed bytes [begin, end) belongs to one run of one piece."""
    program = tl.program_id(0).to(tl.int64)
    run = runs + (first_run + program // num_pieces) * 8
    piece = pieces + (program % num_pieces) * 6
    step, unit, row, prefix = tl.load(run + 2), tl.load(run + 3), tl.load(run + 5), tl.load(run + 6)
    first, in_block, before = tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
    head_major = row * first + prefix * in_block + unit * before
    token_major = row * (first + before) + prefix
    by_token = tl.load(run + 7) != 0
    packed = (at + tl.load(run + 4) * tokens + tl.where(by_token, token_major, head_major)) >> 3
    hop = tl.where(by_token, row, unit) >> 3
    cache = tl.load(run) + tl.load(run + 1) * tl.load(piece) + ((step * tl.load(piece + 1)) >> 3)
    step = step >> 3
    elements = tl.load(piece + 5) * UNIT
    last = packed + (tl.load(piece + 5) - 1) * hop + UNIT * WIDTH
    if (packed < end) & (last > begin):
        e = tl.program_id(1).to(tl.int64) * TILE + tl.arange(0, TILE)
        token, inner = e // UNIT, (e % UNIT) * WIDTH
        offset = packed + token * hop + inner
        inside = (e < elements) & (offset >= begin) & (offset < end)
        near, far = chunk + offset - begin, cache + token * step + inner
        if WIDTH == 8:
            near, far = near.to(tl.pointer_type(tl.int64)), far.to(tl.pointer_type(tl.int64))
        elif WIDTH == 4:
            near, far = near.to(tl.pointer_type(tl.int32)), far.to(tl.pointer_type(tl.int32))
        elif WIDTH == 2:
            near, far = near.to(tl.pointer_type(tl.int16)), far.to(tl.pointer_type(tl.int16))
        else:
            near, far = near.to(tl.pointer_type(tl.int8)), far.to(tl.pointer_type(tl.int8))
        if ALIGNED:
            # Pairs of 8 bytes that lie together on both sides: the compiler makes them accesses of 16 bytes.
            near = tl.max_contiguous(tl.multiple_of(near, 16), 2)
            far = tl.max_contiguous(tl.multiple_of(far, 16), 2)
            # An element and its neighbour are inside together: borders are multiples of 16 bytes too.
            inside = tl.max_constancy(inside, 2)
        if GATHER:
            tl.store(near, tl.load(far, mask=inside), mask=inside)
        else:
            tl.store(far, tl.load(near, mask=inside), mask=inside)

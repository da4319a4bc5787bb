"""vLLM's cache as a page table, read from the shapes and strides of its tensors.

    tensor of a layer   [blocks, heads, tokens, content], strides in any order; content = K | V side by side
    HND                 a head's tokens follow each other      stride(heads) = tokens * stride(tokens)
    NHD                 a token's heads follow each other      stride(tokens) = heads * stride(heads)

K and V are two views whose pitch is the content, so that a storage which keeps them apart can be the peer; between two
storages of vLLM the two are one run again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kvtransfer.errors import GeometryError
from kvtransfer.page_table import (
    AttentionGroup,
    BufferEntries,
    HeadInterval,
    LayerGroup,
    MapperKind,
    MemoryKind,
    PageTable,
    PhysicalPool,
    PoolView,
    RecurrentGroup,
    RegisteredRegion,
    Section,
)


class Storage(Protocol):
    """The part of torch.UntypedStorage that is used."""

    def data_ptr(self) -> int: ...

    def nbytes(self) -> int: ...


class Tensor(Protocol):
    """The part of torch.Tensor that is used."""

    @property
    def shape(self) -> Sequence[int]: ...

    def stride(self) -> Sequence[int]: ...

    def element_size(self) -> int: ...

    def data_ptr(self) -> int: ...

    def untyped_storage(self) -> Storage: ...


@dataclass(frozen=True, slots=True)
class AttentionLayers:
    """Layers of one cache group. `tensors`: [blocks, heads, tokens, content] each, by global layer id.

    `content`: (role, bytes) of what a token of a head holds, in order: K and V, or one latent. `kv_heads` None: the
    same on every tensor-parallel rank. `block`: tokens of a block in the scheduler's lists.
    """

    tensors: tuple[tuple[int, Tensor], ...]
    content: tuple[tuple[str, int], ...]
    kv_heads: HeadInterval | None
    block: int
    window: int | None = None
    draft_slack: int = 0


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Recurrent layers of one cache group: (role, tensors) by layer, [slots, …] each. Sharded over `tp_size` ranks as a
    whole: rank `tp_rank` holds part `tp_rank`, so that only equal tensor parallelism can be served."""

    tensors: tuple[tuple[int, tuple[tuple[str, Tensor], ...]], ...]
    tp_rank: int
    tp_size: int


CacheGroup = AttentionLayers | StateLayers


@dataclass(frozen=True, slots=True)
class Described:
    """`ratios[i]`: blocks of group i's tensors for each block of the scheduler's lists."""

    table: PageTable
    ratios: tuple[int, ...]


def describe(groups: Sequence[CacheGroup], memory: MemoryKind, device: int = 0) -> Described:
    """The page table of a rank, checked. Raises GeometryError naming the layer whose storage it can not express."""
    pools: list[PhysicalPool] = []
    made: list[LayerGroup] = []
    ratios: list[int] = []
    tensors: list[Tensor] = []
    for group in groups:
        if isinstance(group, StateLayers):
            made.append(_state_group(group, pools))
            ratios.append(1)
            tensors += [tensor for _, parts in group.tensors for _, tensor in parts]
        else:
            made.append(_attention_group(group, pools))
            ratios.append(_ratio(group))
            tensors += [tensor for _, tensor in group.tensors]
    table = PageTable(_regions(tensors, memory, device), tuple(pools), tuple(made))
    table.validate()
    return Described(table, tuple(ratios))


def _regions(tensors: Sequence[Tensor], memory: MemoryKind, device: int) -> tuple[RegisteredRegion, ...]:
    """One for each allocation, however many layers lie in it."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return tuple(RegisteredRegion(base, size, memory, device) for base, size in sorted(storages.items()))


def _ratio(group: AttentionLayers) -> int:
    layer, tensor = group.tensors[0]
    tokens = tensor.shape[2]
    if group.block % tokens:
        raise GeometryError(f"layer {layer}", f"{tokens} tokens", f"do not divide the block of {group.block}")
    return group.block // tokens


def _attention_group(group: AttentionLayers, pools: list[PhysicalPool]) -> AttentionGroup:
    layouts = {_layout(layer, tensor, group) for layer, tensor in group.tensors}
    if len(layouts) != 1:
        raise GeometryError("cache group", sorted(map(str, layouts)), "its layers have different layouts")
    ((kind, tokens, pitch, slot_stride, blocks),) = layouts
    heads = group.kv_heads
    if heads is None:
        kind = MapperKind.REPLICATED
    units = tokens * (1 if heads is None else len(heads))
    views: list[PoolView] = []
    bases = [tensor.data_ptr() for _, tensor in group.tensors]
    for first, places in _pools(bases, slot_stride, (units - 1) * pitch + _width(group), blocks, pools):
        offset = 0
        for role, width in group.content:
            entries = BufferEntries(
                np.array(places, np.uint32),
                np.full(len(places), offset, np.uint64),
                np.full(len(places), units * width, np.uint32),
            )
            views.append(
                PoolView(
                    frozenset({role}),
                    kind,
                    first,
                    entries,
                    heads or HeadInterval(0, 1),
                    pitch=None if pitch == width else pitch,
                )
            )
            offset += width
    layers = tuple(layer for layer, _ in group.tensors)
    return AttentionGroup(layers, tokens, tuple(views), group.window, group.draft_slack if group.window else 0)


def _width(group: AttentionLayers) -> int:
    return sum(width for _, width in group.content)


def _layout(layer: int, tensor: Tensor, group: AttentionLayers) -> tuple[MapperKind, int, int, int, int]:
    """(kind, tokens, pitch, slot stride, blocks) of one layer; strides in bytes."""
    if len(tensor.shape) != 4:
        raise GeometryError(f"layer {layer}.shape", tuple(tensor.shape), "expected [blocks, heads, tokens, content]")
    blocks, heads, tokens, content = tensor.shape
    item = tensor.element_size()
    slot, per_head, per_token, per_item = (stride * item for stride in tensor.stride())
    held = 1 if group.kv_heads is None else len(group.kv_heads)
    if heads != held or per_item != item or content * item < _width(group):
        want = f"expected {held} heads of {_width(group)} dense bytes a token"
        raise GeometryError(f"layer {layer}", f"{heads} heads, {content * item} bytes, step {per_item}", want)
    if heads == 1 or per_head == tokens * per_token:
        return MapperKind.HND, tokens, per_token, slot, blocks
    if per_token == heads * per_head:
        return MapperKind.NHD, tokens, per_head, slot, blocks
    raise GeometryError(
        f"layer {layer}.strides",
        tuple(tensor.stride()),
        "neither a head's tokens nor a token's heads follow each other; set VLLM_KV_CACHE_LAYOUT=LBHNC",
    )


def _pools(
    bases: list[int], slot_stride: int, slot_bytes: int, blocks: int, pools: list[PhysicalPool]
) -> list[tuple[int, list[int]]]:
    """Adds the pools of layers that begin at `bases`; returns (pool, positions of its layers in the group). Layers at
    equal distances are one pool, others a pool each."""
    steps = set(np.diff(bases).tolist())
    if len(steps) <= 1 and all(step > 0 for step in steps):
        pools.append(PhysicalPool(bases[0], slot_bytes, blocks, slot_stride, steps.pop() if steps else 0))
        return [(len(pools) - 1, list(range(len(bases))))]
    found: list[tuple[int, list[int]]] = []
    for place, base in enumerate(bases):
        pools.append(PhysicalPool(base, slot_bytes, blocks, slot_stride, 0))
        found.append((len(pools) - 1, [place]))
    return found


def _state_group(group: StateLayers, pools: list[PhysicalPool]) -> RecurrentGroup:
    views: list[PoolView] = []
    for place, (layer, parts) in enumerate(group.tensors):
        for role, tensor in parts:
            item = tensor.element_size()
            size = int(np.prod(tensor.shape[1:])) * item
            if not _dense(tensor):
                raise GeometryError(
                    f"layer {layer}.{role}", tuple(tensor.stride()), "a state must be dense in its slot"
                )
            pools.append(PhysicalPool(tensor.data_ptr(), size, tensor.shape[0], tensor.stride()[0] * item, 0))
            section = Section(f"{role} of {group.tp_size} parts", group.tp_rank, group.tp_rank + 1, size)
            entries = BufferEntries(np.array([place], np.uint32), np.zeros(1, np.uint64), np.array([size], np.uint32))
            views.append(
                PoolView(frozenset({role}), MapperKind.SECTIONED, len(pools) - 1, entries, sections=(section,))
            )
    return RecurrentGroup(tuple(layer for layer, _ in group.tensors), tuple(views))


def _dense(tensor: Tensor) -> bool:
    expected = 1
    for length, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if length != 1 and stride != expected:
            return False
        expected *= length
    return True

"""vLLM's cache configuration and tensors as `page_tables.CacheGroup`s. Takes vLLM's objects as they are, imports none.

A group of vLLM may hold layers of several widths (one block table, several pages): it becomes several groups here, all
with the same block ids. `source` says which group of vLLM the ids come from.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from kvtransfer.errors import GeometryError
from kvtransfer.integrations.vllm.page_tables import AttentionLayers, CacheGroup, StateLayers
from kvtransfer.page_table import HeadInterval

if TYPE_CHECKING:
    from collections.abc import Mapping

_LATENT = ("MLAAttentionSpec", "SlidingWindowMLASpec")
_WINDOWED = ("SlidingWindowSpec", "SlidingWindowMLASpec")
_SERVED = ("FullAttentionSpec", "SlidingWindowSpec", *_LATENT)
_LAYER_NUMBER = re.compile(r"(?:^|\.)(\d+)(?=\.|$)")


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank stands: its tensor-parallel coordinates, and the KV heads of the whole model."""

    tp_rank: int
    tp_size: int
    total_kv_heads: int


@dataclass(frozen=True, slots=True)
class SourcedGroup:
    """A group and the number of vLLM's group whose block ids it uses."""

    source: int
    group: CacheGroup


def layer_number(name: str) -> int:
    """The global layer id in a name such as "model.layers.3.self_attn.attn". Raises GeometryError."""
    numbers = _LAYER_NUMBER.findall(name)
    if len(numbers) != 1:
        raise GeometryError("layer name", name, "must hold exactly one number")
    return int(numbers[0])


def head_interval(local: int, place: Place) -> HeadInterval:
    """The global KV heads of a rank that holds `local` of them; heads are repeated where there are fewer than ranks.

    Raises GeometryError when the ranks do not share the heads evenly.
    """
    total, size, rank = place.total_kv_heads, place.tp_size, place.tp_rank
    if local * size == total:
        return HeadInterval(rank * local, (rank + 1) * local)
    if local == 1 and size % total == 0:
        head = rank // (size // total)
        return HeadInterval(head, head + 1)
    raise GeometryError("kv_heads", f"{local} on each of {size} ranks", f"do not make the {total} of the model")


def cache_groups(config: Any, kv_caches: Mapping[str, Any], place: Place, own_order: str = "") -> list[SourcedGroup]:
    """Groups of the layers that this rank has. `config`: vLLM's KVCacheConfig, `kv_caches`: what register_kv_caches
    gets. `own_order`: name of the order in which kernels keep a block of a head, when it is not that of the tensors:
    then blocks move whole, and only between equals. Raises GeometryError for what can not be described."""
    found: list[SourcedGroup] = []
    for number, group in enumerate(cast("list[Any]", config.kv_cache_groups)):
        if not group.enable_kv_transfer:
            raise GeometryError(f"kv_cache_groups[{number}]", str(group.role), "holds what a hand-off can not bring")
        by_spec: dict[Any, list[str]] = {}
        for name in cast("list[str]", group.layer_names):
            if name in kv_caches:
                specs = cast("Mapping[str, Any] | None", getattr(group.kv_cache_spec, "kv_cache_specs", None))
                by_spec.setdefault(group.kv_cache_spec if specs is None else specs[name], []).append(name)
        for spec, names in by_spec.items():
            layers = sorted((layer_number(name), kv_caches[name]) for name in names)
            found.append(SourcedGroup(number, _group(spec, layers, place, own_order)))
    if not found:
        raise GeometryError("kv_cache_groups", len(config.kv_cache_groups), "this rank has no layer with a cache")
    return found


def _group(spec: Any, layers: list[tuple[int, Any]], place: Place, own_order: str) -> CacheGroup:
    kind = type(spec).__name__
    if kind == "MambaSpec":
        return _states(spec, layers, place)
    if kind not in _SERVED:
        raise GeometryError("kv_cache_spec", kind, f"can not be handed off; served are {', '.join(_SERVED)}, MambaSpec")
    if spec.tokens_per_state != 1:
        raise GeometryError(f"{kind}.tokens_per_state", spec.tokens_per_state, "only one state a token is handed off")
    latent = kind in _LATENT
    if not latent and spec.num_heads != spec.num_kv_heads:
        raise GeometryError(f"{kind}.num_head_slots", spec.num_heads, f"differs from {spec.num_kv_heads} KV heads")
    return AttentionLayers(
        tensors=tuple(layers),
        content=_content(spec, own_order, latent=latent),
        kv_heads=None if latent else head_interval(spec.num_kv_heads, place),
        block=spec.block_size,
        window=spec.sliding_window if kind in _WINDOWED else None,
    )


def _content(spec: Any, own_order: str, *, latent: bool) -> tuple[tuple[str, int], ...]:
    total = int(spec.state_content_size_bytes)
    if own_order:
        return ((f"blocks of {spec.block_size} tokens, {own_order}", total),)
    if latent:
        return (("latent", total),)
    item = int(spec.dtype.itemsize)
    key, value = spec.head_size * item, spec.head_size_v * item
    if spec.state_content_bytes is None and key + value == total:
        return (("key", key), ("value", value))
    # Scales in between: only the same scheme can read it, which then moves it as one piece.
    return ((f"key and value, {spec.kv_quant_mode.name.lower()}", total),)


def _states(spec: Any, layers: list[tuple[int, Any]], place: Place) -> StateLayers:
    if spec.mamba_cache_mode != "none":
        raise GeometryError("mamba_cache_mode", spec.mamba_cache_mode, "only the state after the prompt is handed off")
    kind = str(getattr(spec.mamba_type, "name", spec.mamba_type)).lower()
    tensors = tuple(
        (layer, tuple((f"{kind} state {nth}", tensor) for nth, tensor in enumerate(parts))) for layer, parts in layers
    )
    if spec.tp_replicated:
        return StateLayers(tensors, 0, 1)
    return StateLayers(tensors, place.tp_rank, place.tp_size)

"""Tensors as vLLM allocates them become page tables: every unit is found where the tensor has it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest

from kvtransfer.errors import GeometryError
from kvtransfer.extractor import extract
from kvtransfer.integrations.vllm.cache_groups import Place, cache_groups, head_interval, layer_number
from kvtransfer.integrations.vllm.page_tables import describe
from kvtransfer.page_table import HeadInterval, MapperKind, MemoryKind, PageTable

LAYERS, BLOCKS, HEADS, TOKENS, DIM = 3, 5, 2, 8, 4
PLACE = Place(0, 1, HEADS)


class FakeTensor:
    """A numpy view with the methods of a torch tensor."""

    def __init__(self, view: np.ndarray, whole: np.ndarray) -> None:
        self.view, self._whole = view, whole

    @property
    def shape(self):
        return self.view.shape

    def stride(self):
        return tuple(step // self.view.itemsize for step in self.view.strides)

    def element_size(self):
        return self.view.itemsize

    def data_ptr(self):
        return self.view.__array_interface__["data"][0]

    def untyped_storage(self):
        whole = self._whole
        return SimpleNamespace(data_ptr=lambda: whole.ctypes.data, nbytes=lambda: whole.nbytes)


class QuantMode(enum.Enum):
    NONE = 0
    FP8_PER_TOKEN_HEAD = 1


@dataclass(frozen=True)
class FullAttentionSpec:
    """As vLLM's, as far as it is read. Other kinds are made under other names."""

    block_size: int = TOKENS
    num_kv_heads: int = HEADS
    head_size: int = DIM
    head_size_v: int = DIM
    dtype: np.dtype = field(default_factory=lambda: np.dtype(np.float32))
    state_content_bytes: int | None = None
    kv_quant_mode: QuantMode = QuantMode.NONE
    sliding_window: int | None = None
    tokens_per_state: int = 1

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads

    @property
    def state_content_size_bytes(self) -> int:
        return self.state_content_bytes or (self.head_size + self.head_size_v) * 4


class SlidingWindowSpec(FullAttentionSpec):
    pass


class MLAAttentionSpec(FullAttentionSpec):
    pass


class ChunkedLocalAttentionSpec(FullAttentionSpec):
    pass


# vLLM's layouts: the order in memory of [layer, block, head, token, content].
ORDERS = {
    "LBHNC": (0, 1, 2, 3, 4),
    "LBNHC": (0, 1, 3, 2, 4),
    "BLHNC": (1, 0, 2, 3, 4),
    "BLNHC": (1, 0, 3, 2, 4),
}


def caches(order: tuple[int, ...], heads: int = HEADS, tokens: int = TOKENS, content: int = 2 * DIM):
    """One allocation in that order, and each layer's view [block, head, token, content] of it."""
    shape = (LAYERS, BLOCKS, heads, tokens, content)
    whole = np.arange(int(np.prod(shape)), dtype=np.float32).reshape([shape[axis] for axis in order])
    views = whole.transpose(np.argsort(order))
    return {f"model.layers.{layer}.self_attn.attn": FakeTensor(views[layer], whole) for layer in range(LAYERS)}, whole


def config(spec: object, names: list[str]) -> SimpleNamespace:
    group = SimpleNamespace(layer_names=names, kv_cache_spec=spec, enable_kv_transfer=True, role="default")
    return SimpleNamespace(kv_cache_groups=[group])


def table_of(spec: object, tensors: dict[str, FakeTensor], place: Place = PLACE) -> tuple[PageTable, tuple[int, ...]]:
    groups = cache_groups(config(spec, list(tensors)), tensors, place)
    described = describe([one.group for one in groups], MemoryKind.DRAM)
    return described.table, described.ratios


def read(whole: np.ndarray, table: PageTable, role: str, block: int) -> list[np.ndarray]:
    """Everything the table finds in a block under a role, layer by layer, unit by unit."""
    base, data = whole.ctypes.data, whole.reshape(-1).view(np.uint8)
    found: list[np.ndarray] = []
    for number, view in enumerate(table.groups[0].views):
        if role in view.roles:
            regions = extract(np.array([block], np.int32), table, 0, number)
            for address, length in zip(regions.addresses.tolist(), regions.lengths.tolist(), strict=True):
                found.append(data[address - base : address - base + length].view(np.float32))
    return found


@pytest.mark.parametrize("name", ORDERS)
def test_keys_and_values_are_where_the_tensors_have_them(name):
    tensors, whole = caches(ORDERS[name])
    table, ratios = table_of(FullAttentionSpec(), tensors)
    assert ratios == (1,)
    (group,) = table.groups
    kind = MapperKind.HND if "HN" in name else MapperKind.NHD
    assert {view.mapper_kind for view in group.views} == {kind}
    for role, half in (("key", slice(0, DIM)), ("value", slice(DIM, 2 * DIM))):
        units = iter(read(whole, table, role, 3))
        for tensor in tensors.values():
            block = tensor.view[3] if kind is MapperKind.HND else tensor.view[3].transpose(1, 0, 2)
            for row in block.reshape(-1, 2 * DIM):
                assert (next(units) == row[half]).all()


def test_one_allocation_is_registered_once():
    tensors, whole = caches(ORDERS["BLHNC"])
    table, _ = table_of(FullAttentionSpec(), tensors)
    (region,) = table.regions
    assert (region.base_address, region.size_bytes) == (whole.ctypes.data, whole.nbytes)


def test_layers_out_of_step_get_pools_of_their_own():
    tensors, whole = caches(ORDERS["LBHNC"])
    names = list(tensors)
    swapped = {names[0]: tensors[names[2]], names[1]: tensors[names[1]], names[2]: tensors[names[0]]}
    table, _ = table_of(FullAttentionSpec(), swapped)
    assert len(table.pools) == LAYERS
    assert (read(whole, table, "key", 1)[0] == tensors[names[2]].view[1, 0, 0, :DIM]).all()


def test_a_block_of_the_kernels_may_be_smaller_than_the_managers():
    tensors, _ = caches(ORDERS["LBHNC"])
    table, ratios = table_of(FullAttentionSpec(block_size=4 * TOKENS), tensors)
    assert ratios == (4,)
    assert table.groups[0].tokens_per_block == TOKENS


def test_latent_caches_have_no_heads():
    tensors, _ = caches(ORDERS["LBHNC"], heads=1, content=6)
    spec = MLAAttentionSpec(num_kv_heads=1, head_size=6, head_size_v=0)
    table, _ = table_of(spec, tensors, Place(1, 4, 1))
    assert [(view.mapper_kind, view.roles, view.pitch) for view in table.groups[0].views] == [
        (MapperKind.REPLICATED, frozenset({"latent"}), None)
    ]


def test_quantised_content_moves_as_one_piece():
    tensors, _ = caches(ORDERS["LBHNC"], content=2 * DIM + 1)
    spec = FullAttentionSpec(state_content_bytes=(2 * DIM + 1) * 4, kv_quant_mode=QuantMode.FP8_PER_TOKEN_HEAD)
    (view,) = table_of(spec, tensors)[0].groups[0].views
    assert view.roles == {"key and value, fp8_per_token_head"}


def test_a_window_is_told():
    tensors, _ = caches(ORDERS["LBHNC"])
    assert table_of(SlidingWindowSpec(sliding_window=12), tensors)[0].groups[0].sliding_window == 12


@pytest.mark.parametrize(
    ("local", "place", "heads"),
    [
        (4, Place(0, 1, 4), HeadInterval(0, 4)),
        (2, Place(1, 2, 4), HeadInterval(2, 4)),
        (1, Place(5, 8, 4), HeadInterval(2, 3)),
    ],
)
def test_heads_of_a_rank(local, place, heads):
    assert head_interval(local, place) == heads


def test_heads_that_do_not_make_the_model_are_refused():
    with pytest.raises(GeometryError, match="3 on each of 2 ranks"):
        head_interval(3, Place(0, 2, 4))


def test_what_can_not_be_described_is_named():
    tensors, _ = caches(ORDERS["LBHNC"])
    with pytest.raises(GeometryError, match="ChunkedLocalAttentionSpec"):
        table_of(ChunkedLocalAttentionSpec(), tensors)
    apart, _ = caches((2, 0, 1, 3, 4))
    with pytest.raises(GeometryError, match="VLLM_KV_CACHE_LAYOUT=LBHNC"):
        table_of(FullAttentionSpec(), apart)
    with pytest.raises(GeometryError, match="expected 2 heads of 40 dense bytes"):
        table_of(FullAttentionSpec(head_size=6), tensors)
    replica = config(FullAttentionSpec(), list(tensors))
    replica.kv_cache_groups[0].enable_kv_transfer = False
    with pytest.raises(GeometryError, match="holds what a hand-off can not bring"):
        cache_groups(replica, tensors, PLACE)


@pytest.mark.parametrize(("name", "number"), [("model.layers.7.self_attn.attn", 7), ("h.11", 11)])
def test_numbers_of_layers(name, number):
    assert layer_number(name) == number


@pytest.mark.parametrize("name", ["lm_head", "layers.1.experts.2"])
def test_names_without_one_number_are_refused(name):
    with pytest.raises(GeometryError, match="exactly one number"):
        layer_number(name)


@dataclass(frozen=True)
class MambaSpec:
    tp_replicated: bool = False
    mamba_type: str = "mamba2"
    mamba_cache_mode: str = "none"


def test_states_are_one_part_a_rank():
    whole = np.zeros((BLOCKS, 24), np.float32)
    state = FakeTensor(whole[:, :16].reshape(BLOCKS, 2, 8), whole)
    groups = cache_groups(config(MambaSpec(), ["layers.4"]), {"layers.4": [state]}, Place(1, 2, 8))
    table = describe([one.group for one in groups], MemoryKind.DRAM).table
    ((view,),) = [group.views for group in table.groups]
    assert view.sections[0].label == "mamba2 state 0 of 2 parts"
    assert (view.sections[0].begin, view.sections[0].end, view.sections[0].unit_bytes) == (1, 2, 64)
    with pytest.raises(GeometryError, match="only the state after the prompt"):
        cache_groups(config(MambaSpec(mamba_cache_mode="all"), ["layers.4"]), {"layers.4": [state]}, PLACE)

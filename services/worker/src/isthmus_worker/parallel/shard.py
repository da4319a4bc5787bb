"""What one rank holds of a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from isthmus_worker.parallel.split import HeadShard, even, head_shard, padded, stage_layers
from kvtransfer.rank_info import Topology

if TYPE_CHECKING:
    from isthmus_core.config_parallel import ParallelConfig
    from isthmus_worker.torch_engine.model_config import ModelConfig


@dataclass(frozen=True, slots=True)
class Shard:
    """`layers`: global ids. `vocab`, `inner`: rows [begin, end) of the embedding and output matrix, and of the MLP's
    inner size. All ranks of a stage share `layers`; attention is cut over tp_per_dp ranks, the rest over all."""

    topology: Topology
    layers: range
    heads: HeadShard
    vocab: tuple[int, int]
    inner: tuple[int, int]

    @property
    def dp_rank(self) -> int:
        """The attention-dp group."""
        return self.topology.tp_rank // self.topology.tp_per_dp

    @property
    def is_first(self) -> bool:
        """True in the stage that has the embedding."""
        return self.topology.pp_rank == 0

    @property
    def is_last(self) -> bool:
        """True in the stage that has the output matrix."""
        return self.topology.pp_rank == self.topology.pp_size - 1


def topology_of(parallel: ParallelConfig, rank: int) -> Topology:
    """Of a flat rank: tensor-parallel ranks of a stage are neighbours."""
    tp = parallel.tensor_parallel_size
    return Topology(
        pp_size=parallel.pipeline_parallel_size,
        tp_size=tp,
        dp_size=parallel.data_parallel_size,
        pp_rank=rank // tp,
        tp_rank=rank % tp,
    )


def shard_of(config: ModelConfig, parallel: ParallelConfig, rank: int) -> Shard:
    """Raises ConfigError for a split that this model does not allow."""
    topology = topology_of(parallel, rank)
    tp, tp_rank, per_dp = topology.tp_size, topology.tp_rank, topology.tp_per_dp
    return Shard(
        topology,
        stage_layers(config.layers, topology.pp_size, parallel.layer_split, topology.pp_rank),
        head_shard(config.heads, config.kv_heads, per_dp, tp_rank % per_dp),
        padded(config.vocab_size, tp, tp_rank),
        even(config.intermediate_size, tp, tp_rank),
    )

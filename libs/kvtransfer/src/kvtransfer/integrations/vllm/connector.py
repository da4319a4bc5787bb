"""`IsthmusConnector`: what vLLM loads. A facade; each hook is one call of the scheduler's or the worker's side.

    --kv-transfer-config '{"kv_connector": "IsthmusConnector",
                           "kv_connector_module_path": "kvtransfer.integrations.vllm.connector",
                           "kv_role": "kv_producer"}'

The processes of vLLM reach the hub of their host at the socket that `hub` of kv_connector_extra_config names, or the
environment variable ISTHMUS_KV_HUB, which `python -m kvtransfer.sidecar` sets. Its other keys: `repack`, `fingerprint`
and those of `BounceSettings`.
"""

# pyright: basic, reportMissingImports=false, reportAttributeAccessIssue=false
# ^ vLLM and torch live in an environment of their own.

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.platforms import current_platform

from kvtransfer.bounce.settings import BounceSettings
from kvtransfer.config import OnFailure
from kvtransfer.integrations.vllm.block_lists import rank_groups
from kvtransfer.integrations.vllm.cache_groups import Place
from kvtransfer.integrations.vllm.cpu_order import check_order
from kvtransfer.integrations.vllm.fingerprint import fingerprint
from kvtransfer.integrations.vllm.offers import PoolPins
from kvtransfer.integrations.vllm.refusals import EngineUnsupported, check_configuration, check_version
from kvtransfer.integrations.vllm.scheduler import ConnectorScheduler, StepNews
from kvtransfer.integrations.vllm.worker import ConnectorWorker, GroupFacts, end_process
from kvtransfer.local.client import HUB_VARIABLE, SchedulerLink, connect
from kvtransfer.local.messages import LocalHello, LocalScheduler
from kvtransfer.rank_info import InstanceRole, Topology
from kvtransfer.transceiver.policy import HandoffPolicy
from kvtransfer.transceiver.scheduler import SchedulerTransceiver

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import KVConnectorOutput
    from vllm.v1.request import Request

    from kvtransfer.integrations.vllm.offers import Part


@dataclass
class StepMetadata(KVConnectorMetadata):
    """Scheduler to workers: what they report in this step, and what they do to their plain copies before."""

    news: StepNews


@dataclass
class PackedMetadata(KVConnectorWorkerMetadata):
    """Workers to scheduler: how many of them have run the step after which a part of a prompt can be read."""

    counts: dict[Part, int]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> PackedMetadata:
        """The sum over workers."""
        if not isinstance(other, PackedMetadata):
            raise TypeError(f"metadata of another connector: {type(other).__name__}")
        names = {*self.counts, *other.counts}
        return PackedMetadata({name: self.counts.get(name, 0) + other.counts.get(name, 0) for name in names})


@dataclass
class RankFacts(KVConnectorHandshakeMetadata):
    """Worker to scheduler, once: its layer groups."""

    rank: int
    groups: GroupFacts


class IsthmusConnector(KVConnectorBase_V1, SupportsHMA):
    """vLLM's end of a hand-off by kvtransfer."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        check_version()
        check_configuration(vllm_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._hub = str(extra.get("hub") or os.environ.get(HUB_VARIABLE, ""))
        if not self._hub:
            raise EngineUnsupported(
                "vLLM runs without a hub: start it as python -m kvtransfer.sidecar … -- vllm serve …"
            )
        self._scheduler: ConnectorScheduler | None = None
        self._worker: ConnectorWorker | None = None
        self._link: SchedulerLink | None = None
        self._packed: dict[Part, int] = {}
        # On a CPU the kernels keep a block in an order that no other engine, and no other block size, can read.
        packs = self._packs = current_platform.is_cpu() and extra.get("repack", True)
        if role is KVConnectorRole.SCHEDULER:
            self._open_scheduler(vllm_config, kv_cache_config, extra.get("fingerprint"), packs=packs)
        else:
            self._open_worker(vllm_config, extra, packs=packs)

    def _open_scheduler(
        self, config: VllmConfig, caches: KVCacheConfig, digests: dict[str, str] | None, *, packs: bool
    ) -> None:
        spec = caches.kv_cache_groups[0].kv_cache_spec
        facts = LocalScheduler(
            fingerprint(config, _first(spec), digests),
            spec.block_size,
            caches.num_blocks,
            config.model_config.max_model_len,
            config.model_config.get_vocab_size(),
            f"vLLM {check_version()}",
        )
        link = self._connection = connect(self._hub, LocalHello(config.parallel_config.world_size, facts))
        prefills = config.kv_transfer_config.kv_role == "kv_producer"
        if prefills is not (link.welcome.role is InstanceRole.CONTEXT):
            raise ValueError(
                f"kv_role = {config.kv_transfer_config.kv_role}, the hub of this instance was started as "
                f"{link.welcome.role.name}; use kv_producer with CONTEXT and kv_consumer with GENERATION"
            )
        policy = HandoffPolicy(
            1,
            OnFailure.RECOMPUTE if link.welcome.recompute else OnFailure.FAIL,
            link.welcome.max_held_requests,
            int(link.welcome.max_held_share * caches.num_blocks),
        )
        later: list[Callable[[Any], None]] = []
        link.sock.settimeout(None)
        self._link = SchedulerLink(link.sock, lambda message: later[0](message), _hub_gone)
        transceiver = SchedulerTransceiver(self._link, policy=policy)
        later.append(transceiver.deliver)
        self._scheduler = ConnectorScheduler(
            transceiver,
            link.welcome.here,
            prefills=prefills,
            workers=config.parallel_config.world_size,
            packs=packs,
        )
        self._link.start()

    def _open_worker(self, config: VllmConfig, extra: dict[str, Any], *, packs: bool) -> None:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        parallel, tp, pp = config.parallel_config, get_tp_group(), get_pp_group()
        topology = Topology(
            pp_size=parallel.pipeline_parallel_size,
            tp_size=parallel.tensor_parallel_size,
            pp_rank=pp.rank_in_group,
            tp_rank=tp.rank_in_group,
        )
        connection = connect(self._hub, LocalHello(parallel.world_size, topology.flat_rank))
        chunks = BounceSettings.from_words(extra, connection.welcome.max_peers, "kv_connector_extra_config")
        place = Place(topology.tp_rank, topology.tp_size, config.model_config.get_total_num_kv_heads())
        self._worker = ConnectorWorker(connection, topology, place, chunks, packs=packs)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """A head's tokens in one piece, so that ranks with other heads fetch large pieces."""
        return None if vllm_config.model_config is None or vllm_config.model_config.use_mla else "LBHNC"

    # --- scheduler

    def _side(self) -> ConnectorScheduler:
        if self._scheduler is None:
            raise RuntimeError("a hook of the scheduler was called in a worker")
        return self._scheduler

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        """Every rank's layer groups, before the first request."""
        self._side().set_groups(rank_groups({facts.rank: facts.groups for facts in metadata.values()}))

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        """Blocks that are offered before their prompt is complete are pinned there."""
        self._side().set_pins(PoolPins(gpu_block_pool))

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A hand-off brings the request's own blocks of every group."""
        return self._kv_cache_config.transfer_group_ids

    def on_new_request(self, request: Request) -> None:
        self._side().new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self._side().matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self._side().allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        state = scheduler_output.kv_connector_block_state
        block_ids = (lambda _: None) if state is None else state.get_block_ids
        return StepMetadata(self._side().step(scheduler_output.num_scheduled_tokens, block_ids))

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        packed = connector_output.kv_connector_worker_meta
        counts = packed.counts if isinstance(packed, PackedMetadata) else {}
        self._side().reported(counts, connector_output.finished_recving or ())

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self._side().finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._side().finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        """Steps go on while the hub owes an answer, so that it is heard."""
        return not self._side().is_idle

    # --- workers

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        if self._worker is None:
            raise RuntimeError("a hook of the workers was called in the scheduler")
        if self._packs:
            check_order(next(iter(kv_caches.values())), self._vllm_config.cache_config.cache_dtype)
        self._worker.register(self._kv_cache_config, kv_caches)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return None if self._worker is None else RankFacts(self._worker.rank, self._worker.groups)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Blocks are written by the peer; what has come is brought where the kernels look for it."""
        if self._worker is not None:
            for blocks in self._step_news().unpack:
                self._worker.unpack(blocks)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled when its cache is complete."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing: blocks are read when the prompt is complete."""

    def wait_for_save(self) -> None:
        """The host has seen the sampled token before a block is offered; where it must be packed it is packed now."""
        if self._worker is not None:
            for part, blocks in self._step_news().pack.items():
                self._worker.pack(blocks)
                self._packed[part] = 1

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        packed, self._packed = self._packed, {}
        return PackedMetadata(packed) if packed else None

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        news = self._step_news()
        return KVConnectorTransferResults(set(news.sent), set(news.received), set(news.failed))

    def _step_news(self) -> StepNews:
        meta = self._get_connector_metadata()
        if not isinstance(meta, StepMetadata):
            raise TypeError(f"metadata of another connector: {type(meta).__name__}")
        return meta.news

    def shutdown(self) -> None:
        if self._link is not None:
            self._link.close()
        if self._worker is not None:
            self._worker.shutdown()


def _first(spec: Any) -> Any:
    """A specification of a layer: groups of several widths hold one for each."""
    return next(iter(spec.kv_cache_specs.values())) if hasattr(spec, "kv_cache_specs") else spec


def _hub_gone(reason: str) -> None:
    """An engine dies with its hub: nobody could end its hand-offs any more."""
    end_process(f"the hub is gone: {reason}")

"""`PDConnector`: vLLM's connector interface, delegated to the two halves and nothing else.

vLLM builds one instance with the scheduler role in the engine core process and one with the worker role in every
worker. Each method here belongs to one role; see `docs/design/contract.md` for who calls what and when.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm_pd_connector import __version__
from vllm_pd_connector.checks import ending_notes, setting_notes
from vllm_pd_connector.compat.base import (
    CacheHitSource,
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorPromMetrics,
    KVConnectorRole,
    KVConnectorStats,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    PromMetric,
    PromMetricT,
    SupportsHMA,
    init_logger,
)
from vllm_pd_connector.compat.early import take_ray_s_address
from vllm_pd_connector.compat.factory import adopt_vllm_logging
from vllm_pd_connector.compat.model import facts, layouts
from vllm_pd_connector.compat.model.caches import require_causal
from vllm_pd_connector.compat.model.served import require_served, require_served_device
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.errors import InvalidConfig, PDConnectorError
from vllm_pd_connector.metadata import StepMetadata
from vllm_pd_connector.observability.series import PDPromMetrics
from vllm_pd_connector.observability.stats import PDStats
from vllm_pd_connector.scheduler.half import SchedulerHalf
from vllm_pd_connector.sidechannel.net.files import allow_files
from vllm_pd_connector.worker.half import WorkerHalf

if TYPE_CHECKING:
    import torch

    from vllm_pd_connector.compat.types import (
        AttentionMetadata,
        BlockPool,
        ForwardContext,
        KVCacheBlocks,
        KVCacheConfig,
        KVCacheManager,
        KVConnectorOutput,
        Request,
        SchedulerOutput,
        VllmConfig,
    )

adopt_vllm_logging()
logger = init_logger(__name__)


@dataclass(frozen=True, slots=True)
class EncodedManifest(KVConnectorHandshakeMetadata):  # type: ignore[misc]  # vLLM ships no types
    """One worker's manifest on its way to the scheduler half, as the side channel will serve it, and the secret by
    which the worker proves there that it is one of ours. `replicas`: those of the workers that vLLM cannot tell from
    this one, itself among them, in the order of their ranks (`facts.of_replicas`). `weights` are those of the
    manifest."""

    manifest: bytes
    token: bytes
    replicas: tuple[EncodedManifest, ...] = ()
    weights: str = ""


class PDConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]  # vLLM ships no types
    """The prefill/decode connector; configured by `--kv-transfer-config`."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig):
        super().__init__(vllm_config, role, kv_cache_config)
        require_served(vllm_config)
        require_served_device(vllm_config)
        config = parse_config(self._kv_transfer_config.kv_connector_extra_config)
        if config.conversations:
            require_causal(kv_cache_config)
        allow_files()
        self._scheduler: SchedulerHalf | None = None
        self._worker: WorkerHalf | None = None
        if role is KVConnectorRole.SCHEDULER:
            logger.info(
                "vllm_pd_connector %s with vLLM %s: %s, mode %s, transport %s, engine %s",
                *(__version__, facts.vllm_version(), self._kv_transfer_config.kv_role),
                *(config.mode, config.transport, facts.engine_id(vllm_config)),
            )
            if (release := facts.vllm_release()) not in facts.READ:
                logger.warning(
                    "vLLM %s: vllm_pd_connector was written by vLLM %s, and what it relies on in this one was not "
                    "looked at; use one of those, or try it before it serves",
                    *(release, " and ".join(sorted(facts.READ))),
                )
            said = self._kv_transfer_config.kv_role, self._kv_transfer_config.kv_connector_extra_config
            several = vllm_config.parallel_config.distributed_executor_backend == "mp"
            for note in (*setting_notes(*said), *ending_notes(*said, vllm_config.shutdown_timeout, several)):
                logger.warning("%s", note)
            self._scheduler = SchedulerHalf(config, vllm_config, kv_cache_config)
        else:
            facts.share_engine_id(vllm_config)
            take_ray_s_address(vllm_config, os.environ)
            layouts.align_interleave(vllm_config, kv_cache_config)
            self._worker = WorkerHalf(config, vllm_config, kv_cache_config)

    @property
    def scheduler(self) -> SchedulerHalf:
        assert self._scheduler is not None, "a scheduler method was called on the worker's connector"
        return self._scheduler

    @property
    def worker(self) -> WorkerHalf:
        assert self._worker is not None, "a worker method was called on the scheduler's connector"
        return self._worker

    def shutdown(self) -> None:
        for half in (self._scheduler, self._worker):
            if half is not None:
                half.shutdown()

    # Scheduler role.

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        """A receive brings the recurrent state along and fills each group from what it lacks on, so a hit of the full
        attention can be used that is deeper than those of other groups; but where vLLM itself would fail over it."""
        return self._scheduler is None or self._scheduler.fills_unequal_hits

    def bind_kv_cache_manager(self, kv_cache_manager: KVCacheManager) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.bind_cache_manager(kv_cache_manager)

    def bind_gpu_block_pool(self, gpu_block_pool: BlockPool) -> None:
        self.scheduler.bind_block_pool(gpu_block_pool)

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """Open the side channel with every rank's manifest.

        Raises:
            InvalidConfig: what the workers gave is another connector's (MultiConnector passes on the first's alone), or
                they are told apart by more than their pipeline stage and rank.
        """
        found = {key: meta for key, meta in metadata.items() if isinstance(meta, EncodedManifest)}
        if len(found) < len(metadata):
            foreign = sorted({type(meta).__name__ for meta in metadata.values()} - {EncodedManifest.__name__})
            raise InvalidConfig(
                f"connectors: the workers' handshake metadata is {', '.join(foreign)} where {EncodedManifest.__name__} "
                "of PDConnector is needed: MultiConnector hands on that of the first connector which has any; name "
                "PDConnector first, and no other connector that transfers caches between instances"
            )
        if any(any(key[1:-1]) for key in found):  # of later releases: the rank of prefill context parallelism
            raise InvalidConfig(
                f"vLLM tells the workers apart by {max(found)}, of which the pipeline stage and the rank alone are "
                f"known here, as vLLM {' and '.join(sorted(facts.READ))} have them; use one of those, or no prefill "
                "context parallelism"
            )
        workers = {
            (pipeline, context, rank): worker
            for (pipeline, *_, rank), meta in found.items()
            for context, worker in enumerate(meta.replicas or (meta,))
        }
        ordered = [worker for _, worker in sorted(workers.items(), key=lambda item: item[0])]
        weights = ordered[0].weights if ordered else ""
        self.scheduler.serve([worker.manifest for worker in ordered], [worker.token for worker in ordered], weights)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        """The same from who knows no pipeline stages."""
        self.set_xfer_handshake_metadata_pp_aware({(0, rank): meta for rank, meta in metadata.items()})

    def on_new_request(self, request: Request) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        return self.scheduler.num_matched_tokens(request, num_computed_tokens)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self.scheduler.group_ids

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.scheduler.update_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self.scheduler.build_metadata(scheduler_output)

    def has_pending_block_frees(self) -> bool:
        """Whether a running request that finds no block should try again in the next step before one is preempted for
        it: yes if blocks are given back here, of leases and pushes that have ended, or of conversations. Prefills may
        be held for long."""
        return self._scheduler is not None and self._scheduler.frees_blocks()

    def has_pending_push_work(self) -> bool:
        """Whether an idle engine should take a step, or is not idle yet for a pause: vLLM has no more general word."""
        half = self._scheduler
        return half is not None and (half.hold.asked or half.operations.busy)

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        self.scheduler.update_output(connector_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.request_finished(request, block_ids)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """What MultiConnector calls beside a connector without `SupportsHMA`: caches then have one group."""
        return self.request_finished_all_groups(request, (block_ids,))

    # Worker role.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def unregister_kv_caches(self) -> None:
        self.worker.unregister()

    def restore_kv_caches(self) -> None:
        self.worker.restore()

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        self.worker.restore()  # vLLM 0.33 asks after every waking, also after a sleep that was refused half-way
        own = EncodedManifest(self.worker.encoded_manifest(), self.worker.token, weights=self.worker.weights)
        return replace(own, replicas=facts.of_replicas(self._vllm_config, own))

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        self.worker.start_step(metadata)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.transfer_results()

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        """Refuse the older form of `get_transfer_results`: it has no place for failed receives.

        Raises:
            PDConnectorError: always.
        """
        raise PDConnectorError(
            "get_finished: a failed receive would be taken for a good one; whatever wraps PDConnector must call "
            "get_transfer_results, as vLLM 0.32 does"
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return self.worker.take_report()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing: a request is scheduled only after all of its layers arrived."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: AttentionMetadata, **kwargs: Any
    ) -> None:
        """What this layer writes in the step was launched: with `push_when` "layers" it may go out."""
        worker = self._worker
        if worker is not None and worker.follows_layers:
            worker.layer_launched(self._get_connector_metadata().step, layer_name)

    def wait_for_save(self) -> None:
        """Everything that the step writes was launched."""
        self.worker.step_launched()

    # Either role, and the API server.

    def reset_cache(self) -> bool:
        """Nothing more: what is held of finished requests went with vLLM's own prefix cache (`around_reset`)."""
        return True

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        return self._scheduler.stats() if self._scheduler is not None else self.worker.take_stats()

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: object) -> bool:
        """Yes; vLLM 0.33 asks, and earlier releases are refused where they would need it."""
        return True

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """The layout whose pages move best, where the operator has chosen none: vLLM asks after VLLM_KV_CACHE_LAYOUT,
        and takes another one if a backend does not know this one (`resolve_kv_cache_layout`)."""
        return layouts.best_to_move(vllm_config)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return PDStats(data)

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics | None:
        return PDPromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

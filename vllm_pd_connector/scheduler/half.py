"""The scheduler half: one object in the engine core process that answers vLLM's scheduler.

A request is on the producer side (`do_remote_decode`: keep its blocks for a reader) or on the consumer side
(`do_remote_prefill`: read its blocks from another instance) or none of our business. Each side is a class of its
own; this one tells them apart and assembles the step's metadata. It runs in the scheduler's thread; what must not
wait for an engine step (leases, renewals, the side channel) lives in the threads of `producer` and `consumer`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import Quarantine, before_reset, finished_normally, keep_unshared, transfer_params
from vllm_pd_connector.compat.engine import calling_loop
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.metadata import StepMetadata, WorkerReport
from vllm_pd_connector.observability.stats import PDStats
from vllm_pd_connector.protocol.params.parse import Kind, kind_of, parse_remote_decode
from vllm_pd_connector.scheduler.consumer import Consumer
from vllm_pd_connector.scheduler.producer import Producer
from vllm_pd_connector.scheduler.step_hold import StepHold

if TYPE_CHECKING:
    from vllm_pd_connector.compat.types import (
        BlockPool,
        KVCacheBlocks,
        KVCacheConfig,
        KVCacheManager,
        KVConnectorOutput,
        Request,
        SchedulerOutput,
        VllmConfig,
    )
    from vllm_pd_connector.config import Config

logger = init_logger(__name__)


class SchedulerHalf:
    """See the module. One per engine."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig):
        self.group_ids = tuple(kv_cache_config.transfer_group_ids)
        self.hold = StepHold(calling_loop())
        self.producer = Producer(config, vllm_config, kv_cache_config, ended=self.hold.ask)
        self.consumer = Consumer(config, vllm_config, kv_cache_config)
        self._quarantine: Quarantine | None = None
        self._manager: KVCacheManager | None = None
        self._gauges: dict[str, int] = {}

    def serve(self, manifests: list[bytes], tokens: list[bytes]) -> None:
        """The workers are ready: let peers fetch their manifests. `tokens` are the workers' secrets, in rank order."""
        self.hold.listen(tokens)
        self.producer.serve(manifests, tokens)
        self.consumer.sources.home = self.producer.home

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._quarantine = Quarantine(pool)
        self.producer.bind_block_pool(pool)
        before_reset(pool, self.producer.drain)

    def bind_cache_manager(self, manager: KVCacheManager) -> None:
        self._manager = manager

        def tables(request_id: str) -> list[list[int]]:
            ids = manager.get_block_ids(request_id)
            return [ids[group] for group in self.group_ids]

        self.producer.bind_block_tables(tables)

    def on_new_request(self, request: Request) -> None:
        """A request arrived. Bad parameters are remembered and fail the request when it would load."""
        self.producer.drain()  # an idle engine has not stepped since these leases ended
        try:
            match kind_of(transfer_params(request)):
                case Kind.REMOTE_PREFILL:
                    self.consumer.add(request)
                case Kind.REMOTE_DECODE:
                    self.producer.add(request)
                case Kind.NONE:
                    pass
        except ProtocolError as error:
            self.consumer.refuse(request, str(error))

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        count = self.consumer.num_remote_tokens(request, num_computed_tokens)
        return count, bool(count)

    def update_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        self.consumer.allocated(request, blocks, num_external_tokens)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(False, parameters for whoever reads the blocks): vLLM need not keep them, see `HeldBlocks`."""
        self.consumer.finished(request)
        self.producer.ended(request.request_id)
        try:
            if kind_of(transfer_params(request)) is not Kind.REMOTE_DECODE:
                return False, None
        except ProtocolError:  # said when it arrived
            return False, None
        try:
            if not finished_normally(request):
                self.producer.abandon(request, f"the prefill ended as {request.status.name}")
                return False, None
            parse_remote_decode(transfer_params(request))
            params = self.producer.hold(request, [block_ids[group] for group in self.group_ids])
        except ProtocolError as error:  # the router gets no parameters and must not go on to a decode instance
            logger.error("request %s: nothing is held for a decode instance: %s", request.request_id, error)
            self.producer.abandon(request, str(error))
            return False, None
        return False, params

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """vLLM's step begins here. Where it only waits for caches, this returns when some may have come."""
        receives, aborts = self.consumer.take()
        computes = bool(output.num_scheduled_tokens)
        tells = bool(receives or aborts or output.finished_req_ids)
        loading = 0 if computes else self.consumer.num_loading
        calm = self.hold.step(computes=computes, tells=tells, loading=loading)
        self.producer.drain()
        return StepMetadata(
            step=self.producer.advance(output),
            ends_prefill=self.producer.ends_prefill(output),
            calm=calm,
            bell=self.hold.bell if receives else "",
            receives=receives,
            aborts=aborts,
            held=self.producer.take_held(),
        )

    def update_output(self, output: KVConnectorOutput) -> None:
        """Called before vLLM frees the blocks of failed requests and caches those of received ones, so that quarantine
        and privacy come first."""
        report = output.kv_connector_worker_meta
        if isinstance(report, WorkerReport):
            assert self._quarantine is not None
            for request_id, ranks in report.quarantined.items():
                self._quarantine.add(request_id, self.consumer.blocks_of(request_id), ranks)
            for request_id, ranks in report.drained.items():
                self._quarantine.drain(request_id, ranks)
            for request_id, blocks in report.unshareable.items():
                assert self._manager is not None
                for group, block in blocks.items():
                    keep_unshared(self._manager, request_id, self.group_ids[group], block)
        if output.invalid_block_ids:
            self.producer.loads_failed(output.invalid_block_ids)
        if output.finished_sending:
            # vLLM frees and forgets a request at the first report of either kind. Another connector beside this one
            # (MultiConnector) may be done with a request that was aborted while bytes still land in its blocks.
            output.finished_sending -= self.consumer.ended_while_loading(output.finished_sending)
        for request_id in output.finished_recving or ():
            self.consumer.received(request_id)

    def stats(self) -> PDStats | None:
        """Gauges that changed and leases that expired since the last call; None when nothing did."""
        gauges = {"leases": self.producer.num_leases}
        if self._quarantine is not None:
            gauges |= {
                "quarantined blocks": self._quarantine.num_blocks,
                "free blocks": self._quarantine.num_free_blocks,
            }
        expired = self.producer.take_expired()
        if gauges == self._gauges and not expired.total():
            return None
        self._gauges = gauges
        stats = PDStats()
        for name, amount in expired.items():
            stats.count(name, amount)
        for name, value in gauges.items():
            stats.gauge(name, value)
        return stats

    def shutdown(self) -> None:
        self.consumer.close()
        self.producer.close()
        self.hold.close()

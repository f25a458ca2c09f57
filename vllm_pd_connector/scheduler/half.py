"""The scheduler half: one object in the engine core process that answers vLLM's scheduler.

A request is on the producer side (`do_remote_decode`: keep its blocks for a reader) or on the consumer side
(`do_remote_prefill`: read its blocks from another instance) or none of our business. Each side is a class of its
own; this one tells them apart and assembles the step's metadata. It runs in the scheduler's thread; what must not
wait for an engine step (leases, renewals, the side channel) lives in the threads of `producer` and `consumer`.
"""

from __future__ import annotations

import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.beside import Beside
from vllm_pd_connector.compat.blocks import (
    Quarantine,
    around_reset,
    computes_itself,
    drop_other_params,
    fails_over_unequal_hits,
    keep_unshared,
    owned_blocks,
    transfer_params,
)
from vllm_pd_connector.compat.conversations import note_without_blocks, spare_lookups
from vllm_pd_connector.compat.engine import calling_loop
from vllm_pd_connector.compat.model.caches import leased_blocks
from vllm_pd_connector.compat.queues import rest_until_next_message
from vllm_pd_connector.errors import PDConnectorError, reason_of
from vllm_pd_connector.metadata import StepMetadata, WorkerReport
from vllm_pd_connector.observability.stats import PDStats
from vllm_pd_connector.protocol.params.conversation import names_conversation
from vllm_pd_connector.protocol.params.parse import Kind, kind_of
from vllm_pd_connector.scheduler.consumer import Consumer
from vllm_pd_connector.scheduler.epochs import Epochs
from vllm_pd_connector.scheduler.leases.hand_over import HandOver
from vllm_pd_connector.scheduler.leases.lease_share import LeaseShare
from vllm_pd_connector.scheduler.operations import Operations
from vllm_pd_connector.scheduler.producer import Producer
from vllm_pd_connector.scheduler.recording import Recording
from vllm_pd_connector.scheduler.step_hold import StepHold

if TYPE_CHECKING:
    from collections.abc import Mapping

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

GAUGES = (
    *("leases", "conversations held", "leased blocks", "leased blocks limit", "prefills held back"),
    "weights unnamed",
    *("quarantined blocks", "free blocks"),
)
"""What `SchedulerHalf.stats` tells of this moment; the last two where there is a block pool."""


class SchedulerHalf:
    """See the module. One per engine."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig):
        self._recording = Recording(config.trace_dir)
        self.group_ids = tuple(kv_cache_config.transfer_group_ids)
        self._loop = loop = calling_loop()
        if loop is not None:
            loop.on_refusal(self._refused)
        self.hold = StepHold(loop, self._num_waiting, lambda *load: self.consumer.loads(*load), self._received)
        self.beside = Beside()
        self.epochs = Epochs(config.adapter_ids, vllm_config.lora_config, lambda: self.beside.any)
        self.producer = Producer(config, vllm_config, kv_cache_config, self.epochs, ended=self.hold.ask_soon)
        self.consumer = Consumer(config, vllm_config, kv_cache_config, self.epochs, self.hold.ask)
        loads = config.conversations or self.consumer.sources.loads
        watched = self.epochs, self.producer, self.consumer, self.beside
        ends = loop.ends if loop is not None else lambda: False
        self.operations = Operations(*watched, lambda: self._quarantine, ends, loads=loads)
        dcp_size = vllm_config.parallel_config.decode_context_parallel_size
        self.share = LeaseShare(config.kv_lease_share, partial(leased_blocks, kv_cache_config, dcp_size))
        self._quarantine: Quarantine | None = None
        self._manager: KVCacheManager | None = None
        self._block_tokens = sys.maxsize  # of the blocks at whose ends vLLM's scheduler begins a load
        self.fills_unequal_hits = True  # and vLLM can take a hit that is deeper in one group than in another
        self._without_blocks: set[str] = set()  # who found none, where conversations could give some
        self._loaded_without: set[str] = set()  # the same in this step, of who is not asked about any more
        self._lacked_blocks = False  # somebody, in this step
        self._held_back: set[str] = set()
        self._calm = False  # the workers rest until the next step
        self._told: set[str] = set()  # received, as vLLM was told before the workers' reports
        self._spared: dict[str, str] = {}  # requests that go on without what they came for, and why
        self._gauges: tuple[int, ...] = ()
        self.hand_over = HandOver(self.producer, self.group_ids)

    def serve(self, manifests: list[bytes], tokens: list[bytes], weights: str = "") -> None:
        """The workers are ready, at the start or after a sleep: let peers fetch their manifests. `tokens` are the
        workers' secrets, in rank order, `weights` what they have loaded. Raises PDConnectorError without a pool."""
        if self._quarantine is None:
            raise PDConnectorError(
                "vLLM has told of no block pool (bind_gpu_block_pool, bind_kv_cache_manager): nothing could be held"
            )
        self.epochs.own.begin(weights)
        self.hold.listen(tokens)
        self.producer.serve(manifests, tokens)
        self.consumer.sources.home = self.producer.home

    def bind_block_pool(self, pool: BlockPool) -> None:
        if self.epochs.pool is pool:  # vLLM tells of it by itself, with the manager, or both ways
            return
        if self._quarantine is not None:
            raise PDConnectorError("vLLM has told of two block pools; what is held in one is not held in the other")
        self._quarantine = Quarantine(pool)
        self.share.bind(self.producer.bind_block_pool(pool))
        self.epochs.pool = pool
        self.beside.begin()
        around_reset(pool, self._give_back, self._was_reset)

    def _give_back(self) -> None:
        """What is cached is to be forgotten: so are conversations."""
        self.producer.make_room()
        self.producer.drain()

    def _was_reset(self) -> None:
        """vLLM's prefix cache has forgotten everything; other connectors may be asked to afterwards."""
        if not self.beside.any:
            self.epochs.was_reset()

    def bind_cache_manager(self, manager: KVCacheManager) -> None:
        if self._quarantine is None:
            self.bind_block_pool(manager.block_pool)
        self._manager, self._block_tokens = manager, manager.coordinator.scheduler_block_size
        self.fills_unequal_hits = not fails_over_unequal_hits(manager)
        spare_lookups(manager, self.share.holds_back)
        if self.producer.lending.enabled or self.producer.progress.enabled:
            note_without_blocks(manager, self._found_no_blocks, self.frees_blocks)

        def tables(request_id: str) -> list[list[int]]:
            ids = manager.get_block_ids(request_id)
            return [ids[group] for group in self.group_ids]

        self.producer.progress.tables = tables

    def _found_no_blocks(self, request_id: str, loaded: bool) -> None:
        self._lacked_blocks = True
        (self._loaded_without if loaded else self._without_blocks).add(request_id)

    def _refused(self, request: Request) -> None:
        """This engine ends and does not take a request: what it came for needs no keeping, and nobody waits for it."""
        try:
            self.on_new_request(request)
            self.request_finished(request, ([],) * (1 + max(self.group_ids)))
        except Exception:  # one request must not keep an engine from ending
            logger.exception("request %s: giving back what it came for", request.request_id)

    def on_new_request(self, request: Request) -> None:
        """A request arrived. Bad parameters are remembered and fail the request when it would load."""
        try:
            self.producer.drain()  # an idle engine has not stepped since these leases ended
            self.operations.arrived(request)
            match kind_of(transfer_params(request)):
                case Kind.REMOTE_PREFILL:
                    self.consumer.add(request)
                    self.producer.follow(request)
                case Kind.REMOTE_DECODE:
                    self.producer.add(request)
                    if names_conversation(transfer_params(request)):
                        self.consumer.turn(request)
                    self.share.add(request.request_id, request.num_prompt_tokens)
                case Kind.NONE:
                    pass
        except Exception as error:  # vLLM's engine core ends by what is raised here: a defect must cost one request
            self.consumer.refuse(request, reason_of(error, logger, request.request_id, "it cannot be taken"))
            drop_other_params(request)

    def num_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        """None: vLLM leaves the request in its queue, schedules what is behind it, and asks again in the next step."""
        name = request.request_id
        try:
            self.producer.make_room(self.producer.lending.blocks_for(request))
            if name in self._without_blocks:  # vLLM keeps more back than the prompt's: for who runs, say
                self._without_blocks.discard(name)
                self.producer.give_up_oldest()
            # Rather than a prefill, a conversation goes, which may never go on.
            if not computes_itself(request) and not self.share.admits(name, self.producer.give_up_oldest):
                return None, False
        except Exception:  # as where it arrived
            logger.exception("request %s: making room for it", name)
        try:
            count = self.consumer.num_remote_tokens(request, num_computed_tokens)
        except Exception as error:
            count = 0
            self.consumer.cannot_load(request, reason_of(error, logger, name, "it cannot be loaded"))
        if self.consumer.refuses(name):
            # vLLM fails what it waits for, and one block is enough for that. With fewer tokens it might rather go on
            # with a hit that ends inside of one, and compute the request.
            count = max(min(request.num_prompt_tokens - num_computed_tokens, self._block_tokens), 0)
        return count, bool(count)

    def update_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        try:
            self.share.begin(request.request_id)
            if num_external_tokens:
                self.beside.end_before(owned_blocks(blocks, self.group_ids))
            self.consumer.allocated(request, blocks, num_external_tokens)
            if received := self.consumer.num_loading(request.request_id):
                self._keep_unshared_states(request, received)
        except Exception as error:
            reason = reason_of(error, logger, request.request_id, "its load cannot begin")
            self.consumer.cannot_begin(request, num_external_tokens, reason)

    def _keep_unshared_states(self, request: Request, received: int) -> None:
        for index, states in self.consumer.states.items():
            if (entry := states.mistaken_entry(received, request.num_prompt_tokens)) is not None:
                assert self._manager is not None
                keep_unshared(self._manager, request.request_id, self.group_ids[index], entry)

    def request_finished(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """(False, parameters for whoever reads the blocks): vLLM need not keep them, see `HeldBlocks`."""
        name = request.request_id
        try:
            self.consumer.finished(request)
        except Exception:  # as where it arrived
            logger.exception("request %s: what it came for", name)
        self._without_blocks.discard(name)
        params = self.hand_over.of(request, block_ids)
        for end in (self.share.end, self.producer.ended):
            try:
                end(name)
            except Exception:
                logger.exception("request %s: its end", name)
        return False, params

    def build_metadata(self, output: SchedulerOutput) -> StepMetadata:
        """vLLM's step begins here."""
        # A name may be used again; a worker reports by name, and its report of the former is yet to come.
        receives, aborts = self.consumer.take(but=self._told)
        computes = bool(output.num_scheduled_tokens)
        try:
            if receives:
                receives = self._recording.marked(receives)
            self._held_back = self.share.step()
            if computes and self._calm:
                # Where there are fewer cores than processes, workers that have just woken may share one for long if
                # this process, too, polls for what they answer: it keeps the other.
                rest_until_next_message()
            self._calm = self.hold.step(computes=computes, waiting=not computes and self._num_waiting() > 0)
            if self._lacked_blocks and self._stands_still():  # which none of what is given back now was there for
                self.producer.progress.make_way(time.monotonic())
            self._lacked_blocks = False
            self.producer.drain()
            if self._loaded_without:  # nobody behind it is scheduled either
                self._loaded_without.clear()
                self.producer.give_up_oldest()
            if computes:
                self.producer.make_room(len(output.num_scheduled_tokens) * self.producer.lending.groups)
        except Exception:  # a defect: these orders are given all the same, or vLLM would wait for ever
            logger.exception("an engine step: what is given back before it")
            self._calm = False
        try:
            step, ends_prefill = self.producer.advance(output)
        except Exception:  # the same
            logger.exception("an engine step: nothing is handed over of the requests in it")
            step, ends_prefill = self.producer.advance_unseen(output), True
        return StepMetadata(
            step=step,
            ends_prefill=ends_prefill,
            calm=self._calm,
            bell=self.hold.bell if receives else "",
            receives=receives,
            aborts=aborts,
            held=self.producer.take_held(),
        )

    def _stands_still(self) -> bool:
        """Whether no block will be free by itself but what is held of unfinished prefills."""
        offers = self.producer.progress.num_offered
        if not offers or offers != self.producer.num_leases or self._quarantine is None:
            return False
        loads = self.consumer.waiting or self._quarantine.num_blocks
        return not (loads or self.operations.busy or self.operations.runs)

    def _num_waiting(self) -> int:
        # A turn that is held back may wait for an answer, too.
        held_back, waiting = self._held_back, self.consumer.waiting
        return len(waiting | held_back if held_back else waiting) or int(self.operations.busy)

    def _received(self, request_ids: set[str]) -> None:
        """These receives went well on all workers, which will report them with the next step."""
        assert self._loop is not None
        self._loop.received(request_ids)
        self._told |= request_ids

    def frees_blocks(self) -> bool:
        """Give back the blocks of leases that have ended and of failed pushes, and what was offered in vain of running
        prefills, so that of one that is preempted nothing stays referenced; then conversations, for which nobody is
        preempted. Whether any became free by it."""
        if self._quarantine is None:
            return False
        before = self._quarantine.num_free_blocks
        self.producer.progress.take_back()
        self.producer.drain()
        while self._quarantine.num_free_blocks <= before and self.producer.give_up_oldest():
            pass
        return self._quarantine.num_free_blocks > before

    def update_output(self, output: KVConnectorOutput) -> None:
        """Called before vLLM frees the blocks of failed requests and caches those of received ones, so that quarantine
        and privacy come first."""
        if self._told and output.finished_recving:
            again = self._told & output.finished_recving
            output.finished_recving -= again
            self._told -= again
        report = output.kv_connector_worker_meta
        if report is not None and isinstance(report, WorkerReport):  # there is none in most steps
            assert self._quarantine is not None
            for request_id, ranks in report.quarantined.items():  # a pool in doubt must end the engine: not guarded
                self._quarantine.add(request_id, self.consumer.blocks_of(request_id), ranks)
            self._spared |= dict.fromkeys(report.spared, "it could not be received")
            # Of a prefill that is yet to be computed the other ranks would hear when it has been.
            if others_wait := report.failed - (output.finished_recving or set()):
                self.consumer.outdate("another rank could not receive it", others_wait)
            for request_id, ranks in report.drained.items():
                self._quarantine.drain(request_id, ranks)
            for request_id, blocks in report.unshareable.items():
                if why := self._came_in_part(request_id, blocks):
                    self._spared[request_id] = why
        if output.invalid_block_ids:
            self.producer.loads_failed(output.invalid_block_ids)
        if output.finished_sending:
            # vLLM frees and forgets a request at the first report of either kind. Another connector beside this one
            # (MultiConnector) may be done with a request that was aborted while bytes still land in its blocks.
            output.finished_sending -= self.consumer.ended_while_loading(output.finished_sending)
        for request_id in output.finished_recving or ():
            why, failed = self._spared.pop(request_id, ""), request_id in (output.failed_recving or ())
            self.operations.received(request_id, why, failed=failed)
            if failed or why:
                self.beside.forget_blocks(request_id)
            self.hold.forget(request_id)

    def _came_in_part(self, request_id: str, blocks: Mapping[int, int]) -> str:
        """Blocks of a request up to these lack a part: nobody may share them. Why it cannot go on with them, if so."""
        assert self._manager is not None
        try:
            for group, block in blocks.items():
                keep_unshared(self._manager, request_id, self.group_ids[group], block)
            whole = self.producer.came_in_part(request_id, blocks)
        except Exception as error:
            return str(reason_of(error, logger, request_id, "its blocks cannot be kept from being shared"))
        if self.beside.any:
            return "its window came in part, and another connector would keep it as whole"
        return "" if whole else "its window came in part, and decode would need all of it"

    def stats(self) -> PDStats | None:
        """Gauges, if one changed since the last call, and what was counted since then; None when nothing did."""
        producer, share, quarantine = self.producer, self.share, self._quarantine
        conversations = producer.lending.num_held  # for which nobody needs to come
        gauges = (
            *(producer.num_leases - conversations, conversations),
            *(share.num_leased, share.limit, share.num_held_back, int(self.epochs.own.nameless)),
            *((quarantine.num_blocks, quarantine.num_free_blocks) if quarantine is not None else ()),
        )
        counters = producer.counted, producer.lending.counted, self.consumer.turns.counted
        computed = self.consumer.computed.counted
        if gauges == self._gauges and not (self.hand_over.not_held or computed or producer.given or any(counters)):
            return None
        self._gauges = gauges
        stats = PDStats()
        for counted in counters:
            for name, amount in counted.items():
                stats.count(name, amount)
            counted.clear()
        for one in producer.given:
            stats.gave(one.taken.engine_id, one.taken.moved.bytes, whole=one.whole)
        producer.given.clear()
        for reason, amount in self.hand_over.not_held.items():
            stats.not_held(reason, amount)
        self.hand_over.not_held.clear()
        for why, amount in computed.items():
            stats.computed_here(why, amount)
        computed.clear()
        for name, value in zip(GAUGES, gauges, strict=False):
            stats.gauge(name, value)
        return stats

    def shutdown(self) -> None:
        self.consumer.close()
        self.producer.close()
        self.hold.close()

"""The worker half: one object per rank that answers vLLM's model runner.

Everything here runs in the thread that launches forwards and does next to nothing: it puts orders into the transfer
thread's queue and takes finished ids out. The work is in `loop` (transfers) and `describe` (the manifest, once).
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm_pd_connector import __version__
from vllm_pd_connector.compat import facts
from vllm_pd_connector.compat.base import KVConnectorTransferResults, init_logger
from vllm_pd_connector.compat.memory import forward_marker, make_device_current
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.check import validate
from vllm_pd_connector.geometry.manifest import Manifest
from vllm_pd_connector.observability.digest_trace import DigestTrace
from vllm_pd_connector.observability.stats import PDStats
from vllm_pd_connector.sidechannel.keys import Keys, keys_of
from vllm_pd_connector.sidechannel.sockets import endpoint
from vllm_pd_connector.steps import StepMetadata, WorkerReport
from vllm_pd_connector.transport import hugepages, registry
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.worker.describe import describe
from vllm_pd_connector.worker.leave import wait_for_readers
from vllm_pd_connector.worker.loop import TransferLoop
from vllm_pd_connector.worker.outbox import Outbox
from vllm_pd_connector.worker.pushing import PushSetup
from vllm_pd_connector.worker.step_clock import StepClock
from vllm_pd_connector.worker.verify import SumMaker

if TYPE_CHECKING:
    import torch

    from vllm_pd_connector.compat.types import KVCacheConfig, VllmConfig

logger = init_logger(__name__)


class WorkerHalf:
    """See the module. One per worker process."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig):
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._outbox = Outbox()
        self.token = secrets.token_bytes(16)
        self._forward_done: Callable[[], Callable[[], bool]] | None = None
        self._manifest: Manifest | None = None
        self._loop: TransferLoop | None = None
        self._trace: DigestTrace | None = None
        self._sums: SumMaker | None = None

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the caches, start the transfer thread, register the memory with the transport.

        Raises:
            PDConnectorError: a cache that cannot be moved, or a transport that cannot start; the engine does not
                start with a connector that would fail every request.
        """
        manifest = describe(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            incarnation=secrets.token_hex(16),
            model_id=self._config.model_id,
            software=f"vllm {facts.vllm_version()}, vllm_pd_connector {__version__}",
            transport=self._config.transport,
        )
        validate(manifest)
        role = self._vllm_config.kv_transfer_config
        produces, consumes = role.is_kv_producer, role.is_kv_consumer
        if self._config.digest_dir is not None:
            self._trace = DigestTrace(Path(self._config.digest_dir), manifest)
        place = manifest.parallel
        starts = self._config.starts_transfers(prefills=produces, decodes=consumes)
        config = self._config if starts else msgspec.structs.replace(self._config, staging_bytes=0)
        push = None
        if self._config.pushes and produces:
            self._forward_done = forward_marker(manifest.segments)
            keys = keys_of(self._config)
            where = self._config.side_channel(self._vllm_config.parallel_config.data_parallel_index)
            home = endpoint(*where, keys.public if keys is not None else None)
            push = PushSetup(home, self.token, StepClock())
        self._loop = TransferLoop(
            config,
            manifest,
            lambda: self._make_transport(manifest),
            self._outbox,
            reader=place.pp_rank * place.tp_size + place.tp_rank,
            readers=place.pp_size * place.tp_size,
            push=push,
            received=self._trace.received if self._trace is not None else None,
        )
        transport_endpoint = self._loop.start()
        scratch = self._loop.scratch if push is not None else None
        self._offer_sums(manifest)
        self._manifest = msgspec.structs.replace(manifest, endpoint=transport_endpoint, scratch=scratch)
        if self._config.huge_pages:
            hugepages.collapse_in_background(manifest.segments)
        logger.info(
            "registered %d logical tensors of %d layers in %d memory segment(s) with %s",
            len(manifest.tensors),
            len({tensor.layer for tensor in manifest.tensors}),
            len(manifest.segments),
            self._config.transport,
        )

    def _own_side_channel(self) -> tuple[str, Keys | None]:
        """The address of this instance's side channel, and the keys to speak to it with."""
        keys = keys_of(self._config)
        host, port = self._config.side_channel(self._vllm_config.parallel_config.data_parallel_index)
        return endpoint(host, port, keys.public if keys is not None else None), keys

    def _offer_sums(self, manifest: Manifest) -> None:
        """Make sums for decode instances that ask."""
        if self._config.verify != "off" and self._vllm_config.kv_transfer_config.is_kv_producer:
            address, keys = self._own_side_channel()
            place = manifest.parallel
            number = place.pp_rank * place.tp_size + place.tp_rank
            self._sums = SumMaker(address, keys, manifest, number, self.token)

    def _make_transport(self, manifest: Manifest) -> Transport:
        """Called in the transfer thread."""
        make_device_current(manifest.segments)
        role = self._vllm_config.kv_transfer_config
        serves = self._config.is_target(prefills=role.is_kv_producer, decodes=role.is_kv_consumer)
        settings = self._config.transport_settings(prefills=role.is_kv_producer)
        memory = next((segment.device for segment in manifest.segments if segment.device != "cpu"), "cpu")
        return registry.create(self._config.transport, settings, serves=serves, memory=memory)

    def encoded_manifest(self) -> bytes:
        assert self._manifest is not None, "vLLM asks for it after register_kv_caches"
        return msgspec.msgpack.encode(self._manifest)

    def start_step(self, metadata: StepMetadata) -> None:
        """Pass on what the scheduler half ordered in this step."""
        if self._forward_done is not None:
            assert self._loop is not None
            self._loop.step_launched(metadata.step, self._forward_done())
        if metadata.receives or metadata.aborts:
            assert self._loop is not None
            self._loop.submit(metadata.receives, metadata.aborts)
        for held in metadata.held:
            assert self._trace is not None
            self._trace.held(held)

    def transfer_results(self) -> KVConnectorTransferResults:
        """Every receive that ended since the last step, each once."""
        return self._outbox.take_results()

    def take_report(self) -> WorkerReport | None:
        return self._outbox.take_report()

    def take_stats(self) -> PDStats | None:
        return self._outbox.take_stats()

    def shutdown(self) -> None:
        """End: after the readers of this worker's memory, if it is a prefill worker, within `shutdown_timeout`."""
        if self._loop is not None:
            if self._vllm_config.kv_transfer_config.is_kv_producer and self._config.shutdown_timeout > 0:
                address, keys = self._own_side_channel()
                wait_for_readers(address, keys, self._config.shutdown_timeout)
            if self._sums is not None:
                self._sums.close()
            self._loop.close()
            self._loop = None

"""The worker half: one object per rank that answers vLLM's model runner.

Everything here runs in the thread that launches forwards and does next to nothing: it puts orders into the transfer
thread's queue and takes finished ids out. The work is in `transfer_loop` (transfers) and `build_manifest` (the
manifest, once).

A step is marked where vLLM has launched everything that it writes, drafts included: in `wait_for_save`. vLLM calls
`start_load_kv` before the forward if another connector loads for this step, and before a drafter of runner V1. On a
pipeline stage that is not the last, which drafts nothing, runner V1 does not call `wait_for_save` while it speculates;
there the report that ends the step marks it, if nothing did before.
"""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from vllm_pd_connector.compat.base import KVConnectorTransferResults, init_logger
from vllm_pd_connector.compat.memory import Mark, make_device_current, marker
from vllm_pd_connector.compat.model.announced import announced_layers, states_settled
from vllm_pd_connector.compat.model.layers import settle_scales
from vllm_pd_connector.compat.model.served import require_whole_shares
from vllm_pd_connector.compat.queues import rest_until_next_message
from vllm_pd_connector.errors import InvalidConfig, PDConnectorError
from vllm_pd_connector.geometry.validate import validate
from vllm_pd_connector.observability.digest_trace import DigestTrace
from vllm_pd_connector.sidechannel.bell import ENDED, HERE, LONGEST, RECEIVED, SECRET_BYTES, ring
from vllm_pd_connector.sidechannel.net.keys import Keys, keys_of
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.transport import registry
from vllm_pd_connector.transport.base import Use
from vllm_pd_connector.transport.endpoint import protocol_of
from vllm_pd_connector.worker.build_manifest import build_manifest
from vllm_pd_connector.worker.checksum_server import ChecksumServer
from vllm_pd_connector.worker.drain import wait_for_readers
from vllm_pd_connector.worker.outbox import Outbox
from vllm_pd_connector.worker.peers.process_watch import address_towards
from vllm_pd_connector.worker.push.driver import PushSetup
from vllm_pd_connector.worker.push.step_clock import StepClock
from vllm_pd_connector.worker.push.waves import WaveCount, waves_of, with_earlier
from vllm_pd_connector.worker.transfer_loop import TransferLoop

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from vllm_pd_connector.compat.types import KVCacheConfig, VllmConfig
    from vllm_pd_connector.config import Config
    from vllm_pd_connector.geometry.manifest import Manifest
    from vllm_pd_connector.metadata import StepMetadata, WorkerReport
    from vllm_pd_connector.observability.stats import PDStats
    from vllm_pd_connector.transport.base import Transport

logger = init_logger(__name__)


class WorkerHalf:
    """See the module. One per worker process."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig):
        self._config = config
        self._vllm_config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._outbox = Outbox(self._ring)
        self._bell = ""
        self.token = secrets.token_bytes(SECRET_BYTES)
        self._mark: Callable[[], Mark] | None = None
        self._count = WaveCount(())
        self.follows_layers = False
        """Whether `layer_launched` is to be called: where layers are written before their step is done."""
        self._unmarked: StepMetadata | None = None  # a step of which more may be launched
        self._pushes = self._drafts = False
        self._last_stage = True
        self._manifest: Manifest | None = None
        self._loop: TransferLoop | None = None
        self._trace: DigestTrace | None = None
        self._checksums: ChecksumServer | None = None
        self._ending: list[TransferLoop | ChecksumServer] = []  # told to end, and not known to have ended
        self._kv_caches: dict[str, torch.Tensor] = {}

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Describe the caches, start the transfer thread, register the memory with the transport.

        Raises:
            PDConnectorError: a cache that cannot be moved, or a transport that cannot start; the engine does not
                start with a connector that would fail every request.
        """
        self._kv_caches = kv_caches
        settle_scales(self._vllm_config, kv_caches)
        manifest = build_manifest(
            self._vllm_config,
            self._kv_cache_config,
            kv_caches,
            incarnation=secrets.token_hex(16),
            config=self._config,
            transport=self._config.transport,
        )
        validate(manifest)
        _require_whole_checksums(self._config, manifest)
        role = self._vllm_config.kv_transfer_config
        produces, consumes = role.is_kv_producer, role.is_kv_consumer
        if self._config.digest_dir is not None:
            self._trace = DigestTrace(Path(self._config.digest_dir), manifest)
        place = manifest.parallel
        starts = self._config.starts_transfers(prefills=produces, decodes=consumes)
        config = self._config if starts else msgspec.structs.replace(self._config, staging_bytes=0)
        self._last_stage = place.pp_rank == place.pp_size - 1
        self._pushes = self._config.pushes and produces
        self._drafts = self._last_stage and produces and bool(manifest.model.speculative)
        if self._pushes or self._drafts:
            self._mark = marker(manifest.segments)
        push = None
        if self._pushes:
            home, _ = self._own_side_channel()
            waves = self._waves_of_layers(kv_caches)
            self._count, self.follows_layers = WaveCount(waves), bool(waves)
            announced = [layer for wave in waves for layer in wave]
            written = with_earlier(waves, states_settled(self._vllm_config, kv_caches, announced))
            push = PushSetup(home, self.token, StepClock(), written)
        self._loop = TransferLoop(
            config,
            manifest,
            lambda: self._make_transport(manifest),
            self._outbox,
            reader=place.number,
            readers=place.workers,
            push=push,
            received=self._trace.received if self._trace is not None else None,
            address=address_towards(self._side_channel()[0]),
            microbatches=self._vllm_config.parallel_config.use_ubatching,
        )
        try:
            self._offer(manifest)
        except BaseException:
            self._end_threads()  # what began: a waking may be asked for again
            raise

    def _offer(self, manifest: Manifest) -> None:
        """Start the transfer thread, and complete the manifest with what only that knows."""
        assert self._loop is not None
        transport_endpoint = self._loop.start()
        scratch = self._loop.scratch if self._pushes else None
        role = self._vllm_config.kv_transfer_config
        if self._config.verify != "off" and (role.is_kv_producer or self._config.conversations):
            address, keys = self._own_side_channel()  # for those who read a prefill's caches from here, or a turn's
            self._checksums = ChecksumServer(address, keys, manifest, manifest.parallel.number, self.token)
        self._manifest = msgspec.structs.replace(
            manifest, endpoint=transport_endpoint, scratch=scratch, life=self._loop.life
        )
        if protocol := protocol_of(self._config.transport, transport_endpoint):
            self._outbox.speaks(self._config.transport, protocol)
        logger.info(
            "registered %d logical tensors of %d layers in %d memory segment(s) with %s",
            len(manifest.tensors),
            len({tensor.layer for tensor in manifest.tensors}),
            len(manifest.segments),
            self._config.transport,
        )

    def unregister(self) -> None:
        """The caches' memory goes away, as in vLLM's sleep: let go of it. Again changes nothing.

        Nothing moves any more that anybody waits for; the transport ends with all that it has registered, and what
        peers still try there fails. `restore` begins another incarnation.

        Raises:
            PDConnectorError: a thread that moves or reads what the caches hold does not end: the memory must not go.
        """
        if self._loop is None and not self._ending:
            return
        self._end_threads()
        if self._ending:
            stuck = any(isinstance(thread, TransferLoop) and thread.stuck for thread in self._ending)
            raise PDConnectorError(
                f"sleep: {' and '.join(thread.name for thread in self._ending)} of this worker, which moves or reads "
                f"what its caches hold, has not ended: {'' if stuck else 'ask for sleep again later, or '}"
                "restart the instance"
            )
        logger.info("let go of the caches' memory with %s", self._config.transport)

    def restore(self) -> None:
        """The memory is back: register it anew. Again changes nothing, and after a failure tries anew.

        Raises:
            PDConnectorError: as `register`, and as `unregister` after one that failed.
        """
        if self._loop is None:
            self.unregister()
            self.register(self._kv_caches)

    def _end_threads(self) -> None:
        """Tell those that touch the caches to end, and wait a while for it; see `_ending`."""
        self._ending += [thread for thread in (self._checksums, self._loop) if thread is not None]
        self._checksums = self._loop = None
        for thread in self._ending:
            thread.close()
        self._ending = [thread for thread in self._ending if thread.runs]

    def _waves_of_layers(self, kv_caches: dict[str, torch.Tensor]) -> tuple[tuple[str, ...], ...]:
        """The layers that are written before their step is done, in waves; none unless the operator asks for it."""
        if self._config.push_when != "layers":
            return ()
        layers, reason = announced_layers(self._vllm_config, kv_caches)
        if reason:
            logger.warning('push_when: "layers", but %s: pushes are written step by step', reason)
        else:
            logger.info("pushes are written layer by layer, %d layers in waves", len(layers))
        return waves_of(layers)

    def _own_side_channel(self) -> tuple[str, Keys | None]:
        """The address of this instance's side channel, and the keys to speak to it with."""
        keys = keys_of(self._config)
        return endpoint(*self._side_channel(), keys.public if keys is not None else None), keys

    def _side_channel(self) -> tuple[str, int]:
        return self._config.side_channel(self._vllm_config.parallel_config.data_parallel_index)

    def _make_transport(self, manifest: Manifest) -> Transport:
        """Called in the transfer thread."""

        def prepare_thread() -> None:
            make_device_current(manifest.segments)

        prepare_thread()
        role = self._vllm_config.kv_transfer_config
        prefills, decodes = role.is_kv_producer, role.is_kv_consumer
        device = next((segment for segment in manifest.segments if segment.device != "cpu"), manifest.segments[0])
        return registry.create(
            self._config.transport,
            self._config.transport_settings(prefills=prefills),
            Use(
                serves=self._config.is_target(prefills=prefills, decodes=decodes),
                posts=self._config.starts_transfers(prefills=prefills, decodes=decodes),
                memory=device.device,
                device_id=device.device_id,
                prepare_thread=prepare_thread,
            ),
        )

    def encoded_manifest(self) -> bytes:
        assert self._manifest is not None, "vLLM asks for it after register_kv_caches"
        return msgspec.msgpack.encode(self._manifest)

    @property
    def weights(self) -> str:
        """What the manifest says of the weights that were loaded."""
        assert self._manifest is not None, "vLLM asks for it after register_kv_caches"
        return self._manifest.model.weights

    def start_step(self, metadata: StepMetadata) -> None:
        """Pass on what the scheduler half ordered in this step. Its forward may have been launched or not."""
        self._unmarked = metadata
        if metadata.calm:
            rest_until_next_message()
        if metadata.bell and metadata.bell != self._bell:
            self._bell = metadata.bell
            ring(self._bell, HERE + self.token)
        if self._loop is None:  # asleep
            for receive in metadata.receives:
                logger.error("request %s: its receive cannot begin while this worker is asleep", receive.request_id)
                self._outbox.finished(receive.request_id, ok=False, quarantined=False, spare=receive.spare)
        elif metadata.receives or metadata.aborts:
            self._loop.submit(metadata.receives, metadata.aborts)
        for held in metadata.held:
            assert self._trace is not None
            self._trace.held(held)

    def layer_launched(self, step: int, layer: str) -> None:
        """What one layer writes in a step was launched. Called by every layer of every step: it must cost nothing."""
        waves = self._count.launched(step, layer)
        if waves is None or self._loop is None:  # vLLM takes steps while asleep, too
            return
        assert self._mark is not None
        self._loop.step_launched(step, self._mark().query, waves)

    def step_launched(self) -> None:
        """Everything that the step writes was launched; another call in the same step changes nothing.

        Where the step ends a prefill and this worker drafts, wait until it is done: vLLM answers with the sampled
        token, which may be there before the drafter's caches, and a decode instance may read as soon as it has the
        answer. vLLM's workers answer after this returns.
        """
        metadata, self._unmarked = self._unmarked, None
        if self._mark is None or metadata is None:
            return
        mark = self._mark()
        if self._pushes and self._loop is not None:  # vLLM takes steps while asleep, too: a client gave up
            self._loop.step_launched(metadata.step, mark.query)
        if self._drafts and metadata.ends_prefill:
            mark.synchronize()

    def _ring(self, received: bytes) -> None:
        if not self._bell:
            return
        message = RECEIVED + self.token + received
        ring(self._bell, message if received and len(message) <= LONGEST else ENDED + self.token)

    def transfer_results(self) -> KVConnectorTransferResults:
        """Every receive that ended since the last step, each once."""
        return self._outbox.take_results()

    def take_report(self) -> WorkerReport | None:
        if not self._last_stage:
            self.step_launched()
        return self._outbox.take_report()

    def take_stats(self) -> PDStats | None:
        return self._outbox.take_stats()

    def shutdown(self) -> None:
        """End: after the readers of this worker's memory, if it is a prefill worker, within `shutdown_timeout`."""
        waits = self._vllm_config.kv_transfer_config.is_kv_producer and self._config.shutdown_timeout > 0
        if waits and self._loop is not None:
            address, keys = self._own_side_channel()
            wait_for_readers(address, keys, self._config.shutdown_timeout)
        self._end_threads()


def _require_whole_checksums(config: Config, manifest: Manifest) -> None:
    """Of opaque pages nobody knows the elements (`geometry.checksums.digest`), and ranks may hold a share of the tokens
    alone.

    Raises:
        InvalidConfig: receives are to be verified, and tokens are interleaved over ranks or all pages are opaque (those
            of one pipeline stage of several may be).
    """
    if config.verify == "off":
        return
    require_whole_shares(config.verify, max(group.share.size for group in manifest.groups))
    opaque = [tensor for tensor in manifest.tensors if tensor.opaque]
    if opaque and len(opaque) == len(manifest.tensors) and manifest.parallel.pp_size == 1:
        raise InvalidConfig(
            f'verify: "{config.verify}" here, but the pages of all {len(opaque)} caches are moved as opaque bytes '
            f'({opaque[0].layer}: {opaque[0].opaque}), of which nothing can be compared; set verify to "off"'
        )
    if opaque:
        logger.warning(
            'verify: "%s" compares %d of %d caches: pages of %s (%s) and others like it are moved as opaque bytes, of '
            "which nothing can be compared",
            config.verify,
            len(manifest.tensors) - len(opaque),
            len(manifest.tensors),
            opaque[0].layer,
            opaque[0].opaque,
        )

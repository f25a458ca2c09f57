"""The producer side: a finished prefill's blocks, held under a lease until they were read.

`hold` is called when a request finishes; from then on the side-channel server's thread owns the lease (renewals,
reads reported as done, expiry). The blocks are kept by references of our own in vLLM's pool, so the engine goes idle
as soon as it has nothing to compute; the references of leases that ended are given back before the next request is
scheduled and in every step, and an idle engine is asked for one.
"""

from __future__ import annotations

import json
import secrets
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import HeldBlocks, computed_after, computed_again, transfer_params
from vllm_pd_connector.compat.conversations import known_tokens
from vllm_pd_connector.compat.model import facts
from vllm_pd_connector.compat.model.caches import prefill_backoff, stop_short, takes_media_whole
from vllm_pd_connector.errors import OtherWeights, ProtocolError
from vllm_pd_connector.metadata import HeldRequest
from vllm_pd_connector.protocol.lease import End, Freed, Given
from vllm_pd_connector.protocol.params.answer import encode_params
from vllm_pd_connector.protocol.params.conversation import Conversation
from vllm_pd_connector.protocol.params.parse import RemotePrefill, later_of_batch, pairing_name
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress
from vllm_pd_connector.scheduler.answers import Answers
from vllm_pd_connector.scheduler.bootstrap import answer_proxies
from vllm_pd_connector.scheduler.conversations.lending import NO_PREFIX, Lending
from vllm_pd_connector.scheduler.leases.choices import Choices
from vllm_pd_connector.scheduler.leases.ended import note_expired
from vllm_pd_connector.scheduler.leases.spans import PrefillSpans
from vllm_pd_connector.scheduler.leases.tables import LeasedTables
from vllm_pd_connector.scheduler.prefill_progress import PrefillProgress
from vllm_pd_connector.sidechannel.net.keys import admits, keys_of, require_private_address
from vllm_pd_connector.sidechannel.server import SideChannelServer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Mapping, Sequence

    from vllm_pd_connector.compat.types import BlockPool, KVCacheConfig, Request, SchedulerOutput, VllmConfig
    from vllm_pd_connector.config import Config
    from vllm_pd_connector.geometry.blocks import BlockTable
    from vllm_pd_connector.scheduler.epochs import Epochs
    from vllm_pd_connector.sidechannel.bootstrap_http import BootstrapServer, EngineRegistration

logger = init_logger(__name__)


class Producer:
    """Leases of finished prefills. The server starts when the workers' manifests are known.

    Args:
        epochs: of the weights that prefills are computed with.
        ended: called when blocks are to be given back, and the engine may be idle; see `SideChannelServer`, `freed`.

    Raises:
        InvalidConfig: keys that cannot be used, or an address that unauthenticated peers reach and no keys.
    """

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        epochs: Epochs,
        ended: Callable[[], float] = lambda: 0.0,
    ):
        parallel = vllm_config.parallel_config
        self._config, self._epochs, self._ended = config, epochs, ended
        self._keeps = vllm_config.kv_transfer_config.is_kv_producer
        # A consumer that is written into is asked for its manifests, too.
        self.lending = Lending(config, vllm_config, kv_cache_config, epochs.adapters)
        self._serves = self._keeps or config.pushes or self.lending.enabled
        self._engine_id = facts.engine_id(vllm_config)
        self._incarnation = secrets.token_hex(16)
        self._host, self._port = config.side_channel(parallel.data_parallel_index)
        self._keys, self._secret = keys_of(config), config.secret()
        if self._serves:
            require_private_address(self._host, self._keys, config.allow_unauthenticated_peers, config.host_key())
        self._parallel = parallel
        self._answers = Answers(config, vllm_config, self._engine_id, (self._host, self._port), self._keys, epochs)
        self._first_engine, self._rank = facts.first_engine(vllm_config), facts.rank_for_routers(vllm_config)
        self._tables = LeasedTables(kv_cache_config, parallel.decode_context_parallel_size)
        self._cut = prefill_backoff(vllm_config, kv_cache_config), takes_media_whole(vllm_config)
        self._server: SideChannelServer | None = None
        self._bootstrap: BootstrapServer | EngineRegistration | None = None
        self._held: list[HeldRequest] = []
        self._traced: list[Freed] = []
        self.counted: Counter[str] = Counter()  # by the names of `observability.stats`
        self.given: list[Given] = []  # who got what, until it was counted
        self._spans = PrefillSpans()
        self._choices = Choices()
        self._blocks: HeldBlocks | None = None
        self._leased: set[str] = set()
        self._going: dict[str, Request] = {}  # decode requests of which something may be kept
        self._unfinished: dict[str, Request] = {}  # prefills for decode instances
        of_all = self._tables.of if config.push_when == "layers" else None
        self.progress = PrefillProgress(
            self._keeps and config.pushes and config.push_when != "end", kv_cache_config, of_all
        )

    @property
    def home(self) -> InstanceAddress | None:
        """Where this instance's manifests are served; None if nobody needs them."""
        if self._server is None:
            return None
        key = self._keys.public if self._keys is not None else None
        return InstanceAddress(self._engine_id, self._incarnation, self._host, self._server.port, key)

    def bind_block_pool(self, pool: BlockPool) -> HeldBlocks:
        self._blocks = self.progress.blocks = HeldBlocks(pool)
        return self._blocks

    @property
    def num_leases(self) -> int:
        """Requests whose blocks are held: of finished prefills, and of conversations (`lending.num_held` of them)."""
        return len(self._blocks) if self._blocks is not None else 0

    def serve(self, manifests: list[bytes], tokens: list[bytes]) -> None:
        """Start the side channel with the encoded manifests and secrets of all ranks; a consumer that reads needs none.
        It goes on if nobody has ended it: vLLM also tells what it told before.

        Raises:
            InvalidConfig: the address cannot be bound.
        """
        if not self._serves or self._server is not None:
            return
        self._server = SideChannelServer(
            self._host,
            self._port,
            self._engine_id,
            self._incarnation,
            keys=self._keys,
            verifies=self._config.verify != "off",
            freed=self._ended,
            lease_limit_s=self._config.kv_lease_limit,
        )
        self._server.set_manifests(manifests, tokens)
        self.progress.pushes = self._server.pushes
        if self._keeps and self._config.pushes:
            self._server.pushes.enable(tokens, self._config.kv_lease_duration, self._config.step_timeout)
            self.compute_with("")
            for request in self._unfinished.values():  # which queued while this instance slept
                try:
                    self._announce(request)
                except ProtocolError as error:  # its adapter was loaded in place meanwhile
                    logger.error("request %s: nobody can ask for its push: %s", request.request_id, error)
            if self._bootstrap is None:
                engine = self._engine_id, self._first_engine, (self._host, self._port)
                self._bootstrap = answer_proxies(self._config, self._parallel, self._rank, *engine)
        who = admits(self._keys, self._host)
        logger.info("side channel of engine %s listens on %s:%d, %s", self._engine_id, self._host, self._port, who)

    def add(self, request: Request) -> None:
        """A prefill for a decode instance arrived; what decode must compute itself is cut off.

        Raises:
            ProtocolError: its name is none, or it cannot be cut there.
        """
        stop_short(request, *self._cut)
        self._announce(request)
        self._spans.started(request)
        self._tables.follow(request.request_id)
        self._unfinished[request.request_id] = request

    def _announce(self, request: Request) -> None:
        """Let decode instances ask for a prefill. While this instance sleeps only its name is looked at.

        Raises:
            ProtocolError: it is none.
        """
        if not self._keeps:
            return
        num_tokens = request.num_prompt_tokens
        name = pairing_name(transfer_params(request), request.request_id)
        digest = self._answers.digest(request, num_tokens)
        if self._config.pushes and request.request_id in self._leased:  # pushes and leases are known by this id alone
            self._give_up(request.request_id)
        if self._server is not None and self._server.pushes.started(request.request_id, name, num_tokens, digest):
            self.progress.add(request, num_tokens)

    def follow(self, request: Request) -> None:
        """A decode request arrived: if it may be kept, it must be known with which weights it began."""
        if self.lending.enabled:
            self._going[request.request_id] = request
            self._tables.follow(request.request_id)

    def came_in_part(self, request_id: str, blocks: Mapping[int, int]) -> bool:
        """What a request has received lacks a part of its blocks up to these, by group. Returns whether it may go on
        with it: not a prefill that nobody could go on from without these blocks."""
        least, prefill = self._tables.came_in_part(request_id, blocks), self._unfinished.get(request_id)
        if prefill is None or least <= prefill.num_prompt_tokens:
            return True
        self._tables.follow(request_id)
        return False

    def hold(self, request: Request, block_ids: Sequence[list[int]]) -> dict[str, Any] | None:
        """Lease the request's blocks; returns the `kv_transfer_params` for the router, None where none are ever held.

        Raises:
            ProtocolError: no decode instance would accept its parameters, or there is nothing to hold.
        """
        if not self._keeps:
            why = "this instance's kv_role is kv_consumer: nothing is held. Send prefill requests to a kv_producer"
            logger.error("request %s asks for do_remote_decode, but %s", request.request_id, why)
            return None
        if request.request_id not in self._unfinished:  # under recompute vLLM computes it all the same
            raise ProtocolError("it was refused when it came, or a defect met it: nobody knows what computed it")
        if self._server is None or self._blocks is None:
            raise ProtocolError("the instance sleeps")
        if reason := self._epochs.mixed(request):
            raise OtherWeights(reason)
        if reason := computed_again(request):
            raise ProtocolError(reason)
        if not any(block_ids):
            raise ProtocolError("it has ended without blocks")
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        tables = self._tables.of(request.request_id, block_ids, num_tokens)
        answer = self._answers.prefill(request, tables, num_tokens, self._incarnation, self._epochs.own.now)
        return self._lease(request, answer, tables)

    def lend(self, request: Request, block_ids: Sequence[list[int]]) -> dict[str, Any] | None:
        """Lease what a finished decode request has left, for the next turn of its conversation; returns the
        `kv_transfer_params` for the router, None if nothing is kept.

        Raises:
            ProtocolError: parameters that no prefill instance would accept; nothing is kept.
        """
        if self._server is None or self._blocks is None or not any(block_ids) or request.request_id not in self._going:
            return None
        if why := self.lending.why_not(request) or self._epochs.mixed(request):
            self.lending.not_kept(request.request_id, why)
            return None
        num_tokens = known_tokens(request)
        tables = self._tables.of(request.request_id, block_ids, num_tokens)
        if not (prefixes := self.lending.prefixes(request, tables, num_tokens)):
            self.lending.not_kept(request.request_id, NO_PREFIX)
            return None
        answer = self._answers.conversation(request, tables, prefixes, self._incarnation, self._epochs.own.now)
        params = self._lease(request, answer, tables)
        self.lending.add(request.request_id, self._blocks.ids_of(request.request_id))
        self.make_room(0)
        return params

    def make_room(self, needed: int = sys.maxsize) -> None:
        """Give back the oldest conversations until `needed` blocks are free, or none is left."""
        if self._blocks is not None and self.lending.num_held:
            while self.lending.crowded(*self._blocks.pool_sizes, needed) and self.give_up_oldest():
                pass

    def give_up_oldest(self) -> bool:
        """Give back the oldest conversation; False if there is none, or it is read from: then its blocks come later."""
        if (oldest := self.lending.oldest) is not None:
            self._give_up(oldest)
        return oldest is not None and not self.lending.holds(oldest)

    def _lease(self, request: Request, answer: RemotePrefill, tables: tuple[BlockTable, ...]) -> dict[str, Any]:
        """Hold these blocks under a lease; returns the answer for the router."""
        assert self._server is not None and self._blocks is not None
        params, named = encode_params(answer, self._secret), ("", b"")
        if isinstance(answer, Conversation):
            named = pairing_name(transfer_params(request), request.request_id), json.dumps(params).encode()
        if request.request_id in self._leased:  # a client that uses a request id again gives up the older lease
            self._give_up(request.request_id)
            if request.request_id in self._leased:
                raise ProtocolError("its request id is that of an older prefill whose blocks are still being written")
        # Unless both legs were sent at once, and name each choice.
        if not self._config.pushes and (older := self._choices.held(request.request_id)) is not None:
            self._server.drop(older)
        lease = answer.lease
        self._server.hold(lease.request_id, lease.nonce, answer.pd_connector.lease_seconds, tables, named)
        self._leased.add(request.request_id)
        try:
            self._blocks.hold(request.request_id, tables)
            self._spans.held(request)
            step = self.progress.last_step(request.request_id)
            pushed = self._server.pushes.finished(request.request_id, lease.nonce, tables, step)
            self.progress.discard(request.request_id)
        except Exception:  # nobody gets its parameters
            self._server.drop(request.request_id)
            raise
        if not pushed or (later_of_batch(request.request_id) and not self._config.pushes):  # nobody can name its lease
            self._server.drop(request.request_id)
        if self._config.digest_dir is not None:
            self._held.append(HeldRequest(request.request_id, tables, answer.remote_num_tokens))
        return params

    def _give_up(self, request_id: str) -> None:
        if self._server is not None:
            self._server.drop(request_id)
            self.drain()

    def ended(self, request_id: str) -> None:
        """A request ended, however."""
        self._unfinished.pop(request_id, None)
        self.progress.went_on()
        self._spans.over(request_id)
        self._going.pop(request_id, None)
        self._tables.over(request_id)
        self._epochs.forget(request_id)

    def advance(self, output: SchedulerOutput) -> tuple[int, bool]:
        """Begin an engine step: what it will complete goes to the workers as orders. Returns the step's number, and
        whether a prefill for a decode instance is complete after it."""
        if not output.num_scheduled_tokens:  # the engine only looks whether it can go on: nothing begins
            return self.progress.next_step(), False
        self._epochs.advance(output, self._unfinished, self._going)
        computed = computed_after(output, self._unfinished) if self._unfinished else {}
        if self._server is not None and self._blocks is not None:
            self._server.pushes.stepped()
            self.progress.advance(computed)
        ends = any(tokens >= self._unfinished[name].num_prompt_tokens for name, tokens in computed.items())
        return self.progress.number, ends

    def advance_unseen(self, output: SchedulerOutput) -> int:
        """Begin a step that met a defect there: nothing is handed over of what it computes. Returns its number."""
        for name in output.num_scheduled_tokens:
            self._unfinished.pop(name, None)
            self._going.pop(name, None)
        self._epochs.not_advanced()
        return self.progress.next_step()

    def loads_failed(self, block_ids: Collection[int]) -> None:
        """Another connector could not load these blocks, and a step that wrote from them had begun. vLLM computes their
        tokens again, but what was written of them stays written, and what the step in flight computes from them."""
        if self._server is not None and self.progress.tables is not None:
            reason = "another connector of the prefill instance failed to load blocks that were written or read already"
            self.progress.fail(reason, block_ids)
            for name, one in [(n, r) for n, r in (self._unfinished | self._going).items() if r.num_in_flight_tokens]:
                if self._tables.missed(name, self.progress.tables(name), one.num_computed_tokens, block_ids):
                    self._server.pushes.failed(name, reason)

    def abandon(self, request: Request, reason: str) -> None:
        """A prefill for a decode instance ended without a cache that could be handed over."""
        if self.progress.discard(request.request_id) and self._server is not None:
            self._server.pushes.aborted(request.request_id, reason)

    def end_leases(self, reason: End) -> None:
        """Have nobody get any more what is held; it is given back when nothing is written from it any more."""
        if self._server is not None:
            self._server.drop_all(reason)
            self.progress.fail(reason.value)
            self.drain()

    def compute_with(self, reason: str) -> None:
        """The weights are others from now on, or not known: pushes that have begun fail."""
        if self._server is not None:
            self._server.pushes.compute_with(self._epochs.own.now, reason)

    def take_held(self) -> list[HeldRequest]:
        """What was held since the last call (digest trace only)."""
        held, self._held = self._held, []
        return held

    def drain(self) -> list[str]:
        """Give back the blocks of leases that ended (returns their request ids, each once), and of failed pushes."""
        if self._server is None or self._blocks is None or not (self._server.has_news() or self._traced):
            return []
        self.progress.let_go()
        self._traced += self._server.take_freed()  # which a defect leaves to the next call
        self.given += self._spans.given(self._server.take_given())
        freed = self._traced
        # Their digests are made in the next step: until then nobody else may write there.
        self._traced = [entry for entry in freed if any(entry.request_id == held.request_id for held in self._held)]
        over = [entry for entry in freed if entry not in self._traced]
        for entry in over:
            try:
                self._give_back(*entry)
            except Exception:  # nobody else's lease is to stay for it
                logger.exception("request %s: the end of its lease", entry.request_id)
        return [entry.request_id for entry in over]

    def _give_back(self, request_id: str, reason: End) -> None:
        assert self._blocks is not None
        self._leased.discard(request_id)
        if request_id in self._blocks:
            self._blocks.release(request_id)
        self.progress.went_on()
        self._choices.ended(request_id)
        self._spans.ended(request_id, reason)
        if not self.lending.ended(request_id, reason):  # else nobody needs to come for it
            note_expired(request_id, reason, self.counted)

    def leave(self) -> None:
        """Tell every peer that the caches are gone, and serve none until `serve` is called again."""
        if self._server is not None:
            self.end_leases(End.ASLEEP)
            self._server.close()
            self.progress.pushes = None
            self._server, self._incarnation = None, secrets.token_hex(16)

    def close(self) -> None:
        for server in (self._bootstrap, self._server):
            if server is not None:
                server.close()

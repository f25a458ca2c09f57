"""The producer side: a finished prefill's blocks, held under a lease until they were read.

`step_hold` is called when a request finishes; from then on the side-channel server's thread owns the lease (renewals,
reads reported as done, expiry). The blocks are kept by references of our own in vLLM's pool, so the engine goes idle
as soon as it has nothing to compute; the references of leases that ended are given back before the next request is
scheduled and in every step, and an idle engine is asked for one.
"""

from __future__ import annotations

import secrets
from collections import Counter
from math import inf
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import HeldBlocks, computed_after, prompt_digest, stop_short, transfer_params
from vllm_pd_connector.compat.model import facts
from vllm_pd_connector.compat.model.caches import prefill_backoff
from vllm_pd_connector.compat.model.recurrent import state_groups
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.blocks import NULL_BLOCK, BlockTable
from vllm_pd_connector.metadata import HeldRequest
from vllm_pd_connector.protocol.lease import End, Freed
from vllm_pd_connector.protocol.params.answer import encode_params
from vllm_pd_connector.protocol.params.bootstrap import EngineRegistry, HostPort, encode_answer
from vllm_pd_connector.protocol.params.parse import Extension, RemotePrefill, choice_of, pairing_name
from vllm_pd_connector.protocol.wire.messages import PROTOCOL_VERSION
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress
from vllm_pd_connector.scheduler.prefill_progress import PrefillProgress, TablesOf
from vllm_pd_connector.sidechannel.bootstrap_http import BootstrapServer, EngineRegistration, is_own_address
from vllm_pd_connector.sidechannel.net.keys import keys_of, require_private_address
from vllm_pd_connector.sidechannel.server import SideChannelServer

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from vllm_pd_connector.compat.types import BlockPool, KVCacheConfig, Request, SchedulerOutput, VllmConfig
    from vllm_pd_connector.config import Config

logger = init_logger(__name__)

EXPIRED = {
    End.UNCLAIMED: "The router sent no decode request with its parameters, or too late: see its log, or raise "
    "kv_lease_duration if it needs longer between the two legs",
    End.EXPIRED: "The decode instance that had asked for it fell silent: see whether it lives and reaches this one, or "
    "raise kv_lease_duration if it stands still for longer",
    End.OVER_LIMIT: "Its decode request waited for all that time: decode has too few blocks, or waits for an instance "
    "that waits for it; raise kv_lease_limit if requests may queue that long",
}
"""Why blocks are freed that nobody read, and what to do about it."""


class Producer:
    """Leases of finished prefills. The server starts when the workers' manifests are known.

    Args:
        ended: called, from the server's thread, when blocks are to be given back; the engine may be idle.

    Raises:
        InvalidConfig: keys that cannot be used, or an address that unauthenticated peers reach and no keys.
    """

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        ended: Callable[[], None] = lambda: None,
    ):
        parallel = vllm_config.parallel_config
        self._config = config
        self._ended = ended
        self._keeps = vllm_config.kv_transfer_config.is_kv_producer
        # A consumer that is written into is asked for its manifests, too.
        self._serves = self._keeps or config.pushes
        self._engine_id = facts.engine_id(vllm_config)
        self._incarnation = secrets.token_hex(16)
        self._host, self._port = config.side_channel(parallel.data_parallel_index)
        self._keys = keys_of(config)
        self._secret = config.secret()
        if self._serves:
            require_private_address(self._host, self._keys, config.allow_unauthenticated_peers)
        self._parallel = parallel
        self._first_engine = facts.first_engine(vllm_config)
        self._rank = facts.rank_for_routers(vllm_config)
        self._states = state_groups(kv_cache_config)
        self._backoff = prefill_backoff(vllm_config, kv_cache_config)
        self._server: SideChannelServer | None = None
        self._bootstrap: BootstrapServer | EngineRegistration | None = None
        self._held: list[HeldRequest] = []
        self._traced: list[Freed] = []
        self._expired: Counter[str] = Counter()
        self._choices: dict[str, str] = {}  # latest lease of the choices of a request with n > 1
        self._blocks: HeldBlocks | None = None
        self._leased: set[str] = set()
        self._partial: set[str] = set()  # running prefills with blocks that are written from
        self._unfinished: dict[str, int] = {}  # prefills for decode instances, with their prompts' lengths
        self._progress = PrefillProgress(config.push_when == "steps", kv_cache_config)

    @property
    def home(self) -> InstanceAddress | None:
        """Where this instance's manifests are served; None if nobody needs them."""
        if self._server is None:
            return None
        key = self._keys.public if self._keys is not None else None
        return InstanceAddress(self._engine_id, self._incarnation, self._host, self._server.port, key)

    def bind_block_pool(self, pool: BlockPool) -> None:
        self._blocks = HeldBlocks(pool)

    def bind_block_tables(self, tables: TablesOf) -> None:
        self._progress.tables = tables

    @property
    def num_leases(self) -> int:
        return len(self._blocks) if self._blocks is not None else 0

    def serve(self, manifests: list[bytes], tokens: list[bytes]) -> None:
        """Start the side channel with the encoded manifests and secrets of all ranks; a consumer that reads needs none.

        Raises:
            InvalidConfig: the address cannot be bound.
        """
        if not self._serves:
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
        if self._keeps and self._config.pushes:
            self._server.pushes.enable(tokens, self._config.kv_lease_duration, self._config.step_timeout)
            self._answer_proxies()
        logger.info(
            "side channel of engine %s listens on %s:%d, %s",
            self._engine_id,
            self._host,
            self._port,
            f"for {len(self._keys.peers)} known keys" if self._keys is not None else "for everybody",
        )

    def _answer_proxies(self) -> None:
        """Say who this engine is to proxies that ask in the way of the in-tree Mooncake connector, if configured: they
        ask the first engine of a `vllm serve`, which tells them of all."""
        port = self._config.bootstrap()
        if port is None:
            return
        parallel = self._parallel
        sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
        own = encode_answer(self._rank, self._engine_id, HostPort(self._host, self._port), *sizes)
        if self._first_engine is not None:
            # On this host it listens where this engine does, at its side_channel_host; so does an engine of another
            # `vllm serve` on this host, which must not be taken for it.
            here = (_reachable(self._host),) if is_own_address(self._first_engine) else ()
            hosts = dict.fromkeys((*here, self._first_engine))
            self._bootstrap = EngineRegistration([HostPort(host, port) for host in hosts], own)
            return
        unauthenticated = self._config.allow_unauthenticated_peers
        self._bootstrap = BootstrapServer(self._host, port, EngineRegistry(own), unauthenticated=unauthenticated)
        logger.info("bootstrap answers for engine %s on http://%s:%d/query", self._engine_id, self._host, port)

    def add(self, request: Request) -> None:
        """A prefill for a decode instance arrived; what decode must compute itself is cut off.

        Raises:
            ProtocolError: its name is none.
        """
        stop_short(request, self._backoff)
        self._unfinished[request.request_id] = request.num_prompt_tokens
        if self._server is None or not self._keeps:
            return
        num_tokens = request.num_prompt_tokens
        name = pairing_name(transfer_params(request), request.request_id)
        digest = prompt_digest(request, num_tokens, self._config.adapter_ids)
        if self._server.pushes.started(request.request_id, name, num_tokens, digest):
            self._progress.add(request.request_id, num_tokens)

    def hold(self, request: Request, block_ids: Sequence[list[int]]) -> dict[str, Any] | None:
        """Lease the request's blocks; returns the `kv_transfer_params` for the router, None if nothing is held.

        Raises:
            ProtocolError: parameters that no decode instance would accept; nothing is held.
        """
        if self._server is None or self._blocks is None or not self._keeps:
            logger.error(
                "request %s asks for do_remote_decode, but this instance's kv_role is kv_consumer: nothing is held. "
                "Send prefill requests to a kv_producer",
                request.request_id,
            )
            return None
        if not any(block_ids):
            return None
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        tables = tuple(self._table(group, ids, num_tokens) for group, ids in enumerate(block_ids))
        answer = self._answer(request, tables, num_tokens)
        params = encode_params(answer, self._secret)
        if request.request_id in self._leased:  # a client that uses a request id again gives up the older lease
            self._server.drop(request.request_id)
            self.drain()
            if request.request_id in self._leased:
                raise ProtocolError("its request id is that of an older prefill whose blocks are still being written")
        self._drop_older_choice(request.request_id)
        self._leased.add(request.request_id)
        self._partial.discard(request.request_id)
        self._blocks.hold(request.request_id, tables)
        lease = answer.lease
        self._server.hold(lease.request_id, lease.nonce, self._config.kv_lease_duration, tables)
        self._progress.discard(request.request_id)
        if not self._server.pushes.finished(request.request_id, lease.nonce, tables, self._progress.number):
            self._server.drop(request.request_id)
        if self._config.digest_dir is not None:
            self._held.append(HeldRequest(request.request_id, tables, num_tokens))
        return params

    def _answer(self, request: Request, tables: tuple[BlockTable, ...], num_tokens: int) -> RemotePrefill:
        return RemotePrefill(
            do_remote_prefill=True,
            do_remote_decode=False,
            remote_block_ids=tuple(tuple(table.ids.tolist()) for table in tables),
            remote_engine_id=self._engine_id,
            remote_request_id=request.request_id,
            remote_host=self._host,
            remote_port=self._port,
            tp_size=self._parallel.tensor_parallel_size,
            dcp_size=self._parallel.decode_context_parallel_size,
            pp_size=self._parallel.pipeline_parallel_size,
            remote_num_tokens=num_tokens,
            # A moment of this host's clock means nothing on another; the lease protocol replaces it.
            remote_blocks_expiry_time=None,
            transfer_mode="push" if self._config.pushes else "pull",
            pd_connector=Extension(
                version=PROTOCOL_VERSION,
                incarnation=self._incarnation,
                nonce=secrets.token_hex(16),
                lease_seconds=self._config.kv_lease_duration,
                prompt_digest=prompt_digest(request, num_tokens, self._config.adapter_ids),
                first_blocks=tuple(table.first_block for table in tables),
                server_key=self._keys.public if self._keys is not None else None,
            ),
        )

    def ended(self, request_id: str) -> None:
        """A request ended, however."""
        self._unfinished.pop(request_id, None)

    def ends_prefill(self, output: SchedulerOutput) -> bool:
        """Whether a prefill for a decode instance is complete after this step."""
        if not self._unfinished:
            return False
        return any(computed >= self._unfinished.get(request_id, inf) for request_id, computed in computed_after(output))

    def _drop_older_choice(self, request_id: str) -> None:
        """Of a request with `n` > 1 the router gets the parameters of the choice that ended last, and nobody else can
        name the others' leases, unless both legs were sent at once.

        Source: vLLM 0.32, `RequestState.make_request_output`.
        """
        choice = choice_of(request_id)
        if not choice or self._config.pushes:
            return
        assert self._server is not None
        parent = request_id.removeprefix(choice)
        if (older := self._choices.get(parent)) is not None:
            self._server.drop(older)
        self._choices[parent] = request_id

    def _table(self, group: int, ids: list[int], num_tokens: int) -> BlockTable:
        state = self._states.get(group)
        if state is None:
            table = BlockTable.of(0, ids)
            return BlockTable.of(table.begin, ids[table.begin :])  # a sliding window has passed what is null
        block = state.state_block(ids, num_tokens)
        if block == NULL_BLOCK:
            raise ProtocolError(f"group {group}: no block holds the state after {num_tokens} tokens")
        return BlockTable.of(0, (block,))

    def advance(self, output: SchedulerOutput) -> int:
        """Begin an engine step: what it will complete goes to the workers as orders. Returns the step's number."""
        if self._server is not None and self._blocks is not None:
            if output.num_scheduled_tokens:  # else the engine only looks whether it can go on
                self._server.pushes.stepped()
            self._let_go(self._server, self._blocks)
            for request_id, tables, ready in self._progress.advance(output, self._server.pushes.wanted):
                # Held before it is known to be there: from then on it may be written from at any time.
                self._blocks.hold(request_id, tables)
                self._partial.add(request_id)
                self._server.pushes.progressed(request_id, tables, ready, self._progress.number)
        return self._progress.number

    def _let_go(self, server: SideChannelServer, blocks: HeldBlocks) -> None:
        """Give back the blocks of running prefills whose push has failed: a preempted one may need them to go on."""
        for request_id in [request_id for request_id in self._partial if server.pushes.given_up(request_id)]:
            self._partial.discard(request_id)
            blocks.release(request_id)

    def loads_failed(self, block_ids: Collection[int]) -> None:
        """Another connector could not load these blocks, and a step that wrote from them had begun. vLLM computes their
        tokens again, but what was written of them stays written."""
        if self._server is None or self._blocks is None:
            return
        for request_id in self._partial:
            if self._blocks.holds_any(request_id, block_ids):
                self._server.pushes.failed(
                    request_id, "another connector of the prefill instance failed to load blocks that went out already"
                )

    def abandon(self, request: Request, reason: str) -> None:
        """A prefill for a decode instance ended without a cache that could be handed over."""
        if self._server is not None and self._progress.discard(request.request_id):
            self._server.pushes.aborted(request.request_id, reason)

    def take_held(self) -> list[HeldRequest]:
        """What was held since the last call (digest trace only)."""
        held, self._held = self._held, []
        return held

    def drain(self) -> list[str]:
        """Give back the blocks of leases that ended; returns their request ids, each exactly once."""
        ended: list[str] = []
        if self._server is None or self._blocks is None:
            return ended
        freed = [*self._traced, *self._server.take_freed()]
        # Their digests are made in the next step: until then nobody else may write there.
        self._traced = [entry for entry in freed if any(entry.request_id == held.request_id for held in self._held)]
        for request_id, reason in [entry for entry in freed if entry not in self._traced]:
            ended.append(request_id)
            self._leased.discard(request_id)
            self._partial.discard(request_id)
            if request_id in self._blocks:
                self._blocks.release(request_id)
            parent = request_id.removeprefix(choice_of(request_id))
            if self._choices.get(parent) == request_id:
                del self._choices[parent]
            if reason in EXPIRED:
                self._expired["leases_expired"] += 1
                self._expired["leases_over_limit"] += reason is End.OVER_LIMIT
                logger.warning("request %s: its lease %s; its blocks are freed. %s",
                               request_id, reason.value, EXPIRED[reason])  # fmt: skip
        return ended

    def take_expired(self) -> Counter[str]:
        """Leases that expired since the last call, by the names of `observability.stats`."""
        expired, self._expired = self._expired, Counter()
        return expired

    def close(self) -> None:
        if self._bootstrap is not None:
            self._bootstrap.close()
        if self._server is not None:
            self._server.close()


def _reachable(host: str) -> str:
    """Where this host finds what listens at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)

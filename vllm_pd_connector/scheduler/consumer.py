"""The consumer side: requests whose prefill ran on another instance.

States of a request here, in the scheduler's thread:

    PENDING   known, its lease on the prefill side is being renewed, nothing allocated yet
    LOADING   blocks allocated, the workers were told to read; vLLM waits for every rank's report

A request leaves PENDING without loading when its prompt is already cached here or when it is aborted; its lease is
then released at once, or its prefill declined as soon as it is known where that runs. It leaves LOADING when vLLM has
every rank's report, also when it was aborted meanwhile. A request with refused parameters takes the same way with an
error in place of the remote, because a report from the workers is the only way in which vLLM fails one request.
Whoever untrusted parameters name is not spoken to.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import computes_itself, owned_blocks, prompt_digest, transfer_params
from vllm_pd_connector.compat.caches import prefill_backoff
from vllm_pd_connector.compat.states import state_groups
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.answer import require_signature
from vllm_pd_connector.protocol.bootstrap import Place, parse_bootstrap_address
from vllm_pd_connector.protocol.params import (
    RemoteBootstrap,
    RemotePrefill,
    is_answer,
    names_bootstrap,
    pairing_name,
    parse_remote_bootstrap,
    parse_remote_prefill,
    parse_remote_push,
)
from vllm_pd_connector.protocol.peer import PeerKey
from vllm_pd_connector.protocol.push_messages import Home, PrefillRef
from vllm_pd_connector.scheduler.keeper import LeaseKeeper
from vllm_pd_connector.sidechannel.bootstrap import Directory
from vllm_pd_connector.sidechannel.keys import keys_of, require_known_server
from vllm_pd_connector.sidechannel.sockets import endpoint
from vllm_pd_connector.steps import GroupBlocks, PushTerms, ReceiveOrder

if TYPE_CHECKING:
    from vllm_pd_connector.compat.types import KVCacheBlock, KVCacheBlocks, KVCacheConfig, Request, VllmConfig

logger = init_logger(__name__)


@dataclass(slots=True)
class _Receive:
    remote: RemotePrefill | None
    push: PushTerms | None = None
    num_tokens: int = 0
    error: str = ""
    found: Future[Place] | None = None  # until it is known where the prefill runs
    loading: bool = False
    blocks: list[KVCacheBlock] = field(default_factory=list)


class Consumer:
    """Requests that read their prompt's caches from a prefill instance."""

    def __init__(self, config: Config, vllm_config: VllmConfig, kv_cache_config: KVCacheConfig):
        self.home: Home | None = None
        self._config = config
        self._groups = tuple(kv_cache_config.transfer_group_ids)
        self._receives: dict[str, _Receive] = {}
        self._orders: list[ReceiveOrder] = []
        self._aborts: list[str] = []
        self._keys = keys_of(config)
        self._secret = config.secret()
        self._allow_unauthenticated = config.allow_unauthenticated_peers
        self._keeper = LeaseKeeper(self._keys, config.kv_lease_duration)
        self._directory = Directory(config.handshake_timeout)
        self._states = state_groups(kv_cache_config)
        self._backoff = prefill_backoff(vllm_config, kv_cache_config)

    def add(self, request: Request) -> None:
        """A request with remote prefill arrived; keep its lease alive while it queues."""
        params = transfer_params(request)
        try:
            if names_bootstrap(params):
                self._look_up(request, parse_remote_bootstrap(params))
                return
            if self._config.pushes and not is_answer(params):
                named = parse_remote_push(params)
                place = Place(named.remote_host, named.remote_port)
                push = self._concurrent(request, named.remote_engine_id, place)
                self._receives[request.request_id] = _Receive(
                    None, push, num_tokens=request.num_prompt_tokens - self._backoff
                )
                address = endpoint(place.host, place.port)
                self._keeper.keep_prefill(request.request_id, lambda: address, push.prefill)
                return
            remote = parse_remote_prefill(params)
            self._check(request, remote)
        except ProtocolError as error:
            self.refuse(request, str(error))
            return
        terms = self._serial(remote) if self._config.pushes else None
        self._receives[request.request_id] = _Receive(remote, terms, num_tokens=remote.remote_num_tokens)
        self._keeper.keep(remote)

    def _serial(self, remote: RemotePrefill) -> PushTerms:
        """Whom to ask for a prefill that has finished."""
        assert self.home is not None
        prefill = PrefillRef(remote.lease.request_id, remote.lease.nonce)
        return PushTerms(remote.peer, remote.remote_engine_id, prefill, self.home, remote.pd_connector.prompt_digest)

    def _look_up(self, request: Request, remote: RemoteBootstrap) -> None:
        """Find the prefill instance by its bootstrap address; the request waits for the answer before it allocates.

        Raises:
            ProtocolError: this instance pulls, the parameters cannot be trusted, or the address is none.
        """
        bootstrap = parse_bootstrap_address(remote.remote_bootstrap_addr)
        self._require_concurrent(bootstrap.host)
        found = self._directory.find(bootstrap, remote.remote_engine_id)
        if not self._config.pushes:
            self._decline_found(request, found)
            raise ProtocolError(
                "kv_transfer_params: remote_bootstrap_addr: the router sends both legs at once, which a pull cannot "
                "serve: set mode to push on both sides"
            )
        tokens = request.num_prompt_tokens - self._backoff
        self._receives[request.request_id] = _Receive(None, num_tokens=tokens, found=found)
        self._keeper.keep_prefill(request.request_id, lambda: self._address(found), _named(request))

    def _address(self, found: Future[Place]) -> str | None:
        """Of a prefill instance that was looked up: None if it is not known yet, nowhere, or a stranger, who is told
        nothing. Callable from any thread."""
        if not found.done() or found.exception() is not None:
            return None
        place = found.result()
        try:
            self._require_concurrent(place.host)
        except ProtocolError:
            return None
        return endpoint(place.host, place.port)

    def _decline_found(self, request: Request, found: Future[Place]) -> None:
        """Tell the prefill side that nothing is needed, once it is known where it is."""
        prefill = _named(request)

        def decline(found: Future[Place]) -> None:  # in the thread that found it
            if (address := self._address(found)) is not None:
                self._keeper.decline(address, prefill)

        found.add_done_callback(decline)

    def _found(self, request: Request, receive: _Receive) -> bool:
        """Whether it is known where the request's prefill instance is, or that it is nowhere."""
        if receive.found is None:
            return True
        if not receive.found.done():
            return False
        found, receive.found = receive.found, None
        try:
            remote = parse_remote_bootstrap(transfer_params(request))
            receive.push = self._concurrent(request, remote.remote_engine_id, found.result())
        except ProtocolError as error:
            logger.error("request %s: kv_transfer_params refused: %s", request.request_id, error)
            receive.error = str(error)
        return True

    def _require_concurrent(self, host: str) -> None:
        """Refuse what a concurrent router cannot do: have parameters signed, or name a key.

        Raises:
            ProtocolError: a secret or keys are configured, or the host is a stranger.
        """
        if self._secret is not None:
            raise ProtocolError(
                "kv_transfer_params: a concurrent hand-off is not signed by the prefill instance, and params_secret is "
                "set here: use a router that waits for the prefill's answer"
            )
        require_known_server(host, None, self._keys, self._allow_unauthenticated)

    def _concurrent(self, request: Request, engine_id: str, place: Place) -> PushTerms:
        """Whom to ask for a prefill that the router sends at the same time.

        Raises:
            ProtocolError: the parameters would have to be signed or name a key, which a concurrent router cannot do.
        """
        assert self.home is not None
        self._require_concurrent(place.host)
        digest = prompt_digest(request, max(request.num_prompt_tokens - self._backoff, 0))
        return PushTerms(PeerKey(place.host, place.port, ""), engine_id, _named(request), self.home, digest)

    def _check(self, request: Request, remote: RemotePrefill) -> None:
        """Parameters that a stranger made, that name a prefill instance of a stranger, that fit another prompt or
        another number of groups are refused here, before any traffic."""
        require_signature(remote, self._secret)
        require_known_server(
            remote.remote_host, remote.pd_connector.server_key, self._keys, self._allow_unauthenticated
        )
        if len(remote.remote_block_ids) != len(self._groups):
            raise ProtocolError(
                f"remote_block_ids has {len(remote.remote_block_ids)} KV-cache groups, this instance transfers "
                f"{len(self._groups)}: serve the same model with the same cache flags on both sides"
            )
        most = request.num_prompt_tokens - self._backoff
        if self._backoff and remote.remote_num_tokens > most > 0 and not computes_itself(request):
            raise ProtocolError(
                f"remote_num_tokens: {remote.remote_num_tokens} there, at most {most} here: this model's decode "
                f"computes the last {self._backoff} prompt token(s); run the same release on the prefill instance"
            )
        digest = prompt_digest(request, remote.remote_num_tokens)
        if remote.remote_num_tokens > request.num_prompt_tokens or digest != remote.pd_connector.prompt_digest:
            raise ProtocolError(
                f"the prefilled prompt ({remote.remote_num_tokens} tokens, digest {remote.pd_connector.prompt_digest}) "
                f"is not this request's ({request.num_prompt_tokens} tokens, digest {digest}): send the decode request "
                "with the same prompt and the kv_transfer_params that its own prefill returned"
            )

    def refuse(self, request: Request, reason: str) -> None:
        """Remember that the request must fail, and why."""
        logger.error("request %s: kv_transfer_params refused: %s", request.request_id, reason)
        self._receives[request.request_id] = _Receive(None, error=reason)

    def num_remote_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens to load beyond the local prefix hit, None if that is not known yet; vLLM may ask again.

        vLLM computes the last prompt token itself whatever is cached, so no hit of its own includes it: one of all
        tokens before it is a full hit, for which nothing is loaded.
        """
        receive = self._receives.get(request.request_id)
        if receive is None or receive.loading:
            return 0
        if not self._found(request, receive):
            return None
        if receive.error:
            return int(max(request.num_prompt_tokens - num_computed_tokens, 0))
        if request.num_prompt_tokens <= self._backoff:
            return 0  # all of it is ours to compute
        if num_computed_tokens >= request.num_prompt_tokens - 1:
            return 0
        return max(receive.num_tokens - num_computed_tokens, 0)

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM allocated blocks. Called again when the loaded request is scheduled (with nothing external)."""
        receive = self._receives.get(request.request_id)
        if receive is None or receive.loading:
            return
        if num_external_tokens == 0:
            if receive.found is not None:  # vLLM does not wait for it: it computes this prompt itself in any case
                self._decline_found(request, receive.found)
            self._forget(request.request_id, release=True)
            return
        receive.loading = True
        receive.blocks = owned_blocks(blocks, self._groups)
        stop = num_external_tokens if receive.error else receive.num_tokens
        ids = blocks.get_block_ids()
        self._orders.append(
            ReceiveOrder(
                request_id=request.request_id,
                remote=receive.remote,
                error=receive.error,
                blocks=tuple(self._table(i, ids[group], stop) for i, group in enumerate(self._groups)),
                start=stop - num_external_tokens,
                stop=stop,
                push=receive.push,
                either=self._config.mode == "auto" and receive.remote is not None,
            )
        )

    def _table(self, group: int, ids: list[int], stop: int) -> GroupBlocks:
        state = self._states.get(group)
        return GroupBlocks(0, tuple(ids) if state is None else (state.state_block(ids, stop),))

    def finished(self, request: Request) -> None:
        """The request ended: normally, or aborted in any state."""
        receive = self._receives.get(request.request_id)
        if receive is None:
            return
        if receive.found is not None:
            self._decline_found(request, receive.found)
        if receive.loading:
            self._aborts.append(request.request_id)
        else:
            self._forget(request.request_id, release=True)

    def received(self, request_id: str) -> None:
        """Every rank reported; the workers have told the prefill side."""
        self._forget(request_id, release=False)

    def blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        """The blocks that a loading request's reads may write."""
        receive = self._receives.get(request_id)
        return receive.blocks if receive is not None else []

    def take(self) -> tuple[list[ReceiveOrder], list[str]]:
        """What the workers must begin and what they must give up."""
        orders, aborts = self._orders, self._aborts
        if orders or aborts:
            self._orders, self._aborts = [], []
        return orders, aborts

    def _forget(self, request_id: str, *, release: bool) -> None:
        receive = self._receives.pop(request_id, None)
        if receive is None:
            return
        if receive.remote is not None:
            self._keeper.drop(receive.remote, release=release)
            return
        self._keeper.drop_prefill(request_id)
        if receive.push is not None and release:
            peer = receive.push.peer
            self._keeper.decline(endpoint(peer.host, peer.port), receive.push.prefill)

    def close(self) -> None:
        self._directory.close()
        self._keeper.close()


def _named(request: Request) -> PrefillRef:
    """The prefill of a request whose two legs a router sends at once: by the name that both carry."""
    return PrefillRef(pairing_name(transfer_params(request), request.request_id), None)

"""The consumer side: requests whose prefill ran on another instance, and prefills whose beginning lies on one.

States of a request here, in the scheduler's thread:

    PENDING   known, its lease on the prefill side is being renewed, nothing allocated yet
    LOADING   blocks allocated, the workers were told to read; vLLM waits for every rank's report

A request leaves PENDING without loading when its prompt is already cached here or when it is aborted; its lease is
then released at once, or its prefill declined as soon as it is known where that runs. So it is, without PENDING, where
the prefill is this instance's own (kv_both): no worker could read from itself; and where what it brings was had
before. It leaves LOADING when vLLM has every rank's report, also when it was aborted meanwhile. A request with refused
parameters takes the same way without a source, because a report from the workers is the only way in which vLLM fails
one request. Whoever untrusted parameters name (`sources`) is not spoken to.

A prefill that goes on with a conversation (`turn`) can always be computed. It waits until the decode instance has said
that what it holds is there still; whatever stands against reading it is said in the log, and the prefill goes on
without, also where vLLM's policy is to fail what could not be loaded.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import finished_normally, owned_blocks, transfer_params, was_refused
from vllm_pd_connector.compat.model.caches import group_block_tokens
from vllm_pd_connector.compat.model.recurrent import state_groups
from vllm_pd_connector.errors import OtherWeights, ProtocolError, UnauthenticatedPeer, Withdrawn
from vllm_pd_connector.metadata import BadParameters, PushFrom
from vllm_pd_connector.observability.stats import ComputedHere
from vllm_pd_connector.protocol.params.bootstrap import HostPort
from vllm_pd_connector.protocol.params.parse import (
    RemoteBootstrap,
    RemotePrefill,
    RemotePush,
    is_answer,
    later_of_batch,
    later_round,
    names_bootstrap,
    parse_remote_bootstrap,
    parse_remote_push,
)
from vllm_pd_connector.scheduler.bootstrap import Searches
from vllm_pd_connector.scheduler.conversations.turns import Turns
from vllm_pd_connector.scheduler.leases.lease_renewer import LeaseRenewer
from vllm_pd_connector.scheduler.pending import REMEMBER, Computed, Receive, Used, reading_of, start_of, to_fill
from vllm_pd_connector.scheduler.sources import Sources, named
from vllm_pd_connector.sidechannel.net.keys import keys_of
from vllm_pd_connector.sidechannel.net.sockets import endpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable

    from vllm_pd_connector.compat.types import KVCacheBlock, KVCacheBlocks, KVCacheConfig, Request, VllmConfig
    from vllm_pd_connector.config import Config
    from vllm_pd_connector.metadata import ReceiveRequest
    from vllm_pd_connector.protocol.wire.fields import LeaseRef
    from vllm_pd_connector.protocol.wire.push_messages import PrefillRef
    from vllm_pd_connector.scheduler.epochs import Epochs

logger = init_logger(__name__)


class Consumer:
    """Requests that read their prompt's caches from a prefill instance. `wake` tells that a step may find out more."""

    def __init__(
        self,
        config: Config,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        epochs: Epochs,
        wake: Callable[[], None],
    ):
        self.sources = Sources(config, vllm_config, kv_cache_config, epochs.adapters)
        self._own, self._pushes = epochs.own, config.pushes
        self._arrived: set[str] = set()  # received, and not scheduled since
        self._groups = tuple(kv_cache_config.transfer_group_ids)
        dcp_size = vllm_config.parallel_config.decode_context_parallel_size
        self._block_tokens = group_block_tokens(kv_cache_config, dcp_size)
        self._receives: dict[str, Receive] = {}
        self._orders: list[ReceiveRequest] = []
        self._aborts: list[str] = []
        self._ended: Bounded[str, None] = Bounded(REMEMBER)
        self._renewer = LeaseRenewer(keys_of(config), config.kv_lease_duration)
        self.turns = Turns(self.sources, self._renewer, epochs.own, wake)
        self._searches = Searches(config.handshake_timeout, self.sources, self._renewer, wake)
        self.states = state_groups(kv_cache_config)
        self._known: Bounded[LeaseRef | PrefillRef, None] = Bounded(REMEMBER)  # what requests came for
        self._named: dict[str, PrefillRef] = {}  # of requests whose two legs came at once
        self._used, self.computed = Used(), Computed(self.sources.prefills)

    def add(self, request: Request) -> None:
        """A request with remote prefill arrived; keep its lease alive while it queues."""
        params = transfer_params(request)
        try:
            if was_refused(request) or not self.sources.loads:
                self._give_back(request)
                self.sources.require_role()
                return
            if later_round(request.request_id):  # the first may have been another engine's of this instance
                return self.computed.here(request, ComputedHere.USED)
            if names_bootstrap(params):
                return self._look_up(request, parse_remote_bootstrap(params))
            if self._pushes and not is_answer(params):
                return self._keep_prefill(request, parse_remote_push(params))
            self._keep(request, self.sources.answer(request))
        except ProtocolError as error:
            self.refuse(request, error)

    def _keep_prefill(self, request: Request, told: RemotePush) -> None:
        """The prefill may have yet to come: the router sends both legs at once.

        Raises:
            ProtocolError: the parameters cannot be trusted.
        """
        place = HostPort(told.remote_host, told.remote_port)
        address, prefill = endpoint(place.host, place.port), named(request)
        try:
            push = self.sources.concurrent(request, told.remote_engine_id, place)
        except ProtocolError as error:
            if not isinstance(error, UnauthenticatedPeer):
                self._renewer.decline(address, prefill, time.monotonic())
            raise
        self._known[prefill], self._named[request.request_id] = None, prefill
        if self.sources.are_here(push.engine_id):
            self._renewer.decline(address, push.prefill, time.monotonic())
            return self.computed.here(request, ComputedHere.OWN)
        self._receives[request.request_id] = Receive(push, self.sources.prefilled_tokens(request))
        self._renewer.keep_prefill(request.request_id, lambda: address, push.prefill)

    def _keep(self, request: Request, remote: RemotePrefill) -> None:
        """The prefill has finished, and is held under a lease.

        Raises:
            ProtocolError: the answer is for another prompt or model.
        """
        address, reading = reading_of(remote, request)
        self._known[remote.lease] = None
        needless = ComputedHere.BATCH if later_of_batch(request.request_id) else None
        if needless is None and self.sources.are_here(remote.remote_engine_id):
            self._renewer.drop(address, reading, release=True)
            self.sources.require_own(remote)
            needless = ComputedHere.OWN
        elif not (needless or reading.shared) and self._used.up(remote.lease, self._receives.values()):
            needless = ComputedHere.USED  # of several choices one may come late, and is waited for
        if needless is not None:
            return self.computed.here(request, needless)
        try:
            self.sources.require_fit(request, remote)
        except ProtocolError:
            self._renewer.drop(address, reading, release=True)
            raise
        source = self.sources.finished(remote, shared=reading.shared)
        ours, count = remote.pd_connector, remote.remote_num_tokens
        self._receives[request.request_id] = Receive(source, count, address, reading, weights=ours.weights)
        self._renewer.keep(address, reading, ours.lease_seconds)

    def turn(self, request: Request) -> None:
        """A prefill arrived whose parameters say that a decode instance holds the beginning of its conversation."""
        if (receive := self.turns.begin(request)) is not None:
            self._receives[request.request_id] = receive

    def lost(self, request_id: str, why: str) -> None:
        """A request goes on without what it came for: nothing that has come of it is used."""
        if (receive := self._receives.get(request_id)) is not None and not receive.ended:
            self.turns.lost(receive, why)

    def _give_back(self, refused: Request) -> None:
        """vLLM's API server refused a request, or tells that one failed, or it is none for this instance: what its
        prefill holds is not needed. Of requests that came this far the prefill side has heard, as of those told twice.

        Raises:
            ProtocolError: parameters that are none, or of an unauthenticated peer, who is told nothing.
        """
        params = transfer_params(refused)
        if is_answer(params):
            remote = self.sources.answer(refused)
            if remote.lease in self._known:
                return
            prefill, self._known[remote.lease] = remote.remote_request_id, None
            self._renewer.drop(*reading_of(remote, refused), release=True)
        else:
            ref = named(refused)
            if self._known.pop(ref, False) is None:  # a name may be used again
                return
            prefill = ref.name
            if names_bootstrap(params):
                self._searches.decline(ref, self._searches.find(parse_remote_bootstrap(params)), time.monotonic())
            else:
                push = parse_remote_push(params)
                self.sources.require_concurrent(push.remote_host)
                self._renewer.decline(endpoint(push.remote_host, push.remote_port), ref, time.monotonic())
        logger.info("request %s: its decode request was refused or could not end: its prefill is given back", prefill)

    def _look_up(self, request: Request, remote: RemoteBootstrap) -> None:
        """Find the prefill instance by its bootstrap address; the request waits for the answer before it allocates.

        Raises:
            ProtocolError: this instance pulls, the parameters cannot be trusted, or the address is none.
        """
        found, prefill = self._searches.find(remote), named(request)
        self._known[prefill], self._named[request.request_id] = None, prefill
        if not self._pushes:
            self._searches.decline(prefill, found, time.monotonic())
            raise ProtocolError(
                "kv_transfer_params: remote_bootstrap_addr: the router sends both legs at once, which a pull cannot "
                "serve: set mode to push on both sides"
            )
        if self.sources.are_here(remote.remote_engine_id):
            self._searches.decline(prefill, found, time.monotonic())
            return self.computed.here(request, ComputedHere.OWN)
        self._receives[request.request_id] = Receive(None, self.sources.prefilled_tokens(request), found=found)
        self._renewer.keep_prefill(request.request_id, lambda: self._searches.address(found), prefill)

    def refuse(self, request: Request, reason: ProtocolError) -> None:
        """Remember that the request must fail, and why."""
        if was_refused(request):  # it has failed, and why was said then
            logger.debug("request %s: nothing is given back: %s", request.request_id, reason)
            return
        logger.error("request %s: kv_transfer_params refused: %s", request.request_id, reason)
        self._receives[request.request_id] = Receive(BadParameters.of(reason))

    def num_remote_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Tokens to load beyond the local prefix hit, 0 of what must fail (`refuses`); None if that is not known yet.

        vLLM computes the last prompt token itself whatever is cached, so no hit of its own includes it: one of all
        tokens before it is a full hit, for which nothing is loaded.
        """
        if (receive := self._receives.get(request.request_id)) is None or receive.loading:
            return 0
        if not self._searches.settled(request, receive):
            return None
        if receive.turn is not None:
            if may := self.turns.may_read(receive):
                return max(receive.num_tokens - num_computed_tokens, 0)
            if may is not None:
                self._forget(request.request_id, release=True)
            return None if may is None else 0
        if receive.fails:
            return 0
        if self.sources.prefilled_tokens(request) <= 0 or num_computed_tokens >= request.num_prompt_tokens - 1:
            return 0  # what is left is ours to compute
        count = max(receive.num_tokens - num_computed_tokens, 0)
        if count and (reason := receive.stale or self._own.unlike(receive.weights or self._own.now)):
            self._forget(request.request_id, release=True)
            self.refuse(request, (Withdrawn if receive.stale else OtherWeights)(reason))
            return 0
        return count

    def refuses(self, request_id: str) -> bool:
        """Whether a request must fail and does not wait for that yet."""
        return (receive := self._receives.get(request_id)) is not None and receive.fails

    def allocated(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """vLLM allocated blocks. Called again when the loaded request is scheduled (with nothing external)."""
        self._arrived.discard(request.request_id)
        if (receive := self._receives.get(request.request_id)) is None or receive.loading:
            return
        if num_external_tokens == 0:  # also where vLLM computes a prompt in any case: it waits for no answer then
            self._used.add(receive)
            return self._drop(request, receive)
        if isinstance(receive.source, BadParameters):
            return self._orders.append(receive.failing_order(request.request_id, num_external_tokens))
        assert receive.source is not None
        receive.blocks = owned_blocks(blocks, self._groups)
        stop, hit = receive.num_tokens, receive.num_tokens - num_external_tokens
        tables = tuple(
            to_fill(blocks.blocks[group], hit, stop, self._block_tokens[i], self.states.get(i))
            for i, group in enumerate(self._groups)
        )
        start, source = start_of(tables, hit, self._block_tokens, self.states), self.sources.from_here(receive.source)
        self._orders.append(receive.order(request, source, tables, start, self._own.now))
        if receive.turn is not None:
            self.turns.counted += Counter(turns_read=1, turn_tokens=num_external_tokens)

    def cannot_load(self, request: Request, reason: ProtocolError) -> None:
        """A defect of ours met a request that has no blocks yet: it fails as for bad parameters; a turn is computed."""
        if (receive := self._receives.get(request.request_id)) is not None:
            self.turns.lost(receive, str(reason))
            self._drop(request, receive)
            if receive.turn is None:
                self.refuse(request, reason)

    def cannot_begin(self, request: Request, num_external_tokens: int, reason: ProtocolError) -> None:
        """A defect of ours met a request when it got blocks. If vLLM waits for tokens, only the workers' report ends
        that: then it fails as by bad parameters, or, a turn, is computed."""
        name = request.request_id
        receive = self._receives.get(name) or Receive(None)
        if num_external_tokens or not receive.loading:
            self._drop(request, receive)
        if num_external_tokens:
            self._orders = [order for order in self._orders if order.request_id != name]
            receive.source, receive.reading, receive.found = BadParameters.of(reason), None, None
            self._receives[name] = receive
            self._orders.append(receive.failing_order(name, num_external_tokens))

    def finished(self, request: Request) -> None:
        """The request ended: normally, or aborted in any state."""
        self._arrived.discard(request.request_id)
        if (prefill := self._named.pop(request.request_id, None)) is not None and finished_normally(request):
            self._known.pop(prefill, None)  # no stand-in comes for it, and the name may be used again
        if (receive := self._receives.get(request.request_id)) is None:
            return
        if receive.loading:
            self._aborts.append(request.request_id)
            receive.ended, self._ended[request.request_id] = True, None
        else:
            self._drop(request, receive)

    def ended_while_loading(self, request_ids: Iterable[str]) -> set[str]:
        """Which of these requests ended before their receives did; each is told once, a name may be used again."""
        return {request_id for request_id in request_ids if self._ended.pop(request_id, False) is None}

    def received(self, request_id: str, *, failed: bool = False) -> bool:
        """Every rank reported. The workers have told the prefill side of what is good; of what failed under a
        lease not all may have asked there, or been understood. Returns whether what came is of use."""
        receive = self._receives.get(request_id)
        self._forget(request_id, release=failed and bool(receive and receive.reading))
        self._used.add(None if failed else receive)
        self._aborts = [name for name in self._aborts if name != request_id]  # the name may be another's by then
        if receive is None or receive.ended:
            return True
        self._arrived.add(request_id)  # also of no use: its blocks are given back when vLLM looks at it
        return not receive.outdated

    def outdate(self, reason: str, among: Collection[str] | None = None) -> set[str]:
        """The weights are others from now on: what is loading is given up. If those of these requests alone are, an
        adapter's, no name says it of what they wait for: it is not loaded. Returns the requests whose caches have come
        and that have not gone on with them."""
        for request_id, receive in self._receives.items():
            if among is not None and request_id not in among:
                continue
            receive.stale = receive.stale if among is None else reason
            over = receive.outdated or receive.ended or isinstance(receive.source, BadParameters)
            if receive.loading and not over:
                receive.outdated = True
                self._aborts.append(request_id)
                logger.error("request %s: its load is given up: %s", request_id, reason)
        return self.take_arrived(among)

    def take_arrived(self, among: Collection[str] | None = None) -> set[str]:
        """Requests whose caches have come and that were not scheduled since; the caller has them computed here."""
        arrived = self._arrived if among is None else self._arrived.intersection(among)
        self._arrived = self._arrived - arrived
        return arrived

    def num_loading(self, request_id: str) -> int:
        """Tokens that a loading request has when all has come; 0 if it does not load."""
        return receive.num_tokens if (receive := self._receives.get(request_id)) and receive.loading else 0

    def blocks_of(self, request_id: str) -> list[KVCacheBlock]:
        """The blocks that a loading request's reads may write."""
        return receive.blocks if (receive := self._receives.get(request_id)) is not None else []

    @property
    def waiting(self) -> set[str]:
        """Requests that load, and those of which it is not known yet what they load."""
        return {name for name, receive in self._receives.items() if receive.loading or receive.asks}

    def loads(self, request_id: str, attempt: bytes = b"") -> bool:
        """Whether vLLM waits until every rank has reported of this request('s attempt). Callable from any thread."""
        receive = self._receives.get(request_id)
        return receive is not None and receive.loading and attempt in (b"", receive.attempt)

    def take(self, but: Collection[str] = ()) -> tuple[list[ReceiveRequest], list[str]]:
        """What the workers must begin and what they must give up; what is of these names comes later."""
        if not (self._orders or self._aborts):  # as in most steps
            return [], []
        orders, aborts = self._orders, self._aborts
        self._orders = [order for order in orders if order.request_id in but]
        self._aborts = [name for name in aborts if name in but]
        return [o for o in orders if o.request_id not in but], [name for name in aborts if name not in but]

    def _drop(self, request: Request, receive: Receive) -> None:
        """A request needs nothing any more of what it waits for. Raises nothing: it goes on, or has ended."""
        try:
            self._forget(request.request_id, release=True)
            if receive.found is not None:
                self._searches.decline(named(request), receive.found, receive.began)
        except Exception:
            logger.exception("request %s: what it came for cannot be given back", request.request_id)

    def _forget(self, request_id: str, *, release: bool) -> None:
        receive = self._receives.pop(request_id, None)
        if receive is None:
            return
        if receive.reading is not None:
            return self._renewer.drop(receive.address, receive.reading, release=release)
        self._renewer.drop_prefill(request_id)
        if isinstance(receive.source, PushFrom) and release:
            peer = receive.source.peer
            self._renewer.decline(endpoint(peer.host, peer.port), receive.source.prefill, receive.began)

    def close(self) -> None:
        self._searches.close()
        self._renewer.close()

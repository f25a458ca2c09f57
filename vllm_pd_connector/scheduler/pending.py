"""A request of this instance that gets caches from another one, from its arrival to its last report."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import first_lacking, trace_headers
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.metadata import BadParameters, ReceiveRequest, draw_attempt
from vllm_pd_connector.observability.stats import ComputedHere
from vllm_pd_connector.protocol.params.parse import RemotePrefill, choice_of
from vllm_pd_connector.protocol.wire.fields import LeaseRef, Reading
from vllm_pd_connector.sidechannel.net.sockets import endpoint

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Sequence
    from concurrent.futures import Future

    from vllm_pd_connector.compat.model.recurrent import StateGroup
    from vllm_pd_connector.compat.types import KVCacheBlock, Request
    from vllm_pd_connector.metadata import Source
    from vllm_pd_connector.protocol.params.bootstrap import HostPort
    from vllm_pd_connector.protocol.wire.fields import Weights

logger = init_logger(__name__)

REMEMBER = 4096
_NOT_LOADED = {
    ComputedHere.OWN: "its prefill is this instance's own",
    ComputedHere.BATCH: "its completion has several prompts, and the router knows the prefill of the first alone",
    ComputedHere.USED: "an earlier request has had what it brings, as between the tool calls of a response",
}


@dataclass(slots=True)
class Receive:
    """See the module; its states are those of `consumer`."""

    source: Source | None  # None until it is known where the prefill runs
    num_tokens: int = 0
    address: str = ""  # of the instance whose lease is kept
    reading: Reading | None = None  # the request's use of that lease
    found: Future[HostPort] | None = None  # until it is known where the prefill runs
    turn: Request | None = None  # a prefill that goes on with a conversation
    answers: list[object] = field(default_factory=list)  # what was said of a turn and not looked at
    asked: bool = False  # a turn whose decode instance has said that it holds what is to be read
    loading: bool = False
    attempt: bytes = b""  # to load, by which it is told from another request of this name
    weights: Weights | None = None  # that its prefill was computed with; None while only the prefill side knows
    ended: bool = False  # its request has, while it loads
    outdated: bool = False  # what comes is of no use any more
    stale: str = ""  # why what it waits for is of no use any more
    began: float = field(default_factory=time.monotonic)
    asked_at: float = field(default_factory=time.monotonic)  # when a turn's latest question went out
    blocks: list[KVCacheBlock] = field(default_factory=list)

    @property
    def lease(self) -> LeaseRef | None:
        """Which it uses; None where no lease is known."""
        return None if self.reading is None else LeaseRef(self.reading.request_id, self.reading.nonce)

    @property
    def asks(self) -> bool:
        """Whether somebody was asked what it loads, and has not answered. With an answer that vLLM has not come for it
        waits for something else, as for its grammar."""
        if self.found is not None:
            return not self.found.done()
        return self.turn is not None and not self.asked and not self.answers

    @property
    def fails(self) -> bool:
        """Whether it must, and vLLM does not wait for that yet."""
        return isinstance(self.source, BadParameters) and not self.loading

    def order(
        self, request: Request, source: Source, tables: tuple[BlockTable, ...], start: int, weights: Weights
    ) -> ReceiveRequest:
        """It loads from now on: what the workers do for it. `start` and `weights` are those of `ReceiveRequest`."""
        self._begin()
        return ReceiveRequest(
            request_id=request.request_id,
            source=source,
            blocks=tables,
            start=start,
            stop=self.num_tokens,
            attempt=self.attempt,
            shared=self.reading is not None and self.reading.shared,
            waited_s=time.monotonic() - self.began,
            weights=weights,
            same_weights=self.weights is not None and bool(self.weights.epoch or weights.epoch),
            spare=self.turn is not None,
            trace=trace_headers(request),
        )

    def failing_order(self, request_id: str, num_tokens: int) -> ReceiveRequest:
        """The same where vLLM waits for so many tokens which nobody brings: the workers say so."""
        assert self.source is not None
        self._begin()
        spare = self.turn is not None
        return ReceiveRequest(request_id, self.source, (), 0, num_tokens, self.attempt, spare=spare)

    def _begin(self) -> None:
        self.loading = True
        self.attempt = self.reading.attempt if self.reading is not None else draw_attempt()


class Used:
    """Leases that have ended with a use of them here: what they bring was received, or needless. The newest of them."""

    def __init__(self) -> None:
        self._leases: Bounded[LeaseRef, None] = Bounded(REMEMBER)

    def add(self, receive: Receive | None) -> None:
        """A use is over."""
        if receive is not None and receive.lease is not None:
            self._leases[receive.lease] = None

    def up(self, lease: LeaseRef, going: Iterable[Receive]) -> bool:
        """Whether nobody needs to ask for a lease: it was used, and none of those that are `going` on keeps it."""
        return lease in self._leases and all(receive.lease != lease for receive in going)


def reading_of(remote: RemotePrefill, request: Request) -> tuple[str, Reading]:
    """Where a lease is held, and a request's use of it."""
    lease, address = remote.lease, endpoint(remote.remote_host, remote.remote_port, remote.pd_connector.server_key)
    return address, Reading(lease.request_id, lease.nonce, draw_attempt(), bool(choice_of(request.request_id)))


class Computed:
    """Requests that bring good parameters, and for which nothing is loaded: vLLM computes what its prefix cache lacks.
    `counted` since somebody took them."""

    def __init__(self, prefills: bool) -> None:
        self._prefills = prefills
        self.counted: Counter[ComputedHere] = Counter()

    def here(self, request: Request, reason: ComputedHere) -> None:
        """Load nothing for a request.

        Raises:
            ProtocolError: its prefill is said to be this instance's own, which makes none.
        """
        if reason is ComputedHere.OWN and not self._prefills:
            raise ProtocolError(
                "remote_engine_id: it is this instance's own engine_id, and kv_role is kv_consumer here, which makes "
                "no prefills: two instances have one engine_id in their --kv-transfer-config; give each its own"
            )
        self.counted[reason] += 1
        why, name = _NOT_LOADED[reason], request.request_id
        logger.info("request %s: %s: nothing is loaded, what the prefix cache lacks is computed", name, why)


def to_fill(
    blocks: Sequence[KVCacheBlock], hit: int, stop: int, block_tokens: int, state: StateGroup | None
) -> BlockTable:
    """The blocks of a group that are to be filled with the tokens up to `stop`, of which the first `hit` were found;
    of states that of `stop`."""
    if state is not None:
        return BlockTable.of(0, (state.state_block([block.block_id for block in blocks], stop),))
    first = first_lacking(blocks, hit // block_tokens)
    return BlockTable.of(first, [block.block_id for block in blocks[first:]])


def start_of(tables: Iterable[BlockTable], hit: int, block_tokens: Sequence[int], states: Container[int]) -> int:
    """Where the range of a request begins: behind the prefix hit, or before, where a group lacks a part of that."""
    lacking = (table.first_block * block_tokens[i] for i, table in enumerate(tables) if i not in states)
    return min((hit, *lacking))

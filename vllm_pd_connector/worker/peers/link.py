"""Another instance as this worker is linked to it: the peer's state machine, the plan, the connected ranks.

Everything about a peer is in this one object. The handshake is `connect`: decode the manifests, check the pair, plan,
and only then touch the transport, for the ranks that the plan reads from; a refusal leaves no trace in the transport.
This is the link of a decode worker that reads; `push.link` has those of a pushing pair.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vllm_pd_connector.errors import IncompatiblePeer, PDConnectorError
from vllm_pd_connector.geometry.bind import Tail, first_valid_tokens, latest, pair, runs_of
from vllm_pd_connector.geometry.manifest import LivenessAddress, Manifest, Rank, Segment
from vllm_pd_connector.geometry.plan import Edge, Plan, make_plan
from vllm_pd_connector.geometry.staging.chunks import Chunk, chunks, split
from vllm_pd_connector.geometry.topology import TopologyCheck, check_pd_topology

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_pd_connector.geometry.runs import Runs
    from vllm_pd_connector.metadata import ReceiveRequest
    from vllm_pd_connector.protocol.peer import Peer
    from vllm_pd_connector.transport.base import Transport, TransportPeer
    from vllm_pd_connector.worker.peers.bandwidth_test import Bandwidth
    from vllm_pd_connector.worker.peers.process_watch import ProcessWatch, ProcessWatches

_decoder = msgspec.msgpack.Decoder(Manifest)


@dataclass(frozen=True, slots=True)
class Bound:
    """A request's reads per connected rank, straight or by way of the staging buffer, and the groups (of this side)
    whose first
    block in the window holds tokens only from a position on: `geometry.bind.first_valid_tokens`."""

    reads: list[tuple[TransportPeer, Runs | Iterator[Chunk]]]
    first_valid_tokens: dict[int, int]


@dataclass(eq=False, slots=True)
class Link:
    """See the module. `manifests` is the latest answer of the side channel, not yet trusted.

    `scratch` is memory of one connected rank for a self-test, `bandwidth` what the latest one found. `stalled` says
    what has not ended in time though it was started, empty if nothing. `watches` has every rank of the peer, since it
    was connected first, None for one that cannot be watched.
    """

    machine: Peer
    engine_id: str
    endpoint: str
    used_at: float
    manifests: Sequence[bytes] = ()
    plan: Plan | None = None
    ranks: dict[Rank, TransportPeer] = field(default_factory=dict)
    edges: tuple[tuple[Edge, Edge], ...] = ()
    chunk_bytes: int = 0
    scratch: tuple[TransportPeer, Segment] | None = None
    bandwidth: Bandwidth | None = None
    stalled: str = ""
    watches: dict[Rank, ProcessWatch | None] = field(default_factory=dict)
    _liveness: dict[Rank, LivenessAddress | None] = field(default_factory=dict)

    @property
    def connection(self) -> object:
        """The same object until the link is disconnected."""
        return self.ranks

    def connect(self, local: Manifest, transport: Transport, chunk_bytes: int = 0) -> str:
        """Check, plan, connect. Returns the verdict for the log.

        Args:
            chunk_bytes: what a staged transfer may take of the staging buffer at a time; 0 if there is no staging
                buffer.

        Raises:
            IncompatiblePeer: this pair can never work.
            TransferError: the transport did not connect.

        Whatever is raised, ranks may be connected: `disconnect` then.
        """
        remote, check = self._accept(local, local, "decode engine {} cannot read from prefill engine {}")
        plan = make_plan(local, remote)
        by_rank = {m.parallel.rank: m for m in remote}
        for edge in plan.edges:
            source = by_rank[edge.source]
            scratch = (source.scratch,) if source.scratch is not None else ()
            peer = self.ranks[edge.source] = transport.connect(source.endpoint, (*source.segments, *scratch))
            self.scratch = self.scratch or ((peer, *scratch) if scratch else None)
        self.plan, self.chunk_bytes = plan, chunk_bytes
        self.edges = tuple(split(edge, chunk_bytes) for edge in plan.edges)
        converted = sum(bool(staged.pairings) for _, staged in self.edges)
        return f"{check.status}, reads from {len(plan.edges)} of {len(remote)} ranks, converts from {converted}"

    def _accept(
        self, local: Manifest, ours: Manifest | Sequence[Manifest], cannot: str
    ) -> tuple[list[Manifest], TopologyCheck]:
        """The peer's manifests, if the pair is possible; no side effect.

        Raises:
            IncompatiblePeer: it is not; the text begins with `cannot`, filled with both engines.
        """
        remote = [decode(encoded) for encoded in self.manifests]
        self._require_identity(remote)
        check = check_pd_topology(ours, remote)
        if not check.allowed:
            here = f"{local.engine_id} rank {local.parallel.number}"
            reason = check.reason if not check.differences else ""
            raise IncompatiblePeer(
                f"{cannot.format(here, self.engine_id)}: {check.status}: {reason}", check.differences
            )
        self._liveness = {m.parallel.rank: m.life for m in remote}
        return remote, check

    def watch(self, processes: ProcessWatches, now: float) -> None:
        """Watch every rank that the manifests of the latest `connect` name."""
        self.watches = {
            rank: processes.watch(life, now) if life is not None else None for rank, life in self._liveness.items()
        }

    def watch_of(self, peer: TransportPeer) -> ProcessWatch | None:
        """The watch of a connected rank."""
        return next((self.watches.get(rank) for rank, connected in self.ranks.items() if connected is peer), None)

    def deserted(self, now: float) -> str:
        """Why nothing new may be begun on this link though nobody has said that it is cut; empty if it may."""
        return ""

    def _require_identity(self, remote: Sequence[Manifest]) -> None:
        for manifest in remote:
            if manifest.engine_id != self.engine_id:
                raise IncompatiblePeer(
                    f"engine {self.engine_id} serves a manifest of engine {manifest.engine_id}: two instances share "
                    "an address, or that instance is broken"
                )

    def disconnect(self, transport: Transport) -> None:
        for peer in self.ranks.values():
            transport.disconnect(peer)
        self.ranks = {}
        self.plan, self.scratch, self.stalled = None, None, ""
        self.edges = ()

    def bind(self, request: ReceiveRequest) -> Bound:
        """What must be read for a request; no reads when nothing is missing.

        Raises:
            BindError: the request's block ids do not fit the manifests.
        """
        assert self.plan is not None and request.read is not None
        source, destination = request.read.blocks, request.blocks
        reads: list[tuple[TransportPeer, Runs | Iterator[Chunk]]] = []
        late = []
        for edges in self.edges:
            peer = self.ranks[edges[0].source]
            # Slots after the last prompt token hold nothing yet, so a whole page may take the place of its tail.
            direct, staged = (
                pair(edge, source, destination, request.start, request.stop, tail=Tail.PAGE, late=True)
                for edge in edges
            )
            if len(runs := runs_of(direct)):
                reads.append((peer, runs))
            if any(len(spans.tokens) for _, spans in staged):
                reads.append((peer, chunks(staged, self.chunk_bytes)))
            late.append(first_valid_tokens([*direct, *staged]))
        return Bound(reads, latest(late))


def decode(encoded: bytes) -> Manifest:
    """A peer's manifest; its content is checked by `check_pd_topology`.

    Raises:
        IncompatiblePeer: not a manifest of this version.
    """
    try:
        return _decoder.decode(encoded)
    except (msgspec.MsgspecError, PDConnectorError, ValueError, RecursionError) as error:
        raise IncompatiblePeer(
            f"a manifest of the other instance cannot be read ({error}): run the same release of vllm_pd_connector "
            "on both sides"
        ) from error

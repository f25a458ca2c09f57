"""The link of a decode worker to a prefill instance that it reads from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_pd_connector.geometry.bind import Tail, first_valid_tokens, latest, pairing
from vllm_pd_connector.geometry.plan import Edge, Plan, planning
from vllm_pd_connector.geometry.spans import Slices
from vllm_pd_connector.geometry.staging.chunks import RUN_COST_BYTES, Chunk, chunks, split
from vllm_pd_connector.worker.peers.link import PeerLink, run_cost_of, verdict

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_pd_connector.bounded import Pieces
    from vllm_pd_connector.geometry.blocks import BlockTables
    from vllm_pd_connector.geometry.manifest import Manifest, Segment
    from vllm_pd_connector.transport.base import Transport, TransportPeer
    from vllm_pd_connector.worker.peers.bandwidth_test import Bandwidth


@dataclass(frozen=True, slots=True)
class Bound:
    """A request's reads per connected rank, straight or by way of the staging buffer, and the groups (of this side)
    whose first block in the window holds tokens only from a position on: `geometry.bind.first_valid_tokens`."""

    reads: list[tuple[TransportPeer, Slices | Iterator[Chunk]]]
    first_valid_tokens: dict[int, int]


@dataclass(eq=False, slots=True)
class ReadLink(PeerLink):
    """To a prefill instance that is read from: connected are the ranks that the plan reads from.

    `edges` are the plan's, what is read directly and what by way of the staging buffer. `scratch` is memory of one
    connected rank for a self-test, `bandwidth` what the latest one found. `run_cost` is what a run costs, in bytes: the
    transport's figure, or the self-test's.
    """

    plan: Plan | None = None
    edges: tuple[tuple[Edge, Edge], ...] = ()
    chunk_bytes: int = 0
    scratch: tuple[TransportPeer, Segment] | None = None
    bandwidth: Bandwidth | None = None
    run_cost: int = RUN_COST_BYTES

    def connecting(self, local: Manifest, transport: Transport, chunk_bytes: int = 0) -> Pieces[str]:
        """Check, plan, connect to the ranks that are read from. Raises as `PeerLink.connecting`."""
        remote, check = yield from self._accept(local, local, "decode engine {} cannot read from prefill engine {}")
        plan = yield from planning(local, remote)
        by_rank = {m.parallel.rank: m for m in remote}
        for edge in plan.edges:
            source = by_rank[edge.source]
            scratch = (source.scratch,) if source.scratch is not None else ()
            yield from self._meeting(transport, edge.source, source.endpoint)
            peer = self.ranks[edge.source] = transport.connect(source.endpoint, (*source.segments, *scratch))
            self.scratch = self.scratch or ((peer, *scratch) if scratch else None)
            yield
        run_cost, edges = run_cost_of(transport), []
        for edge in plan.edges:
            edges.append(split(edge, chunk_bytes, run_cost=run_cost))
            yield
        # Together: a self-test of the connection before this one may still end and bring a cost of its own.
        self.plan, self.chunk_bytes, self.edges, self.run_cost = plan, chunk_bytes, tuple(edges), run_cost
        converted = sum(bool(staged.pairings) for _, staged in self.edges)
        moves = f"reads from {len(plan.edges)} of {len(remote)} ranks, converts from {converted}"
        return verdict(check, plan.unfilled, remote[0], moves)

    def use_run_cost(self, run_cost: int) -> None:
        """Choose anew what is read directly, while connected; requests that were bound go on as they began."""
        if self.plan is not None:
            self.run_cost = run_cost
            self.edges = tuple(split(edge, self.chunk_bytes, run_cost=run_cost) for edge in self.plan.edges)

    def disconnect(self, transport: Transport) -> None:
        """See `PeerLink`."""
        PeerLink.disconnect(self, transport)
        self.plan, self.scratch, self.edges = None, None, ()

    def binding(self, source: BlockTables, destination: BlockTables, start: int, stop: int) -> Pieces[Bound]:
        """What must be read of a range of tokens; no reads when nothing is missing. The link's connections count
        that it has when this begins.

        Raises:
            BindError: the block ids do not fit the manifests.
        """
        assert self.plan is not None
        reads: list[tuple[TransportPeer, Slices | Iterator[Chunk]]] = []
        late, run_cost = [], self.run_cost
        ranks = [(self.ranks[direct.source], direct, staged) for direct, staged in self.edges]
        for peer, *edges in ranks:
            both = []
            for edge in edges:
                # Slots after the last prompt token hold nothing yet, so a whole page may take the place of its tail.
                both.append((yield from pairing(edge, source, destination, start, stop, tail=Tail.PAGE, late=True)))
            direct, staged = both
            if slices := Slices.of(direct):
                reads.append((peer, slices))
            if any(len(spans.tokens) for _, spans in staged):
                reads.append((peer, chunks(staged, self.chunk_bytes, run_cost=run_cost)))
            late.append(first_valid_tokens([*direct, *staged]))
            yield
        return Bound(reads, latest(late))

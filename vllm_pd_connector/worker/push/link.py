"""The link of a prefill worker to a decode instance that it writes into.

It checks the pair, plans for every rank of the decode instance with the manifests of all ranks of its own, and takes
what the plan gives to itself: every rank comes to the same plan, so they need not talk. The decode side's link of a
push is in `receive.push_link`.

A push is bound in parts. Groups of full attention follow a cursor: only whole pages of both sides go out while tokens
are missing, so that no byte is written twice and none of a page that is still being filled. Their layers come in waves
(`push.waves`), which may be bound before the step has ended; the other layers are when it has. The rest (windows,
recurrent states) is bound once, at the end; or with the step that computes the last of the prompt, and so in waves,
where its order tells of them. Where runs into the other side's pages would be short, a part goes by way
of this side's staging buffer, by the rule of reads (`geometry.staging.chunks`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import lcm
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.bind import Tail, filled_every, first_valid_tokens, pair
from vllm_pd_connector.geometry.manifest import GroupKind, Manifest, Rank
from vllm_pd_connector.geometry.plan import Edge, planning
from vllm_pd_connector.geometry.spans import Slices
from vllm_pd_connector.geometry.staging.chunks import RUN_COST_BYTES, Chunk, chunks, split
from vllm_pd_connector.worker.peers.link import PeerLink, decode, run_cost_of, verdict
from vllm_pd_connector.worker.push.waves import of_layers

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from vllm_pd_connector.bounded import Pieces
    from vllm_pd_connector.geometry.blocks import BlockTables
    from vllm_pd_connector.geometry.plan import PagePairing
    from vllm_pd_connector.geometry.spans import Spans
    from vllm_pd_connector.protocol.wire.push_messages import PushInto
    from vllm_pd_connector.transport.base import Transport


@dataclass(frozen=True, slots=True)
class _Edges:
    """What this rank gives to one rank of the decode instance, each wave of layers and then all others: by cursor, and
    at the end; each directly and by way of the staging buffer. `together`: all that grows, as one. `step` is in
    tokens."""

    growing: tuple[tuple[Edge, Edge], ...]
    ending: tuple[tuple[Edge, Edge], ...]
    together: tuple[Edge, Edge]
    step: int


@dataclass(frozen=True, slots=True)
class Ahead:
    """So many waves of layers were bound up to the token `reach`, which is beyond the cursor of the others; `whole`:
    with what moves at the end."""

    waves: int = 0
    reach: int = 0
    whole: bool = False


NOTHING_AHEAD = Ahead()


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a push: runs to write directly, chunks to write by way of the staging buffer (None for nothing), and
    `geometry.bind.first_valid_tokens`."""

    direct: Slices
    staged: Iterator[Chunk] | None
    first_valid_tokens: dict[int, int]

    @property
    def work(self) -> tuple[Slices | Iterator[Chunk], ...]:
        """What there is to be written, transfer by transfer."""
        direct = (self.direct,) if self.direct else ()
        return direct if self.staged is None else (*direct, self.staged)


NOTHING = Part(Slices(()), None, {})


@dataclass(eq=False, slots=True)
class WriteLink(PeerLink):
    """To a decode instance that is written into. `own` are the encoded manifests of all ranks of this instance, `waves`
    the names of the layers that are written together; `outgoing` has every rank there while connected, None for one
    that this rank has nothing for."""

    own: Sequence[bytes] = ()
    waves: Sequence[Sequence[str]] = ()
    outgoing: dict[Rank, _Edges | None] = field(default_factory=dict)
    chunk_bytes: int = 0
    run_cost: int = RUN_COST_BYTES
    same_weights: bool = True  # compared when the push was asked for

    def connecting(self, local: Manifest, transport: Transport, chunk_bytes: int = 0) -> Pieces[str]:
        """Check, plan for all ranks there, connect to those that this rank writes into. Raises as
        `PeerLink.connecting`."""
        ours = []
        for encoded in self.own:
            ours.append(decode(encoded))
            yield
        remote, check = yield from self._accept(local, ours, "prefill engine {} cannot write into decode engine {}")
        self.run_cost = run_cost_of(transport)
        unfilled: set[str] = set()
        for destination in remote:
            plan = yield from planning(destination, ours)
            unfilled |= plan.unfilled
            edge = plan.edge(local.parallel.rank)
            rank = destination.parallel.rank
            if edge is not None:
                yield from self._meeting(transport, rank, destination.endpoint)
                self.ranks[rank] = transport.connect(destination.endpoint, destination.segments)
                yield
            both = (yield from self._edges(edge, chunk_bytes)) if edge is not None else None
            self.outgoing[rank] = both
        self.chunk_bytes = chunk_bytes
        converted = sum(
            any(staged.pairings for _, staged in (*edges.growing, *edges.ending))
            for edges in filter(None, self.outgoing.values())
        )
        moves = f"writes into {len(self.ranks)} of {len(remote)} ranks, converts for {converted}"
        return verdict(check, unfilled, local, moves)

    def disconnect(self, transport: Transport) -> None:
        """See `PeerLink`."""
        PeerLink.disconnect(self, transport)
        self.outgoing = {}

    def reach(self, into: PushInto, ready: int, cursor: int, final: bool) -> int:
        """How far the cursor of a push may go: to the last page boundary of both sides before `ready`, or to the end if
        no token is missing.

        Raises:
            BindError: that rank is not connected.
        """
        edges = self._edges_to(into)
        if final or edges is None or ready >= into.stop:
            return into.stop
        return max(cursor, ready // edges.step * edges.step)

    def bind_push(
        self, into: PushInto, source: BlockTables, cursor: int, reach: int, whole: bool, ahead: Ahead = NOTHING_AHEAD
    ) -> Part:
        """What this rank must write of tokens [cursor, reach) that is not bound yet, and, if `whole`, of all else.

        Raises:
            BindError: the request's block ids do not fit the manifests, or that rank is not connected.
        """
        edges = self._edges_to(into)
        if edges is None:
            return NOTHING
        ending = edges.ending[ahead.waves if ahead.whole else 0 :] if whole else ()
        if not ahead.waves:  # each wave by itself would pair the same tokens
            return self._bind(into, source, (edges.together,), [cursor], ending, reach)
        begins = [ahead.reach if wave < ahead.waves else cursor for wave in range(len(edges.growing))]
        return self._bind(into, source, edges.growing, begins, ending, reach)

    def bind_waves(
        self, into: PushInto, source: BlockTables, cursor: int, reach: int, whole: bool, first: int, stop: int
    ) -> Part:
        """What this rank must write of tokens [cursor, reach) in the waves [first, stop) of layers, and, if `whole`, of
        everything else in these.

        Raises:
            BindError: as `bind_push`.
        """
        edges = self._edges_to(into)
        if edges is None:
            return NOTHING
        ending = edges.ending[first:stop] if whole else ()
        return self._bind(into, source, edges.growing[first:stop], [cursor] * (stop - first), ending, reach)

    def _bind(
        self,
        into: PushInto,
        source: BlockTables,
        growing: Sequence[tuple[Edge, Edge]],
        begins: Sequence[int],
        ending: Sequence[tuple[Edge, Edge]],
        reach: int,
    ) -> Part:
        """Of the `growing` layers the tokens from where each begins to `reach`, and all that moves of the `ending`."""
        tables = source, into.blocks
        tail = Tail.PAGE if reach == into.stop else Tail.EXACT
        direct: list[tuple[PagePairing, Spans]] = []
        staged: list[tuple[PagePairing, Spans]] = []
        for begin, both in zip(begins, growing, strict=True):
            for paired, edge in zip((direct, staged), both, strict=True):
                paired += pair(edge, *tables, begin, reach, tail=tail, states=False)
        for both in ending:
            for paired, edge in zip((direct, staged), both, strict=True):
                paired += pair(edge, *tables, into.start, into.stop, tail=tail, late=True)
        any_staged = any(len(spans.tokens) for _, spans in staged)
        return Part(
            Slices.of(direct),
            chunks(staged, self.chunk_bytes, writes=True, run_cost=self.run_cost) if any_staged else None,
            first_valid_tokens([*direct, *staged]),
        )

    def _edges(self, edge: Edge, chunk_bytes: int) -> Pieces[_Edges]:
        """What an edge moves, by waves and in both ways."""
        growing = tuple(pairing for pairing in edge.pairings if pairing.kind is GroupKind.FULL)
        ending = tuple(pairing for pairing in edge.pairings if pairing.kind is not GroupKind.FULL)
        step = lcm(*(filled_every(side) for f in growing for side in (f.source, f.destination)))
        in_waves = frozenset(layer for wave in self.waves for layer in wave)
        parts: list[tuple[tuple[Edge, Edge], ...]] = []
        for pairings in (growing, ending):
            some, whole = [], replace(edge, pairings=pairings)
            for wanted in (*(frozenset(wave).__contains__ for wave in self.waves), lambda layer: layer not in in_waves):
                some.append(split(of_layers(whole, wanted), chunk_bytes, writes=True, run_cost=self.run_cost))
                yield
            parts.append(tuple(some))
        together = split(replace(edge, pairings=growing), chunk_bytes, writes=True, run_cost=self.run_cost)
        yield
        return _Edges(parts[0], parts[1], together, step)

    def _edges_to(self, into: PushInto) -> _Edges | None:
        """None: nothing is written into that rank. What is not connected must not pass for that."""
        rank = into.rank
        if rank not in self.outgoing:
            raise BindError(f"rank {rank}: asked to be written into, connected are {sorted(self.outgoing)}")
        return self.outgoing[rank]

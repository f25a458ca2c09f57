"""The links of a pushing pair: a decode worker that asks, a prefill worker that writes.

The one that asks only checks the pair, so that a request fails with the reason before anything moves; its transport is
not touched. The one that writes checks the pair too, plans for every rank of the decode instance with the manifests of
all ranks of its own, and takes what the plan gives to itself: every rank comes to the same plan, so they need not talk.

A push is bound in parts. Groups of full attention follow a cursor: only whole pages of both sides go out before the
end, so that no byte is written twice and none of a page that is still being filled. The rest (the last partial block,
windows, recurrent states) is bound once, at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import lcm

import numpy as np

from vllm_pd_connector.errors import BindError, TransferError
from vllm_pd_connector.geometry.bind import BlockTable, Tail, late_starts, pair, runs_of
from vllm_pd_connector.geometry.manifest import GroupKind, Manifest
from vllm_pd_connector.geometry.plan import Edge, Rank, make_plan
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.protocol.fields import Table
from vllm_pd_connector.protocol.push_messages import PushInto
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.worker.link import Link, decode


@dataclass(eq=False, slots=True)
class AskLink(Link):
    """To a prefill instance that is asked to write."""

    def connect(self, local: Manifest, transport: Transport, chunk_bytes: int = 0) -> str:
        """Check the pair.

        Raises:
            IncompatiblePeer: this pair can never work.
        """
        _, check = self._accept(local, local, "decode engine {} cannot be written into by prefill engine {}")
        return f"{check.status}, writes here"


@dataclass(frozen=True, slots=True)
class _Edges:
    """What this rank gives to one rank of the decode instance: by cursor, and at the end. `step` is in tokens."""

    growing: Edge
    ending: Edge
    step: int


@dataclass(eq=False, slots=True)
class WriteLink(Link):
    """To a decode instance that is written into. `own` are the encoded manifests of all ranks of this instance."""

    own: Sequence[bytes] = ()
    outgoing: dict[Rank, _Edges] = field(default_factory=dict)

    def connect(self, local: Manifest, transport: Transport, chunk_bytes: int = 0) -> str:
        """Check, plan for all ranks there, connect to those that this rank writes into. Raises as `Link.connect`."""
        ours = [decode(encoded) for encoded in self.own]
        remote, check = self._accept(local, ours, "prefill engine {} cannot write into decode engine {}")
        mine = local.parallel.pp_rank, local.parallel.tp_rank
        try:
            for destination in remote:
                edge = make_plan(destination, ours).edge(mine)
                if edge is not None:
                    rank = destination.parallel.pp_rank, destination.parallel.tp_rank
                    self.ranks[rank] = transport.connect(destination.endpoint, destination.segments)
                    self.outgoing[rank] = _edges(edge)
        except TransferError:
            self.disconnect(transport)
            raise
        return f"{check.status}, writes into {len(self.outgoing)} of {len(remote)} ranks"

    def disconnect(self, transport: Transport) -> None:
        Link.disconnect(self, transport)
        self.outgoing = {}

    def reach(self, into: PushInto, ready: int, cursor: int, final: bool) -> int:
        """How far the cursor of a push may go: to the last page boundary of both sides before `ready`, or the end."""
        edges = self.outgoing.get((into.pp_rank, into.tp_rank))
        if final or edges is None:
            return into.stop
        return max(cursor, ready // edges.step * edges.step)

    def bind_push(
        self, into: PushInto, source: Sequence[Table], cursor: int, reach: int, final: bool
    ) -> tuple[Runs, dict[int, int]]:
        """What this rank must write of tokens [cursor, reach), and at the end of everything else; with it
        `geometry.bind.late_starts`.

        Raises:
            BindError: the request's block ids do not fit the manifests.
        """
        edges = self.outgoing.get((into.pp_rank, into.tp_rank))
        if edges is None:
            return Runs.empty(), {}
        ours = [_table(table) for table in source]
        theirs = [_table(table) for table in into.blocks]
        tail = Tail.PAGE if final else Tail.EXACT
        paired = pair(edges.growing, ours, theirs, cursor, reach, tail=tail, states=False)
        if final:
            paired += pair(edges.ending, ours, theirs, into.start, into.stop, tail=tail, late=True)
        return runs_of(paired), late_starts(paired)


def _edges(edge: Edge) -> _Edges:
    growing = tuple(family for family in edge.families if family.kind is GroupKind.FULL)
    ending = tuple(family for family in edge.families if family.kind is not GroupKind.FULL)
    step = lcm(*(tokens for f in growing for tokens in (f.source.page_tokens, f.destination.page_tokens)))
    return _Edges(replace(edge, families=growing), replace(edge, families=ending), step)


def _table(table: Table) -> BlockTable:
    if len(table.ids) % 4:
        raise BindError(f"block ids: {len(table.ids)} bytes are no sequence of 32-bit numbers")
    return BlockTable(table.first_block, np.frombuffer(table.ids, dtype="<i4").astype(np.int64))

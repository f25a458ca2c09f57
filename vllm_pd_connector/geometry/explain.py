"""What a pair of instances would do, without moving a byte: verdict, edges, runs, bytes, conversions.

A request is bound as a receive binds its last move: the whole page in which it ends, where the pages of both sides are
alike. The figures are those of a request of `tokens` tokens whose blocks do not follow each other in the caches, which
is what a cache looks like after some hours of service. In a fresh one they do, and direct runs are longer and fewer:
`neighbouring_runs`. A push is taken to be written at once, as with `push_when` "end"; step by step it takes more runs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vllm_pd_connector.errors import BindError, IncompatiblePeer
from vllm_pd_connector.geometry.bind import Tail, pair
from vllm_pd_connector.geometry.blocks import BlockTable, BlockTables
from vllm_pd_connector.geometry.plan import Edge, make_plan
from vllm_pd_connector.geometry.sharding import describe_rank
from vllm_pd_connector.geometry.spans import runs_of
from vllm_pd_connector.geometry.staging.chunks import RUN_COST_BYTES, chunks, run_count, split
from vllm_pd_connector.geometry.topology import TopologyCheck, TopologyStatus, check_pd_topology, not_moved

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_pd_connector.geometry.manifest import Group, Manifest, TokenShare


Tables = tuple[BlockTables, BlockTables]


@dataclass(frozen=True, slots=True)
class Movement:
    """What one kind of layers moves from one prefill rank to one decode rank, per request. The initiator is the decode
    rank in a pull, the prefill rank in a push.

    Attributes:
        source, destination: ranks, as "pp0 tp1".
        kind: of the KV-cache group; `group` is its index on the destination.
        layers: how many; `first_layer` is the name of one.
        source_page_tokens, destination_page_tokens: 0 for states.
        source_share, destination_share: which tokens the ranks hold, as "1 of 2 by 16"; empty for all.
        converted: whether the bytes go by way of the initiator's staging buffer.
        bytes: that reach the destination's cache, with the slots behind the last token where a whole page moves.
        runs: that the transport reads or writes, between the caches or, if converted, on one side in the staging
            buffer; `neighbouring_runs` if the blocks follow each other on both sides.
        read_bytes: of these runs; more than `bytes` where gaps are read through. A push writes no gaps.
        unconverted_runs: about how many runs there would be without conversion.
        copies: strided copies that follow, or come first in a push.
    """

    source: str
    destination: str
    group: int
    kind: str
    layers: int
    first_layer: str
    source_page_tokens: int
    destination_page_tokens: int
    converted: bool
    bytes: int
    runs: int
    read_bytes: int
    unconverted_runs: int
    copies: int
    neighbouring_runs: int
    source_share: str = ""
    destination_share: str = ""


@dataclass(frozen=True, slots=True)
class Explanation:
    """A verdict and, if the pair is allowed, all that moves for a request of `tokens` tokens, by pull or push, where a
    run costs as much as `run_cost` bytes. `not_moved` says which layers of decode stay unfilled, and why."""

    check: TopologyCheck
    tokens: int
    movements: tuple[Movement, ...]
    push: bool = False
    run_cost: int = RUN_COST_BYTES
    not_moved: str = ""


def explain_pair(
    prefill: Sequence[Manifest],
    decode: Sequence[Manifest],
    tokens: int,
    chunk_bytes: int,
    *,
    push: bool = False,
    run_cost: int = RUN_COST_BYTES,
) -> Explanation:
    """Check two whole instances and plan from `prefill` to `decode`, by pull or push.

    `tokens` is reduced to what both caches hold; `chunk_bytes` is the most that is staged at a time, 0 for nothing, and
    `run_cost` what a run costs the transport, in bytes.
    """
    check = check_pd_topology(decode, prefill)
    if check.allowed:
        tokens = min(tokens, *(_capacity(group) for side in (prefill, decode) for m in side for group in m.groups))

    def tables(edge: Edge, scattered: bool) -> Tables:
        # Neighbours on neither side: what is converted is read by the source's pages alone.
        orders = (Order.EVERY_OTHER, Order.DESCENDING) if scattered else (Order.ASCENDING, Order.ASCENDING)
        source = [blocks_for(group, tokens, order=orders[0]) for group in edge.source_groups]
        return source, [blocks_for(g, tokens, filled=True, order=orders[1]) for g in edge.destination_groups]

    return _explain(check, prefill, decode, _Request(range(tokens), tables, chunk_bytes, push, run_cost))


def explain_request(
    prefill: Sequence[Manifest],
    decode: Manifest,
    source: BlockTables,
    destination: BlockTables,
    tokens: range,
    chunk_bytes: int,
    *,
    push: bool = False,
    run_cost: int = RUN_COST_BYTES,
) -> Explanation:
    """The same of one worker's receive of these tokens, from and into these blocks, neighbours or not."""
    request = _Request(tokens, lambda edge, scattered: (source, destination), chunk_bytes, push, run_cost)
    return _explain(check_pd_topology(decode, prefill), prefill, (decode,), request)


class Order(Enum):
    """How a request's blocks follow each other; in all but the first none is behind its neighbour."""

    ASCENDING = 0
    DESCENDING = 1
    EVERY_OTHER = 2


def blocks_for(group: Group, tokens: int, *, filled: bool = False, order: Order = Order.ASCENDING) -> BlockTable:
    """The blocks of a request of this many tokens, where only their number is known. Where they are `filled`, those
    that a window has left behind are null."""
    blocks = min(max(1, -(-tokens // max(1, group.block_tokens))), max(1, group.num_blocks - 1))
    ids = np.arange(1, blocks + 1, dtype=np.int64)
    match order:
        case Order.DESCENDING:
            ids = ids[::-1].copy()
        case Order.EVERY_OTHER:
            ids = np.concatenate((ids[1::2], ids[::2]))
    if filled and group.window:
        ends = (np.arange(blocks) + 1) * group.block_tokens
        ids[ends <= tokens - group.window] = 0
    return BlockTable.of(0, ids.tolist())


def _explain(
    check: TopologyCheck, prefill: Sequence[Manifest], decode: Sequence[Manifest], request: _Request
) -> Explanation:
    movements: list[Movement] = []
    unfilled: set[str] = set()
    try:
        for manifest in decode if check.allowed else ():
            plan = make_plan(manifest, prefill)
            unfilled |= plan.unfilled
            for edge in plan.edges:
                movements += _edge(edge, request)
    except IncompatiblePeer as error:
        check, movements = TopologyCheck(TopologyStatus.DENY, error.summary, error.differences), []
    except BindError as error:  # instances that would be paired, but not for this request
        check, movements = TopologyCheck(TopologyStatus.DENY, str(error)), []
    told = not_moved(unfilled, prefill[0]) if check.allowed else ""
    return Explanation(check, len(request.tokens), tuple(movements), request.push, request.run_cost, told)


def _capacity(group: Group) -> int:
    """Tokens of one request that the group's blocks hold; block 0 is never used."""
    return max(1, group.num_blocks - 1) * max(1, group.block_tokens)


def _edge(edge: Edge, request: _Request) -> list[Movement]:
    _, staged = split(edge, request.chunk_bytes, writes=request.push, run_cost=request.run_cost)
    movements = []
    for pairing in edge.pairings:
        only, converted = replace(edge, pairings=(pairing,)), pairing in staged.pairings
        work, unconverted = _work(only, request, converted, scattered=True)
        neighbouring, _ = _work(only, request, converted, scattered=False)
        movements.append(
            Movement(
                source=describe_rank(edge.source),
                destination=describe_rank(edge.destination),
                group=pairing.destination.group,
                kind=str(pairing.kind),
                layers=len({layer for batch in pairing.batches for layer in batch.layers}),
                first_layer=pairing.batches[0].layers[0],
                source_page_tokens=pairing.source.page_tokens,
                destination_page_tokens=pairing.destination.page_tokens,
                converted=converted,
                bytes=work.moved,
                runs=work.runs,
                read_bytes=work.read,
                unconverted_runs=unconverted,
                copies=work.copies,
                neighbouring_runs=neighbouring.runs,
                source_share=_share(pairing.source.share),
                destination_share=_share(pairing.destination.share),
            )
        )
    return movements


class _Request(NamedTuple):
    """Which tokens are moved and how, and the tables of an edge's two sides; with `scattered`, of blocks that are no
    neighbours."""

    tokens: range
    tables: Callable[[Edge, bool], Tables]
    chunk_bytes: int
    push: bool
    run_cost: int


class _Work(NamedTuple):
    """What a transport is given for one pairing, and the copies beside it. `moved` and `read` are bytes."""

    runs: int
    read: int
    moved: int
    copies: int


def _work(edge: Edge, request: _Request, converted: bool, *, scattered: bool) -> tuple[_Work, int]:
    """The work along an edge of one pairing, by way of the staging buffer if `converted`, and about how many runs there
    are without one."""
    source, destination = request.tables(edge, scattered)
    paired = pair(edge, source, destination, request.tokens.start, request.tokens.stop, tail=Tail.PAGE, late=True)
    if not converted:
        bound = runs_of(paired)
        return _Work(len(bound), bound.total_bytes, bound.total_bytes, 0), len(bound)
    parts = list(chunks(paired, request.chunk_bytes, writes=request.push, run_cost=request.run_cost))
    copies = [copy.total_bytes for part in parts for copy in part.copies]
    work = _Work(
        sum(len(part.runs) for part in parts), sum(part.runs.total_bytes for part in parts), sum(copies), len(copies)
    )
    return work, round(sum(run_count(pairing) * len(spans.tokens) for pairing, spans in paired))


def _share(share: TokenShare) -> str:
    return f"{share.rank} of {share.size} by {share.interleave}" if share.size > 1 else ""

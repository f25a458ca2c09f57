"""A recorded receive once more: the same manifests, block tables and plan, over memory of this process.

The link is that of a worker that reads (`ReadLink`), the transport is the loopback one, staged chunks are copied
as on a CPU. What moves are `numbers` that say where they belong, and each is looked at.

Memory is as large as the recorded caches, and only what is touched takes any. A push is written at once, as with
`push_when` "end", from blocks that follow each other where this side does not know which they were.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from typing import Final

import msgspec
import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.bounded import at_once
from vllm_pd_connector.cli.output import CommandError
from vllm_pd_connector.cli.trace.numbers import Caches, fill, put_beside, touched_beside, wrong
from vllm_pd_connector.geometry.bind import Tail, pair
from vllm_pd_connector.geometry.blocks import BlockTables
from vllm_pd_connector.geometry.explain import blocks_for
from vllm_pd_connector.geometry.manifest import Manifest, Segment
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.geometry.spans import Slices
from vllm_pd_connector.geometry.staging.chunks import Chunk, chunks, split
from vllm_pd_connector.geometry.topology import check_pd_topology
from vllm_pd_connector.geometry.validate import validate
from vllm_pd_connector.observability.record import Moved, Record
from vllm_pd_connector.protocol.peer import Peer, PeerKey
from vllm_pd_connector.transport.base import TransferStatus, TransportPeer
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker.peers.link import with_weights
from vllm_pd_connector.worker.receive.read_link import ReadLink
from vllm_pd_connector.worker.staging.copiers import CpuCopier

MAX_TOUCHED: Final = 8 << 30
_NORESERVE: Final = 0x4000  # Linux, MAP_NORESERVE: address space alone, however large


@dataclass(frozen=True, slots=True)
class Replayed:
    """What the transport was given, and what is wrong in the destination's memory: nothing if all is right."""

    moved: Moved
    wrong: tuple[str, ...]


def source_tables(record: Record) -> BlockTables:
    """The prefill side's tables; of blocks that follow each other where this side did not know which they were."""
    if record.source_blocks is not None or not record.sources:
        return record.source_blocks or ()
    return [blocks_for(group, record.stop) for group in record.sources[0].groups]


def known_sources(record: Record) -> tuple[Manifest, ...]:
    """The prefill side's manifests, with the weights that it had."""
    if not record.same_weights:
        return record.sources
    return tuple(with_weights(manifest, record.destination.model.weights) for manifest in record.sources)


def replay(record: Record) -> Replayed:
    """Move a recorded request's bytes again, and look at each.

    Raises:
        PDConnectorError: the pair or its plan is refused, or there is more to touch than this process takes. A record
            is a stranger's: nothing in it is taken for granted.
    """
    sources = known_sources(record)
    if not (check := check_pd_topology(record.destination, sources)).allowed:
        why = check.reason or "; ".join(map(str, check.differences))
        raise CommandError(f"the pair is refused as it is recorded: {check.status}: {why}")
    tables = source_tables(record)
    _require_little(record, tables)
    with contextlib.ExitStack() as ending:
        copier = CpuCopier()
        buffer = _memory(max(1, record.chunk_bytes))
        staging = _segment(buffer)
        here = ending.enter_context(_worker(record.destination, staging))
        there = [ending.enter_context(_worker(manifest, staging)) for manifest in sources]
        moves = _reads(record, here, there, tables) if record.way == "pull" else _writes(record, here, there, tables)
        works = list(moves)  # whatever is refused is refused before anything is touched
        for one in there:
            fill(one, tables, record.stop)
        put_beside(here, record.blocks)
        moved = Moved()
        for work in works:
            moved = _carry_out(work, staging, copier, moved)
        found = (
            *wrong(here, record.blocks, there, tables, record.start, record.stop),
            *touched_beside(here, record.blocks),
        )
    return Replayed(moved, found)


@dataclass(frozen=True, slots=True)
class _Worker(Caches):
    """A worker whose segments are memory of this process."""

    transport: LoopbackTransport


Work = tuple[_Worker, TransportPeer, Slices | Iterable[Chunk], bool]
"""Who moves what to or from whom; whether it writes."""


@contextlib.contextmanager
def _worker(manifest: Manifest, staging: Segment) -> Iterator[_Worker]:
    validate(manifest)
    memory = tuple(_memory(one.length) for one in manifest.segments)
    segments = tuple(map(_segment, memory))
    transport = LoopbackTransport()
    try:
        transport.register((*segments, staging))
        bare = msgspec.structs.replace(
            manifest,
            segments=segments,
            transport=transport.name,
            endpoint=transport.describe(),
            scratch=None,
            life=None,
        )
        yield _Worker(bare, memory, transport)
    finally:
        transport.close()


def _memory(length: int) -> NDArray[np.uint8]:
    """Memory of which only what is touched takes any.

    Raises:
        CommandError: there is no address space for it.
    """
    try:
        mapped = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, ValueError, OverflowError) as error:
        raise CommandError(f"there is no address space for {length} bytes: {error}") from error
    return np.frombuffer(mapped, dtype=np.uint8)


def _segment(memory: NDArray[np.uint8]) -> Segment:
    return Segment(memory.ctypes.data, len(memory), "cpu", 0)


def _require_little(record: Record, tables: BlockTables) -> None:
    """Raises CommandError: the blocks of all workers, or a chunk, have more bytes than may be touched."""
    if record.chunk_bytes > MAX_TOUCHED:
        raise CommandError(f"the record's chunk_bytes is {record.chunk_bytes}, at most {MAX_TOUCHED} are staged here")
    touched = 0
    for manifest, own in ((record.destination, record.blocks), *((one, tables) for one in record.sources)):
        if len(own) != len(manifest.groups):
            raise CommandError(f"the record has {len(own)} block tables for {len(manifest.groups)} groups")
        for tensor in manifest.tensors:
            size = tensor.itemsize * int(np.prod([axis.size for axis in tensor.axes], dtype=object))
            touched += len(own[tensor.group].ids) * tensor.pages_per_block * size
    if touched > MAX_TOUCHED:
        raise CommandError(f"the record's blocks have {touched} bytes on both sides, at most {MAX_TOUCHED} are moved")


def _reads(record: Record, here: _Worker, there: list[_Worker], tables: BlockTables) -> Iterator[Work]:
    """As a decode worker binds what it reads."""
    manifests = [msgspec.msgpack.encode(one.manifest) for one in there]
    link = ReadLink(Peer(PeerKey("recorded", 1, ""), lambda: 0.5), there[0].manifest.engine_id, "", 0.0, manifests)
    at_once(link.connecting(here.manifest, here.transport, record.chunk_bytes))
    link.use_run_cost(record.run_cost)
    for peer, work in at_once(link.binding(tables, record.blocks, record.start, record.stop)).reads:
        yield here, peer, work, False


def _writes(record: Record, here: _Worker, there: list[_Worker], tables: BlockTables) -> Iterator[Work]:
    """As each rank of the prefill side binds what it writes at the end. Its link wants all ranks of the other side,
    of which a record has one."""
    ranks = {one.manifest.parallel.rank: one for one in there}
    for edge in make_plan(here.manifest, [one.manifest for one in there]).edges:
        mover = ranks[edge.source]
        peer = mover.transport.connect(here.manifest.endpoint, here.manifest.segments)
        direct, staged = (
            pair(part, tables, record.blocks, record.start, record.stop, tail=Tail.PAGE, late=True)
            for part in split(edge, record.chunk_bytes, writes=True)
        )
        if slices := Slices.of(direct):
            yield mover, peer, slices, True
        yield mover, peer, chunks(staged, record.chunk_bytes, writes=True), True


def _carry_out(work: Work, staging: Segment, copier: CpuCopier, moved: Moved) -> Moved:
    """Move what is to be moved; returns `moved` and that."""
    mover, peer, part, writes = work
    for piece in part:
        if isinstance(piece, Runs):
            moved = _move(mover, peer, piece, moved, writes=writes)
            continue
        base, chunk, runs = staging.address, piece, piece.runs
        if writes:
            copier.begin(base, chunk.copies, gather=True).advance(inf)
            runs = Runs(runs.source + base, runs.destination, runs.length)
        else:
            runs = Runs(runs.source, runs.destination + base, runs.length)
        moved = _move(mover, peer, runs, moved, writes=writes)
        if not writes:
            copier.begin(base, chunk.copies).advance(inf)
    return moved


def _move(mover: _Worker, peer: TransportPeer, runs: Runs, moved: Moved, *, writes: bool) -> Moved:
    transfer = (mover.transport.write if writes else mover.transport.read)(peer, runs)
    while mover.transport.poll(transfer) is not TransferStatus.DONE:
        pass
    return Moved(
        bytes=moved.bytes + runs.total_bytes,
        runs=moved.runs + len(runs),
        descriptors=moved.descriptors + transfer.descriptors,
    )

"""Sums over a request's caches, made beside the forward and the transfers, and compared between the two sides.

On the decode side the transfer thread asks the prefill side for its sums, when it has read all or when the prefill side
says that all is written, and has a thread of its own make ours. On the
prefill side a thread of each worker asks its own instance's side channel for jobs, sleeps until there is one, and sends
back what it finds. The blocks are under a lease all the while, so nothing writes them.
"""

from __future__ import annotations

import ctypes
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.bind import BlockTable
from vllm_pd_connector.geometry.digest import Memory
from vllm_pd_connector.geometry.manifest import GroupKind, Manifest, Segment
from vllm_pd_connector.geometry.sums import Sum, sums
from vllm_pd_connector.protocol.fields import MAX_PIECE_BYTES, MAX_PIECES_BYTES
from vllm_pd_connector.protocol.messages import Failure, Job, NextJob, Request, SumPiece, Sums
from vllm_pd_connector.sidechannel.client import Outcome, SideChannelClient
from vllm_pd_connector.sidechannel.keys import Keys
from vllm_pd_connector.sidechannel.waiting import Wake, wait
from vllm_pd_connector.steps import ReceiveOrder
from vllm_pd_connector.worker.copies import device_rows

logger = init_logger(__name__)

ONE_IN = 16
_JOB_WAIT_S = 30.0
_RETRY_S = 1.0
_CLOSE_S = 10.0
_NAMES_BYTES = 128  # of a piece, beside its layer's name


def is_chosen(order: ReceiveOrder, how: str) -> bool:
    """Whether a request is verified; all ranks choose alike."""
    if order.remote is not None:
        drawn = order.remote.lease.nonce[0]
    else:
        drawn = zlib.crc32(order.push.prefill.name.encode()) if order.push is not None else 0
    return how == "all" or (how == "sample" and drawn % ONE_IN == 0)


class _DevicePages:
    """A segment in device memory, of which only the asked pages are copied to the host."""

    def __init__(self, segment: Segment) -> None:
        self._segment = segment

    def gather(self, offset: int, stride: int, extent: int, pages: NDArray[np.int64]) -> NDArray[np.uint8]:
        return device_rows(self._segment.address + offset, stride, extent, pages, self._segment.device_id)


def memory_of(segments: Sequence[Segment]) -> list[Memory]:
    """The bytes of each segment, without a copy; valid while vLLM keeps its caches."""
    return [
        np.ctypeslib.as_array((ctypes.c_uint8 * segment.length).from_address(segment.address))
        if segment.device == "cpu"
        else _DevicePages(segment)
        for segment in segments
    ]


def starts_of(order: ReceiveOrder, manifest: Manifest, late_starts: Mapping[int, int]) -> tuple[int, ...]:
    """The first token of each group that an order was to bring: after the prefix hit, inside the window."""
    starts = []
    for number, (group, table) in enumerate(zip(manifest.groups, order.blocks, strict=True)):
        first = next((i for i, block in enumerate(table.ids) if block), len(table.ids)) + table.first_block
        start = order.start if group.kind is GroupKind.STATE else max(order.start, first * group.block_tokens)
        starts.append(min(order.stop, late_starts.get(number, start)))
    return tuple(starts)


def received_sums(
    manifest: Manifest, memory: Sequence[Memory], order: ReceiveOrder, starts: Sequence[int]
) -> list[Sum]:
    """The decode side's sums of an order."""
    tables = [_table(blocks.first_block, blocks.ids) for blocks in order.blocks]
    return sums(manifest, memory, tables, starts, order.stop)


def of_pieces(pieces: Sequence[SumPiece]) -> list[Sum]:
    """Sums as they came over the side channel.

    Raises:
        ProtocolError: values that are no whole numbers of 64 bits.
    """
    if any(len(piece.values) % 8 for piece in pieces):
        raise ProtocolError("sums: the length of their values is no multiple of 8")
    return [Sum(p.layer, p.role, p.first_index, np.frombuffer(p.values, dtype="<u8")) for p in pieces]


def to_messages(token: bytes, job: int, worker: int, found: Sequence[Sum]) -> Iterator[Sums]:
    """Sums in messages that each fit a request; the last one says so."""
    step = MAX_PIECE_BYTES // 8
    pieces = [
        SumPiece(one.layer, one.role, one.first_index + i, one.values[i : i + step].astype("<u8").tobytes())
        for one in found
        for i in range(0, len(one.values), step)
    ]
    batch: list[SumPiece] = []
    size = 0
    for piece in pieces:
        length = len(piece.values) + len(piece.layer.encode()) + _NAMES_BYTES
        if batch and size + length > MAX_PIECES_BYTES:
            yield Sums(token, job, worker, tuple(batch), False)
            batch, size = [], 0
        batch.append(piece)
        size += length
    yield Sums(token, job, worker, tuple(batch), True)


class SumMaker:
    """The prefill side's thread of one worker; `worker` is its number among the instance's, `token` its secret."""

    def __init__(self, endpoint: str, keys: Keys | None, manifest: Manifest, worker: int, token: bytes) -> None:
        self._endpoint = endpoint
        self._keys = keys
        self._manifest = manifest
        self._memory = memory_of(manifest.segments)
        self._worker = worker
        self._token = token
        self._wake = Wake()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="pd-sums", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the thread; nothing reads the caches after this returns."""
        self._stop = True
        self._wake.set()
        self._thread.join(timeout=_CLOSE_S)

    def _run(self) -> None:
        client = SideChannelClient(keys=self._keys)
        try:
            while not self._stop:
                outcome = self._ask(client, NextJob(self._token, self._worker), _JOB_WAIT_S)
                if isinstance(outcome, Job):
                    for message in self._make(outcome):
                        self._ask(client, message, _RETRY_S)
                elif isinstance(outcome, ProtocolError | Failure):
                    self._pause(client)  # the side channel is not there yet, or not any more
        finally:
            client.close()

    def _ask(self, client: SideChannelClient, request: Request, timeout: float) -> Outcome | None:
        """The outcome of a request, None when this thread is to end."""
        token = client.send(self._endpoint, request, timeout)
        while not self._stop:
            wait(client, self._wake, None)
            if (outcome := dict(client.receive()).get(token)) is not None:
                return outcome
        return None

    def _pause(self, client: SideChannelClient) -> None:
        until = time.monotonic() + _RETRY_S
        while not self._stop and time.monotonic() < until:
            wait(client, self._wake, until)

    def _make(self, job: Job) -> Iterator[Sums]:
        try:
            tables = [_table(table.first_block, np.frombuffer(table.ids, dtype="<i4")) for table in job.tables]
            found = sums(self._manifest, self._memory, tables, job.starts, job.stop)
        except Exception as error:  # nothing is vouched for: this reader's check fails, and no other's
            logger.error("sums of job %d: %s: %s", job.job, type(error).__name__, error)
            found = []
        yield from to_messages(self._token, job.job, self._worker, found)


def _table(first_block: int, ids: Sequence[int] | NDArray[np.int32]) -> BlockTable:
    return BlockTable(first_block, np.asarray(ids, dtype=np.int64))

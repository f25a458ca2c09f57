"""Checksums over a request's caches, made beside the forward and the transfers, and compared between the two sides.

On the decode side the transfer thread asks the prefill side for its checksums, when it has read all or when the prefill
side says that all is written, and has a thread of its own make ours. On the prefill side a thread of each worker asks
its own instance's side channel for jobs, sleeps until there is one, and sends back what it finds. The blocks are under
a lease all the while, so nothing writes them.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import TYPE_CHECKING

import numpy as np

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.checksums.sums import Checksum
from vllm_pd_connector.geometry.manifest import GroupKind, Manifest, Segment
from vllm_pd_connector.protocol.wire.fields import MAX_PIECE_BYTES, MAX_PIECES_BYTES
from vllm_pd_connector.protocol.wire.messages import ChecksumPart, JobChecksums
from vllm_pd_connector.worker.staging.cuda import device_rows

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from numpy.typing import NDArray

    from vllm_pd_connector.geometry.checksums.digest import Memory
    from vllm_pd_connector.metadata import ReceiveRequest

ONE_IN = 16
_NAMES_BYTES = 128  # of a piece, beside its layer's name


def is_chosen(request: ReceiveRequest, how: str) -> bool:
    """Whether a request is verified; all ranks choose alike."""
    if request.lease is not None:
        drawn = request.lease.nonce[0]
    else:
        drawn = zlib.crc32(request.push.prefill.name.encode()) if request.push is not None else 0
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


def starts_of(request: ReceiveRequest, manifest: Manifest, first_valid_tokens: Mapping[int, int]) -> tuple[int, ...]:
    """The first token of each group that a request was to bring: after the prefix hit, inside the window."""
    starts = []
    for number, (group, table) in enumerate(zip(manifest.groups, request.blocks, strict=True)):
        start = request.start if group.kind is GroupKind.STATE else max(request.start, table.begin * group.block_tokens)
        starts.append(min(request.stop, first_valid_tokens.get(number, start)))
    return tuple(starts)


def of_pieces(pieces: Sequence[ChecksumPart]) -> list[Checksum]:
    """Checksums as they came over the side channel.

    Raises:
        ProtocolError: values that are no whole numbers of 64 bits.
    """
    if any(len(piece.values) % 8 for piece in pieces):
        raise ProtocolError("sums: the length of their values is no multiple of 8")
    return [Checksum(p.layer, p.role, p.first_index, np.frombuffer(p.values, dtype="<u8")) for p in pieces]


def to_messages(token: bytes, job: int, worker: int, found: Sequence[Checksum]) -> Iterator[JobChecksums]:
    """Checksums in messages that each fit a request; the last one says so."""
    step = MAX_PIECE_BYTES // 8
    pieces = [
        ChecksumPart(one.layer, one.role, one.first_index + i, one.values[i : i + step].astype("<u8").tobytes())
        for one in found
        for i in range(0, len(one.values), step)
    ]
    batch: list[ChecksumPart] = []
    size = 0
    for piece in pieces:
        length = len(piece.values) + len(piece.layer.encode()) + _NAMES_BYTES
        if batch and size + length > MAX_PIECES_BYTES:
            yield JobChecksums(token, job, worker, tuple(batch), False)
            batch, size = [], 0
        batch.append(piece)
        size += length
    yield JobChecksums(token, job, worker, tuple(batch), True)

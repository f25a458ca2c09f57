"""Strided copies on a GPU, in streams of our own: the forward's is neither used nor waited for (but see `gpudirect`).

A chunk's copies are one kernel over an array of descriptors (`kernel`), which Triton compiles when the worker starts.
Where it cannot, torch makes them one by one, with the same bytes; that is said once, since it costs the transfer thread
some 50 us a copy. The end of a chunk is an event, asked for between other work.

What is allocated here comes after vLLM has measured how much memory is left and has taken its share of it, so it must
fit into what `--gpu-memory-utilization` leaves.
"""

from __future__ import annotations

import functools
import logging
import time
from typing import TYPE_CHECKING, Any, Protocol

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.worker.staging.base import Memory
from vllm_pd_connector.worker.staging.gpudirect import flusher
from vllm_pd_connector.worker.staging.views import ArrayAt, cache_array, element_arrays

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from vllm_pd_connector.geometry.staging.strided_copy import Copy
    from vllm_pd_connector.worker.staging.base import Copying

logger = logging.getLogger(__name__)


class Launcher(Protocol):
    """A way to make copies on a device; each step launches some on the current stream, and yields what must live until
    they are done."""

    def __call__(self, base: int, copies: Iterable[Copy], device: Any, *, gather: bool) -> Iterator[object]: ...


def by_torch(base: int, copies: Iterable[Copy], device: Any, *, gather: bool) -> Iterator[object]:
    """One launch per copy: the reference that the kernel is compared with."""
    import torch

    for copy in copies:
        staging, cache = (torch.as_tensor(array, device=device) for array in element_arrays(base, copy))
        if gather:
            staging.copy_(cache)
        else:
            cache.copy_(staging)
        yield staging, cache


class _Launched:
    """Copies that run on a device, behind an event."""

    def __init__(self, stream: Any, launches: Iterator[object]) -> None:
        import torch

        self._torch, self._stream, self._launches = torch, stream, launches
        self._alive: list[object] = []
        self._event: Any = None

    @property
    def launched(self) -> bool:
        return self._event is not None

    def advance(self, until: float) -> bool:
        if self._event is None:
            with self._torch.cuda.stream(self._stream):
                for used in self._launches:
                    self._alive.append(used)
                    if time.monotonic() >= until:
                        return False
                self._mark()
        return bool(self._event.query())

    def stop(self) -> None:
        if self._event is None:
            self._launches = iter(())
            self._mark()
        self._event.synchronize()

    def _mark(self) -> None:
        self._event = self._torch.cuda.Event()
        self._event.record(self._stream)


class CudaCopier:
    """See the module. Belongs to one thread, whose current device it is.

    Args:
        device_id: as this process numbers it.
        launch: how to copy; None for the kernel, or torch where that cannot be had.
        states: whether the model has recurrent ones.
    """

    def __init__(self, device_id: int, launch: Launcher | None = None, *, states: bool = False) -> None:
        import torch

        self._torch = torch
        self._device = torch.device("cuda", device_id)
        self._stream, self._blanks = stream_for("copies", device_id), stream_for("blanks", device_id)
        self._flush = flusher(device_id, states)
        self._held: dict[str, int] = {}
        self._launch = launch or self._compiled()

    def _compiled(self) -> Launcher:
        try:
            from vllm_pd_connector.worker.staging.kernel import by_kernel, compile_all

            with self._torch.cuda.stream(self._stream):
                compile_all(self._device)
            self._stream.synchronize()
        except Exception as error:  # whatever Triton, its compiler or the driver raise
            logger.warning(
                "conversion on %s copies one by one, which is slower: its kernel cannot be compiled (%s: %s)",
                self._device,
                type(error).__name__,
                error,
            )
            return by_torch
        return by_kernel

    def allocate(self, length: int, purpose: str) -> Memory:
        try:
            owner = self._torch.empty(length, dtype=self._torch.uint8, device=self._device)
        except self._torch.OutOfMemoryError as error:
            free, total = self._torch.cuda.mem_get_info(self._device)
            ours = "".join(f", beside {held} for {name}" for name, held in self._held.items())
            raise TransferError(
                f"{purpose}: {length} bytes do not fit on {self._device}{ours}: {free} of {total} bytes are free after "
                "vLLM has taken its share, which leaves out what a connector allocates; lower "
                "--gpu-memory-utilization, or staging_bytes (0 for none)"
            ) from error
        self._held[purpose] = length
        logger.info("%d bytes on %s beside what vLLM has counted: %s", length, self._device, purpose)
        return Memory(Segment(owner.data_ptr(), length, "cuda", self._device.index), owner)

    def begin(self, base: int, copies: Iterable[Copy], *, gather: bool = False) -> Copying:
        return _Launched(self._stream, self._launch(base, copies, self._device, gather=gather))

    def blank(self, copies: Iterable[Copy]) -> None:
        try:
            with self._torch.cuda.stream(self._blanks):
                for copy in copies:
                    self._torch.as_tensor(cache_array(copy), device=self._device).zero_()
        finally:  # after an error, too: the blocks go to others, and what was launched would land there
            self._blanks.synchronize()

    def arrived(self) -> None:
        self._flush()


@functools.cache
def stream_for(use: str, device_id: int) -> Any:
    """One stream of a GPU for each use, for good. PyTorch hands out 32 in turns and takes none back: who made new ones
    with each waking would get vLLM's own in the end, and copies would wait for forwards."""
    import torch

    return torch.cuda.Stream(torch.device("cuda", device_id))


def device_rows(address: int, stride: int, length: int, rows: NDArray[np.int64], device_id: int) -> NDArray[np.uint8]:
    """Bytes of a GPU's memory on the host, shape (len(rows), length): row i begins at `address + rows[i] * stride`."""
    import torch

    count = int(rows.max()) + 1 if len(rows) else 0
    array = ArrayAt(address, "|u1", (count, length), (stride, 1))
    device = torch.device("cuda", device_id)
    with torch.cuda.stream(stream_for("rows", device_id)):
        picked = torch.as_tensor(array, device=device)[torch.as_tensor(rows, device=device)]
        found: NDArray[np.uint8] = picked.cpu().numpy()
    return found

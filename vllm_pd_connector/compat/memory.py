"""torch tensors as memory: which storage, where, how long."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from vllm_pd_connector.geometry.manifest import Segment

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch


def segment_of(tensor: torch.Tensor) -> Segment:
    """The whole storage that a cache view belongs to (vLLM 0.32: one storage for all layers)."""
    storage = tensor.untyped_storage()
    device = tensor.device
    return Segment(
        address=storage.data_ptr(),
        length=storage.nbytes(),
        device=device.type,
        device_id=device.index or 0,
    )


def make_device_current(segments: Sequence[Segment]) -> None:
    """Make the segments' device the calling thread's own.

    A thread that moves device memory needs it: libraries take the thread's current context, device 0 by default. In a
    new thread CUDA's device is 0 before any context is current, and choosing it again makes none so: something must be
    done there (vLLM 0.32 does likewise, `platforms/cuda.py`, `set_device`).
    """
    device = next((segment for segment in segments if segment.device != "cpu"), None)
    if device is not None:
        import torch

        torch.accelerator.set_device_index(device.device_id)
        torch.zeros(1, device=torch.device(device.device, device.device_id))


class Mark(Protocol):
    """A point in what a thread launched on a device; to be asked from any thread. A `torch.cuda.Event` is one."""

    def query(self) -> bool:
        """Whether everything before it has been done."""

    def synchronize(self) -> None:
        """Wait for that."""


class _Done:
    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return


_DONE = _Done()


def marker(segments: Sequence[Segment]) -> Callable[[], Mark]:
    """A function to call when everything that a step writes to these segments was launched, in the thread that did.

    On the CPU what was launched is done. On a device an event is recorded behind it.
    """
    if all(segment.device == "cpu" for segment in segments):
        return lambda: _DONE
    import torch

    def mark() -> Mark:
        event: Mark = torch.cuda.Event(blocking=True)  # who waits for it sleeps; `torch.Event` takes no notice of that
        event.record()  # type: ignore[attr-defined]  # of the event, not of the mark
        return event

    return mark


def byte_strides(tensor: torch.Tensor) -> tuple[int, ...]:
    """Strides in bytes, per dimension."""
    size = tensor.element_size()
    return tuple(stride * size for stride in tensor.stride())

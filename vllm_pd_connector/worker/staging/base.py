"""What the caches' device must be able to do for conversion: have memory, copy with strides, zero."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_pd_connector.geometry.manifest import Segment
    from vllm_pd_connector.geometry.staging.strided_copy import Copy


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory that lives as long as this object."""

    segment: Segment
    owner: Any


class Copying(Protocol):
    """Copies that were begun."""

    @property
    def launched(self) -> bool:
        """Whether nothing is left to do but to wait for a device."""

    def advance(self, until: float) -> bool:
        """Go on, not much longer than until the monotonic clock says `until`; whether all is done."""

    def stop(self) -> None:
        """Give up what was not begun; nothing is read or written any more when this returns."""


class Copier(Protocol):
    """How this worker's kind of memory is copied."""

    def allocate(self, length: int, purpose: str) -> Memory:
        """Memory of `length` bytes on this copier's device; `purpose` names it where there is none.

        Raises:
            TransferError: there is none.
        """

    def begin(self, base: int, copies: Iterable[Copy], *, gather: bool = False) -> Copying:
        """Copies whose `staging` counts from the address `base`: into the cache, or, to `gather`, out of it."""

    def blank(self, copies: Iterable[Copy]) -> None:
        """Zero what copies name of the cache; it is done when this returns."""

    def arrived(self) -> None:
        """Make what the transport brought, and reported, visible to what is started from now on.

        Raises:
            TransferError: it may not be.
        """

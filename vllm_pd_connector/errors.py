"""The one tree of errors; everything this package raises on purpose is a `PDConnectorError`.

Errors are caught by kind at the border (a request, a peer, an engine start) and their text is what a user reads, so
each message names the field, both values, and what to do. Libraries' exceptions are translated at the edge of the
module that talks to the library.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import logging
    from collections.abc import Sequence


class PDConnectorError(Exception):
    """Base of all errors of this package."""


class InvalidConfig(PDConnectorError):
    """A configuration value that cannot be used; raised when an engine starts, before any traffic."""


class InvalidTopology(PDConnectorError):
    """Parallel sizes that vLLM itself would not run (a rank outside its group, heads that do not divide)."""


class InvalidManifest(PDConnectorError):
    """A manifest that contradicts itself: tensors outside their segment, overlapping bytes, unknown groups."""


class UnsupportedCache(PDConnectorError):
    """A KV-cache group or tensor of a kind that this version does not know how to move."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One field in which two sides differ so that they cannot be paired.

    `local` and `remote` are printed values; `advice` says what a user changes.
    """

    field: str
    local: str
    remote: str
    advice: str = ""

    def __str__(self) -> str:
        text = f"{self.field}: {self.local} here, {self.remote} there"
        return f"{text} — {self.advice}" if self.advice else text


_SHOWN = 64


class IncompatiblePeer(PDConnectorError):
    """Two instances that cannot be paired; carries every difference, not only the first, and prints the first 64."""

    def __init__(self, summary: str, differences: Sequence[Difference] = ()):
        self.summary = summary
        self.differences = tuple(differences)
        shown = [str(difference) for difference in self.differences[:_SHOWN]]
        more = [f"and {len(self.differences) - _SHOWN} more"] if len(self.differences) > _SHOWN else []
        super().__init__("\n  ".join([summary, *shown, *more]))


class BindError(PDConnectorError):
    """Block ids or a token range that do not fit the manifests; fails one request."""


class ProtocolError(PDConnectorError):
    """A message that is malformed, too large, of another version or unexpected in this state."""


class Unreachable(ProtocolError):
    """Nobody takes connections at an address, or nobody knows the name of its host."""


class Busy(ProtocolError):
    """No room here for one more request just now; it may be made again soon."""


class UnauthenticatedPeer(ProtocolError):
    """A peer that cannot prove who it is where proof is asked for."""


class OtherWeights(ProtocolError):
    """Caches of other weights than those of here, or of weights that were changed in place and not named."""


class Withdrawn(ProtocolError):
    """What was handed over means nothing since an operator changed what it was computed with."""


class TransferError(PDConnectorError):
    """A transport operation that failed.

    Attributes:
        retryable: the same operation may work when repeated (a peer that is being replaced, a full queue).
        terminal: no byte moves any more because of this operation; if false, data may still land and the
            destination blocks must stay in quarantine.
    """

    def __init__(self, message: str, *, retryable: bool = False, terminal: bool = True):
        super().__init__(message)
        self.retryable = retryable
        self.terminal = terminal


class PeerLost(TransferError):
    """The peer is gone (process died, connection reset). Not `terminal` where what was written may still arrive there:
    the kernel goes on to send what a closed connection held."""

    def __init__(self, message: str, *, terminal: bool = True):
        super().__init__(message, retryable=True, terminal=terminal)


class DeadlineExceeded(PDConnectorError):
    """A phase of a request took longer than its deadline."""


def reason_of(error: Exception, logger: logging.Logger, request_id: str, what: str) -> ProtocolError:
    """Why one request fails by an error, or goes on without what it came for. Whatever is no ProtocolError is a defect
    of ours, which must cost nothing else; it is logged with `what` could not be done."""
    if isinstance(error, ProtocolError):
        return error
    logger.error("request %s: %s", request_id, what, exc_info=error)
    return ProtocolError(f"unexpected {type(error).__name__}: {error}")

"""How a transfer ends, as events of the machines that count those which may still write: receives and pushes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TransferDone:
    """Transfer `index` has written its last byte to its destination, conversion included."""

    index: int


@dataclass(frozen=True, slots=True)
class TransferFailed:
    """Transfer `index` failed or was not started; if not `terminal`, it may still write, until a later event."""

    index: int
    reason: str
    terminal: bool


TransferEnd = TransferDone | TransferFailed

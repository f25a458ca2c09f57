"""What one request has under way: what the staging buffer gave up is no success."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm_pd_connector.protocol.transfers import TransferFailed
from vllm_pd_connector.worker.in_flight import InFlight


def test_what_the_staging_buffer_holds_no_more_without_having_said_so_has_failed() -> None:
    """Its end was lost, with an error elsewhere in the turn: bytes may be missing."""
    nothing: Any = SimpleNamespace()
    stager: Any = SimpleNamespace(holds=lambda owner: False)
    flight = InFlight("a push", nothing, nothing, nothing, stager, writes=True, staged={3})
    [(end, error)] = flight.poll(0.0)
    assert isinstance(end, TransferFailed) and end.index == 3 and end.terminal and error is None
    assert not flight.may_write

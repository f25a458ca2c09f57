"""Several chunks of one write fail together: whichever is heard of first or last, what one may still write is known."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.protocol.transfers import TransferFailed
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.worker.in_flight import InFlight
from vllm_pd_connector.worker.staging.stager import Stager
from vllm_pd_connector.worker.staging.stream import InFlightChunk, Stream

UNSURE, SURE = TransferError("it may go on", terminal=False), TransferError("it is over", terminal=True)
NOTHING: Any = SimpleNamespace()


class Transport:
    """A transfer is what it ends with."""

    def poll(self, transfer: Any) -> TransferStatus:
        if isinstance(transfer.end, TransferError):
            raise transfer.end
        return transfer.end


@pytest.mark.parametrize("given_up", [False, True], ids=["running", "given up"])
@pytest.mark.parametrize("ends", [*itertools.product((SURE, UNSURE, TransferStatus.DONE), repeat=3)])
def test_a_write_is_over_only_if_all_of_its_chunks_are(ends: tuple[Any, ...], given_up: bool) -> None:
    stager, owner = Stager(Transport(), (), 0), object()  # type: ignore[arg-type]
    stager.staging = SimpleNamespace(give=lambda slot: None)  # type: ignore[assignment]
    stream = Stream(owner, 0, NOTHING, NOTHING, iter(()), made=True)
    chunk: Any = SimpleNamespace(writes=True)
    for number, end in enumerate(ends):
        moving: Any = SimpleNamespace(end=end)
        stream.in_flight.append(InFlightChunk(stream, chunk, number, NOTHING, moving))
    stager._streams.append(stream)
    flight = InFlight(owner, NOTHING, NOTHING, NOTHING, stager, writes=True, staged={0: stream}, watches={0: None})
    if given_up:
        flight.cancel()
    told = []
    for _ in range(4):
        told += [flight.staged_ended(ended, error) for ended, error in stager.poll()]
        told += [end for end, _ in flight.poll(0.0, 0.0)]
    over = [end for end in told if getattr(end, "terminal", True)]
    assert bool(over) == (UNSURE not in ends), told
    assert flight.unheard == (UNSURE in ends) and flight.may_write == ({0} if UNSURE in ends else set())


@pytest.mark.parametrize("ends", [(UNSURE, SURE), (SURE, UNSURE), (UNSURE, UNSURE), (SURE, SURE)])
def test_what_one_result_ends_knows_the_others_that_came_with_it(ends: tuple[TransferError, ...]) -> None:
    """The link's loss, or the failure of the first of two, ends a write whose own result is next in the list."""
    stager, owner = Stager(Transport(), (), 0), object()  # type: ignore[arg-type]
    stager.staging = SimpleNamespace(give=lambda slot: None)  # type: ignore[assignment]
    streams, chunk = {}, SimpleNamespace(writes=True)
    for index, end in enumerate(ends):
        stream = streams[index] = Stream(owner, index, NOTHING, NOTHING, iter(()), made=True)
        moving: Any = SimpleNamespace(end=end)
        stream.in_flight.append(InFlightChunk(stream, chunk, index, NOTHING, moving))  # type: ignore[arg-type]
        stager._streams.append(stream)
    flight = InFlight(owner, NOTHING, NOTHING, NOTHING, stager, writes=True, staged=streams, watches={0: None, 1: None})
    results = stager.poll()
    assert len(results) == 2
    flight.cancel()
    unsure = {index for index, end in enumerate(ends) if end is UNSURE}
    assert flight.may_write == unsure, "it is decided by this whether the blocks there are kept"
    for stream, error in results:
        end = flight.staged_ended(stream, error)
        assert isinstance(end, TransferFailed) and end.terminal == (stream.index not in unsure)
    assert flight.may_write == unsure and not list(flight.poll(0.0, 0.0))

"""A transport inside one process: endpoints find each other by name and bytes are copied by address.

For tests and dry runs of everything above the port, with the manners of a real library: a transfer moves nothing
before it is polled, cannot be cancelled, and goes on after `disconnect`. The ways in which a peer can fail are
switches on `faults`, read at every poll, so that a test orders failures exactly and never sleeps.
"""

from __future__ import annotations

import ctypes
import threading
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.transport.base import Transfer, TransferStatus, TransportPeer, Use, options_of
from vllm_pd_connector.transport.endpoint import seal, unseal
from vllm_pd_connector.transport.ranges import Ranges, cut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_pd_connector.geometry.manifest import Segment
    from vllm_pd_connector.geometry.runs import Runs

NAME = "loopback"


class LoopbackOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The loopback transport has nothing to choose."""


@dataclass(slots=True)
class Faults:
    """What is wrong with an endpoint.

    `lost`: its process is gone; every operation of a peer with it is `PeerLost`. `frozen`: it answers nothing;
    transfers of peers with it stay RUNNING. `held`: transfers that this endpoint itself
    started stay RUNNING. `stalled`: the same for peers that were connected before this many `replace_endpoint`s.
    `failures`: raised by the next polls of transfers that this endpoint started, one each. `unsettled`: so often
    more it says that not all has landed that an ended peer had sent to it.
    """

    lost: bool = False
    frozen: bool = False
    held: bool = False
    stalled: int = 0
    unsettled: int = 0
    failures: deque[TransferError] = field(default_factory=deque)


@dataclass(eq=False, slots=True)
class _Peer:
    name: str
    ranges: Ranges
    incarnation: int
    connected: bool = True


@dataclass(eq=False, slots=True)
class _Transfer:
    peer: _Peer
    work: Runs
    finished: bool = False

    @property
    def descriptors(self) -> int:
        return len(self.work)

    @property
    def left(self) -> int:
        return int(not self.finished)


_endpoints: dict[str, LoopbackTransport] = {}
_lock = threading.Lock()


class LoopbackTransport:
    """See `base.Transport`; two of these in one process (any threads) can be connected. `serves`: as for NIXL."""

    name = NAME

    def __init__(self, options: LoopbackOptions | None = None, *, serves: bool = True) -> None:
        self.faults = Faults()
        self._serves = serves
        self._incarnation = 0
        self._name = uuid.uuid4().hex
        self._ranges = Ranges.of((), "this worker")
        with _lock:
            _endpoints[self._name] = self

    def register(self, segments: Sequence[Segment]) -> None:
        if any(segment.device != "cpu" for segment in segments):
            raise TransferError("the loopback transport copies CPU memory only; choose another for device memory")
        self._ranges = Ranges.of(segments, "this worker")

    def describe(self) -> bytes:
        return seal(NAME, self._name, b"")

    def connect(self, endpoint: bytes, segments: Sequence[Segment]) -> TransportPeer:
        peer = _Peer(unseal(NAME, endpoint).name, Ranges.of(segments, "the peer"), self._incarnation)
        _reach(peer)
        return peer

    def disconnect(self, peer: TransportPeer) -> None:
        assert isinstance(peer, _Peer)
        peer.connected = False

    def read(self, peer: TransportPeer, runs: Runs) -> Transfer:
        assert isinstance(peer, _Peer) and peer.connected
        return _Transfer(peer, cut(runs, peer.ranges, self._ranges, None))

    def write(self, peer: TransportPeer, runs: Runs) -> Transfer:
        assert isinstance(peer, _Peer) and peer.connected
        return _Transfer(peer, cut(runs, self._ranges, peer.ranges, None))

    def poll(self, transfer: Transfer) -> TransferStatus:
        assert isinstance(transfer, _Transfer) and not transfer.finished, "polled after its end"
        try:
            if self.faults.failures:
                raise self.faults.failures.popleft()
            target = _reach(transfer.peer)
        except TransferError:
            transfer.finished = True
            raise
        if self.faults.held or target.faults.frozen or transfer.peer.incarnation < self.faults.stalled:
            return TransferStatus.RUNNING
        runs = transfer.work
        for source, destination, length in zip(
            runs.source.tolist(), runs.destination.tolist(), runs.length.tolist(), strict=True
        ):
            ctypes.memmove(destination, source, length)
        transfer.finished = True
        return TransferStatus.DONE

    def settle(self, peer: TransportPeer) -> bool:  # see `base.has_settled`
        assert isinstance(peer, _Peer)
        self.faults.unsettled, settles = max(0, self.faults.unsettled - 1), not self.faults.unsettled
        return settles

    def replace_endpoint(self, peer: TransportPeer) -> None:
        assert isinstance(peer, _Peer)
        if self._serves:
            raise TransferError("this loopback endpoint is a target of its peers")
        if peer.incarnation == self._incarnation:
            self._incarnation += 1

    def close(self) -> None:
        with _lock:
            _endpoints.pop(self._name, None)


def create(options: Mapping[str, object], use: Use) -> LoopbackTransport:
    """Entry point; see `registry`."""
    return LoopbackTransport(options_of(NAME, options, LoopbackOptions), serves=use.serves)


def _reach(peer: _Peer) -> LoopbackTransport:
    """The peer's endpoint.

    Raises:
        PeerLost: it was closed or is switched to lost.
    """
    with _lock:
        target = _endpoints.get(peer.name)
    if target is None or target.faults.lost:
        raise PeerLost(f"loopback endpoint {peer.name} is gone; connect to its new incarnation")
    return target

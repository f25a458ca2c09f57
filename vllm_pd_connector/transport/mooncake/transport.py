"""Mooncake's Transfer Engine, peer to peer, spoken to through its Python module; `engine` starts it.

What the library does not do, and this module does:
- **A call never waits.** The batched calls of Mooncake either block, burning a core and a half, or give a batch whose
  state can only be asked for by blocking. A batch of one descriptor is the exception: it is submitted without waiting,
  its state is read without waiting, and that state is exact. So runs are merged by the planner, cut at a few MiB here,
  and each becomes a batch of one; a bounded number is in flight per transfer and per peer, and `poll` submits more.
- **The end is the end.** A transfer is reported when each of its descriptors has ended: one that was refused says
  nothing of its neighbours, which may still run. An ended descriptor does not touch local memory any more, so failed
  reads are terminal. The peer of a failed write may still be taking bytes from its socket: not terminal, unless the
  peer is known to be dead, which one that fell silent is not.
- **Peers that died are noticed** by a line to each peer (`transport.liveness`); the library says nothing of it before
  something is asked of the peer. A descriptor is acknowledged after the peer has its bytes in its memory.
- **One stopped peer does not stop the others.** Opening a peer blocks inside the library and blocks every other submit;
  `opening` does it, after the peer has answered on its line.

Source of the library's behaviour: mooncake-transfer-engine 0.3.13.post1, observed and read.
"""

from __future__ import annotations

import logging
import os
import time
import uuid
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.transport.addresses import host_identity, local_address
from vllm_pd_connector.transport.base import Transfer, TransferStatus, TransportPeer, Use, follow, options_of
from vllm_pd_connector.transport.endpoint import seal, unseal
from vllm_pd_connector.transport.liveness import SAYS, LivenessHub
from vllm_pd_connector.transport.liveness_link import LivenessLink, LivenessState
from vllm_pd_connector.transport.mooncake.engine import (
    MAX_IN_FLIGHT,
    RDMA_DEVICES,
    MooncakeOptions,
    SegmentNames,
    check,  # noqa: F401  # see `registry.check`
    check_options,
    check_reachability,
    choose_protocol,
    load_module,
    own_devices,
    require_offered,
    start_engine,
)
from vllm_pd_connector.transport.mooncake.lanes import Lanes, lanes_per_peer
from vllm_pd_connector.transport.mooncake.opening import Opening, Openings
from vllm_pd_connector.transport.mooncake.whereabouts import Whereabouts, locate
from vllm_pd_connector.transport.ranges import Ranges, cut

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from vllm_pd_connector.geometry.manifest import Segment
    from vllm_pd_connector.geometry.runs import Runs

logger = logging.getLogger(__name__)

NAME = "mooncake"

_SUBMIT_S = 0.001  # no more is submitted in a call that took this long

# Descriptors end roughly in the order of their submission (four connections): behind this many that run, none is done.
_LOOK_AHEAD = 8

# Over RDMA a descriptor ends within milliseconds, and an exchange that is longer under way holds up other peers. (Over
# TCP there are no exchanges with an open peer, and ending none does nothing.)
STILL_S = 3.0

# A dying process closes its sockets one after another; a failed descriptor may be known before the lost line.
_GRACE_S = 0.25


@dataclass(eq=False, slots=True)
class _Peer:
    """`queued` counts the peer's descriptors in the library; one of them ended, or the first was submitted, at
    `moved_at`. `connections` counts those that were not disconnected; `segments` are all that these were made with."""

    name: str
    opening: Opening
    segments: frozenset[Segment]
    ranges: Ranges
    liveness: LivenessLink
    running: int = 0
    queued: int = 0
    moved_at: float = 0.0
    connections: int = 1
    leaving: bool = False


@dataclass(eq=False, slots=True)
class _Transfer:
    """Descriptors before `next` were submitted; `in_flight` holds (batch, bytes) of those that have not ended."""

    peer: _Peer
    opcode: Any
    local: list[int]
    remote: list[int]
    length: list[int]
    writes: bool
    next: int = 0
    in_flight: deque[tuple[int, int]] = field(default_factory=deque)
    in_flight_bytes: int = 0
    status: TransferStatus = TransferStatus.RUNNING
    failed: str = ""
    failed_at: float = 0.0
    unsettled: bool = False
    outcome: TransferStatus | TransferError | None = None
    reported: bool = False

    @property
    def descriptors(self) -> int:
        return len(self.length)

    @property
    def left(self) -> int:
        return len(self.length) - self.next + len(self.in_flight)


class MooncakeTransport:
    """See `base.Transport`.

    Raises:
        InvalidConfig: Mooncake is not installed, an option is out of range, or the machine has not what it names.
        TransferError: the engine cannot start, or does not answer at the address that peers will be told.
    """

    name = NAME

    def __init__(self, options: MooncakeOptions | None = None, use: Use | None = None) -> None:
        use = use or Use()
        self._options = own_devices(options or MooncakeOptions(), use.device_id)
        check_options(self._options, os.environ)
        protocol = choose_protocol(self._options, RDMA_DEVICES, use.memory)
        self._address = local_address(self._options.address, self._options.route_to)
        check_reachability(self._options, self._address, use.serves)
        self._module = load_module(protocol, self._address)
        self._name, self._serves = f"{SAYS}{uuid.uuid4().hex}", use.serves
        self._ranges = Ranges.of((), "this worker")
        self._peers: dict[str, _Peer] = {}
        self._torn: _Peer | None = None  # from the library last, at `_torn_at`
        self._torn_at = 0.0
        self._segment_names = SegmentNames()
        self._liveness = LivenessHub(str(self._address), self._name, silence_s=self._options.silence_timeout)
        try:
            self._engine, self._protocol = start_engine(
                self._module, self._options, protocol, self._address, serves=use.serves
            )
        except Exception:
            self._liveness.close()
            raise
        self.over = f"mooncake {self._protocol}" + (f" on {self._options.device}" if self._options.device else "")
        self._openings = Openings(self._engine, self._options.connect_timeout)
        count = lanes_per_peer(self._protocol, os.environ)
        self._lanes = Lanes(self._engine, self._openings, self._module.TransferOpcode.Read, count)
        logger.info("Mooncake listens at %s with protocol %s", self._address, self._protocol)

    def register(self, segments: Sequence[Segment]) -> None:
        ranges = Ranges.of(segments, "this worker")
        if ranges.cuda.any() and self._protocol == "tcp" and not self._module.SUPPORT_CUDA:
            raise TransferError(
                "the installed Mooncake was built without CUDA and the caches are on a CUDA device; install "
                "mooncake-transfer-engine or mooncake-transfer-engine-cuda13 instead"
            )
        places = {
            (segment.device, segment.device_id): f"cuda:{segment.device_id}" if segment.device == "cuda" else "*"
            for segment in segments
        }
        for place, location in places.items():
            here = [segment for segment in segments if (segment.device, segment.device_id) == place]
            status = self._engine.batch_register_memory(
                [segment.address for segment in here], [segment.length for segment in here], location
            )
            if status:
                hint = "; RDMA devices reach it with the kernel module nvidia-peermem" if place[0] == "cuda" else ""
                raise TransferError(
                    f"Mooncake refuses {len(here)} segments of {place[0]} memory (status {status}){hint}; locked "
                    "memory must be unlimited (ulimit -l)"
                )
        if self._serves:
            require_offered(self._address, self._engine.get_rpc_port(), ranges, self._protocol)
        self._ranges = ranges

    def describe(self) -> bytes:
        where = Whereabouts(
            str(self._address), self._engine.get_rpc_port(), self._liveness.port, self._protocol, host_identity()
        )
        return seal(NAME, self._name, msgspec.msgpack.encode(where), self._protocol)

    def connect(self, endpoint: bytes, segments: Sequence[Segment]) -> TransportPeer:
        made = unseal(NAME, endpoint)
        ranges = Ranges.of(segments, "the peer")
        if made.name == self._name:
            raise TransferError(f"{made.name} is this worker's own")
        known = self._peers.get(made.name)
        if known is not None and known.liveness.state is not LivenessState.LOST:
            return self._share(known, segments)
        where, address = locate(made, self._protocol, self._address)
        self._lanes.meet(made.name)
        liveness = self._liveness.dial(str(address), where.line_port, made.name, self._options.connect_timeout)
        if liveness.state is LivenessState.LOST:
            raise PeerLost(liveness.reason)
        segment = self._segment_names.of(made.name, address, where.engine_port)
        peer = _Peer(made.name, Opening(segment, address, where.engine_port), frozenset(segments), ranges, liveness)
        self._peers[made.name] = peer
        return peer

    def _share(self, peer: _Peer, segments: Sequence[Segment]) -> TransportPeer:
        """A peer that is connected already, known under another address maybe, or read from and now to be written into,
        which takes other segments of it. One whose line is lost is not shared: who still holds it may not use it for
        hours, and would keep the others from its next line."""
        if peer.leaving:
            raise TransferError(f"{peer.name} is being left; connect to it again soon", retryable=True)
        if not peer.segments.issuperset(segments):
            together = peer.segments.union(segments)
            try:
                peer.ranges = Ranges.of(tuple(together), "the peer")
            except TransferError as error:
                raise TransferError(
                    f"{peer.name} tells of other memory than when it was connected first: {error}"
                ) from error
            peer.segments = together
        peer.connections += 1
        return peer

    def disconnect(self, peer: TransportPeer) -> None:
        assert isinstance(peer, _Peer) and peer.connections > 0
        peer.connections -= 1
        peer.leaving = not peer.connections
        self._forget_when_idle(peer)

    def read(self, peer: TransportPeer, runs: Runs) -> Transfer:
        assert isinstance(peer, _Peer)
        work = cut(runs, peer.ranges, self._ranges, self._options.run_bytes)
        return self._start(peer, self._module.TransferOpcode.Read, work)

    def write(self, peer: TransportPeer, runs: Runs) -> Transfer:
        assert isinstance(peer, _Peer)
        work = cut(runs, self._ranges, peer.ranges, self._options.run_bytes)
        return self._start(peer, self._module.TransferOpcode.Write, work)

    def poll(self, transfer: Transfer) -> TransferStatus:
        assert isinstance(transfer, _Transfer)
        return follow(transfer, self._advance)

    def replace_endpoint(self, peer: TransportPeer) -> None:
        raise TransferError("Mooncake's engine is the target of its peers and is not replaced")

    def close(self) -> None:
        """Destroys the engine, which closes its connections: nothing lands after this returns. Then peers see its end.

        Raises:
            TransferError: the library cannot be torn from an exchange within seconds: the engine outlives this call.
        """
        self._lanes.close()
        self._engine = None
        self._openings.close()
        self._liveness.close()

    def _start(self, peer: _Peer, opcode: Any, work: Runs) -> _Transfer:
        assert not peer.leaving
        reads = opcode == self._module.TransferOpcode.Read
        source, destination = work.source.tolist(), work.destination.tolist()
        local, remote = (destination, source) if reads else (source, destination)
        transfer = _Transfer(peer, opcode, local, remote, work.length.tolist(), not reads)
        peer.running += 1
        try:
            self._advance(transfer)
        except Exception as error:  # some of it may be the library's: it is followed to its end
            logger.exception("a transfer with %s", peer.name)
            self._note_failure(transfer, f"unexpected {type(error).__name__}: {error}")
            transfer.unsettled = True
        return transfer

    def _advance(self, transfer: _Transfer) -> None:
        """Look at what was submitted, submit more for a short while, and set the outcome at the end."""
        peer = transfer.peer
        self._look(transfer)
        transfer.status = TransferStatus.RUNNING
        if not transfer.failed and not peer.leaving and self._is_open(peer):
            self._submit(transfer)
        if transfer.in_flight:
            return self._end_exchanges(peer)
        rest = transfer.next < len(transfer.length)
        if transfer.failed:
            self._fail(transfer)
        elif peer.liveness.state is LivenessState.LOST:
            # What ended after the line did may have been answered by another process at that port.
            transfer.outcome = self._lost(peer, moves=transfer.writes and transfer.next > 0)
        elif rest and peer.leaving:
            transfer.outcome = TransferError(f"{peer.name} was disconnected before the whole transfer was submitted")
        elif not rest:
            transfer.outcome = TransferStatus.DONE
        if transfer.outcome is not None:
            peer.running -= 1
            self._forget_when_idle(peer)

    def _look(self, transfer: _Transfer) -> None:
        """Take out what ended. A failed descriptor is kept as the transfer's failure."""
        running: list[tuple[int, int]] = []
        while transfer.in_flight and len(running) < _LOOK_AHEAD:
            batch, length = transfer.in_flight.popleft()
            status = self._engine.transfer_check_status(batch)
            if status == 0:
                running.append((batch, length))
                continue
            transfer.in_flight_bytes -= length
            transfer.peer.queued -= 1
            transfer.peer.moved_at = time.monotonic()
            if status != 1:
                self._note_failure(transfer, f"Mooncake gave up a descriptor of {length} bytes (status {status})")
                # -2: the library's own timeout, which leaves the descriptor running and out of reach.
                transfer.unsettled |= status == -2
        transfer.in_flight.extendleft(reversed(running))

    def _submit(self, transfer: _Transfer) -> None:
        peer, options = transfer.peer, self._options
        # Of what the library queues one share is left for a transfer that begins beside those that run.
        share = min(options.in_flight, max(1, MAX_IN_FLIGHT // (peer.running + 1)))
        room = min(share - len(transfer.in_flight), MAX_IN_FLIGHT - peer.queued)
        until = time.monotonic() + _SUBMIT_S
        for at in range(transfer.next, min(transfer.next + room, len(transfer.length))):
            if transfer.in_flight_bytes >= options.in_flight_bytes or time.monotonic() >= until:
                if transfer.in_flight_bytes < options.in_flight_bytes:
                    transfer.status = TransferStatus.POSTING
                return
            length = transfer.length[at]
            batch = self._engine.batch_transfer_async(
                peer.opening.segment, [transfer.local[at]], [transfer.remote[at]], [length], transfer.opcode
            )
            if not batch:
                self._note_failure(transfer, f"Mooncake does not take a descriptor of {length} bytes")
                return
            transfer.next += 1
            transfer.in_flight.append((batch, length))
            transfer.in_flight_bytes += length
            peer.moved_at = peer.moved_at if peer.queued else time.monotonic()
            peer.queued += 1

    def _is_open(self, peer: _Peer) -> bool:
        """Whether descriptors of a peer can be submitted now without waiting; begins to open it if need be."""
        if peer.liveness.state is not LivenessState.OPEN:
            return False
        try:
            return self._openings.ready(peer.opening)
        except TransferError as error:
            peer.liveness.give_up(f"{peer.name} answers, and {error}")
            return False

    def _note_failure(self, transfer: _Transfer, what: str) -> None:
        if not transfer.failed:
            transfer.failed, transfer.failed_at = what, time.monotonic()

    def _fail(self, transfer: _Transfer) -> None:
        """The outcome of a failed transfer of which nothing runs any more."""
        peer = transfer.peer
        if peer.liveness.state is LivenessState.LOST:
            transfer.outcome = self._lost(peer, moves=transfer.writes or transfer.unsettled)
        elif time.monotonic() >= transfer.failed_at + _GRACE_S:
            transfer.outcome = TransferError(
                f"{transfer.failed} with {peer.name}, which is alive: its memory is not registered any more, or the "
                "network broke (see Mooncake's log)",
                retryable=True,
                terminal=not (transfer.writes or transfer.unsettled),
            )

    def _lost(self, peer: _Peer, *, moves: bool) -> TransferError:
        """The outcome of a transfer that ended after its peer was lost. The kernel goes on for minutes to send what a
        closed connection held, also when the network is back."""
        if peer.liveness.ended or not moves:
            return PeerLost(f"{peer.liveness.reason}; connect to its new incarnation")
        reason = f"{peer.liveness.reason}; what was under way may still arrive until one of the two processes ends"
        return TransferError(reason, retryable=True, terminal=False)

    def _end_exchanges(self, peer: _Peer) -> None:
        """Keep a peer that is lost, or of which nothing has ended for long, from holding up the others. Those have
        waited behind it, so their time begins when it was torn from the library."""
        now = time.monotonic()
        lost = peer.liveness.state is LivenessState.LOST
        since = peer.moved_at if peer is self._torn else max(peer.moved_at, self._torn_at)
        if lost or now >= since + min(self._options.connect_timeout, STILL_S):
            self._torn, self._torn_at = peer, now
            self._openings.end_exchanges(peer.opening, now)

    def _forget_when_idle(self, peer: _Peer) -> None:
        if peer.leaving and not peer.running and self._peers.get(peer.name) is peer:
            del self._peers[peer.name]
            place = peer.ranges.places[0][0] if peer.moved_at else None
            self._lanes.leave(peer.name, peer.opening, peer.liveness, place)


def create(options: Mapping[str, object], use: Use) -> MooncakeTransport:
    """Entry point; see `registry`."""
    return MooncakeTransport(options_of(NAME, options, MooncakeOptions), use)

"""The port: the few operations that a transport gives to the transfer thread.

A transport is owned by one thread; none of its methods may be called from another (a thread that moves CUDA memory
makes its device current before it creates the transport). It knows memory ranges, peers and runs of bytes; it knows
nothing of blocks, layouts or requests, and decides no capability. Operations are started by `read` and `write` and
followed by `poll`; a call returns within milliseconds, however large the transfer. No library can cancel a transfer
that was started, so there is no cancel here: a transfer that is given up keeps its handle and is polled until it is
terminal, and its destination stays in quarantine until then (the caller's business).

Runs are checked against the registered segments of both sides before a library sees them. A run may go on from one
segment into an adjacent one, and runs may have any length and order; short runs cost (docs/design/transports.md).

Errors are `TransferError` (`PeerLost` when the peer is gone); a transport translates its library's exceptions. After
any other out of `read`, `write` or `poll` bytes are taken to move until the peer's process ends.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from vllm_pd_connector.errors import InvalidConfig, TransferError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_pd_connector.geometry.manifest import Segment
    from vllm_pd_connector.geometry.runs import Runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What a worker will do with its transport.

    `serves`: peers may read or write memory that is registered here; without that, nothing moves between calls, only
    what is polled to its end is sure to happen, and `replace_endpoint` can work. `posts`: this side will start
    transfers. `memory` and `device_id`: of the segments that will be registered, for transports that choose a protocol
    and network devices by them. `prepare_thread` is called first in each thread of the transport's own that registers
    memory.
    """

    serves: bool = True
    posts: bool = True
    memory: str = "cpu"
    device_id: int = 0
    prepare_thread: Callable[[], None] = lambda: None


class TransferStatus(Enum):
    """State of a transfer that has not failed. Two are RUNNING where another look soon is worth its cost. POSTING: only
    the time that a call may take kept this thread from giving the library more. MOVING: bytes came in this call, and
    they come in such calls alone."""

    POSTING = "posting"
    MOVING = "moving"
    RUNNING = "running"
    DONE = "done"


class TransportPeer(Protocol):
    """A connected peer; opaque to the caller."""


class Transfer(Protocol):
    """A started transfer; opaque to the caller. `descriptors` is what the library was given, for statistics; `left`
    are the parts that had not ended when it was polled last: it falls as long as bytes move."""

    @property
    def descriptors(self) -> int: ...

    @property
    def left(self) -> int: ...


class Transport(Protocol):
    """One transport endpoint (one per worker)."""

    name: str

    def register(self, segments: Sequence[Segment]) -> None:
        """Make memory readable and writable for peers. Called once, before `describe`.

        Raises:
            TransferError: the library refuses a segment.
        """

    def describe(self) -> bytes:
        """What a peer needs for `connect`; travels in the manifest's `endpoint`."""

    def connect(self, endpoint: bytes, segments: Sequence[Segment]) -> TransportPeer:
        """Prepare transfers with the worker that described itself by `endpoint` and holds `segments`.

        A peer may be connected more than once, since an instance may be known under several addresses, or is read from
        and written into; each connection may take other segments, and is disconnected by itself. The endpoint is
        untrusted: its integrity is checked before the library sees it.

        Raises:
            TransferError: malformed or damaged endpoint, or the library refuses it; retryable when the peer cannot be
                reached now. Connected peers are not affected.
        """

    def disconnect(self, peer: TransportPeer) -> None:
        """Start nothing more with a peer, and forget it when its last running transfer has ended.

        Running transfers are polled on as ever: they become DONE or fail.
        """

    def read(self, peer: TransportPeer, runs: Runs) -> Transfer:
        """Start copying `runs` from the peer (source) to this process (destination).

        Raises:
            TransferError: not started; nothing moves, if it is `terminal`.
        """

    def write(self, peer: TransportPeer, runs: Runs) -> Transfer:
        """Start copying `runs` from this process (source) to the peer (destination).

        DONE says that all bytes are in the peer's memory, so who is told so afterwards may use them.

        Raises:
            TransferError: not started; nothing moves, if it is `terminal`.
        """

    def poll(self, transfer: Transfer) -> TransferStatus:
        """State of a transfer, without blocking. Polling again after DONE or an error is an error of the caller.

        Raises:
            TransferError: it failed. When it is not `terminal`, bytes may move until `close`, or the end of the
                peer's process (`has_settled`), and nothing else will tell.
        """

    def replace_endpoint(self, peer: TransportPeer) -> None:
        """Connect peers from now on by another endpoint of the library than the one of `peer`. It may take a while to
        make: until it is there this raises a retryable error.

        The way out when transfers stand still though their peer is well, and later ones would too. Those that run go
        on and are polled as ever, and peers that are connected stay so; no library can end its transfers without
        harm to a peer that still answers them.

        Raises:
            TransferError: peers know this endpoint as their target, so that there can be no other; the library cannot
                have two, or does not start another.
        """

    def close(self) -> None:
        """Release everything, ending running transfers: nothing lands afterwards. Raises where that cannot be had: the
        memory then stays mapped for good, and no peer is told that this process has ended.

        Registered memory may be unmapped once no peer reads or writes it: over TCP a process dies that is asked for
        memory it unmapped, so peers are told first.
        """


def is_met(transport: Transport, endpoint: bytes) -> bool:
    """Have a transport do aside what of `connect` takes longer than a call should; whether `connect` is due. To be
    asked until it is. A transport whose `connect` is always short has no `meet`.

    Raises:
        TransferError: as `connect`.
    """
    meet: Callable[[bytes], bool] | None = getattr(transport, "meet", None)
    return meet is None or meet(endpoint)


def has_settled(transport: Transport, peer: TransportPeer) -> bool:
    """Have a transport take in what the peer's process, which has ended, had sent before; whether nothing of that can
    land any more, also of transfers that never end. To be asked until it is. What nobody polls for may lie in a socket
    of this host for any time, and land with the next transfer that is polled. Transfers with the peer need no
    look from then on, and may fail in one. A transport that takes it in by itself has no `settle`."""
    settle: Callable[[TransportPeer], bool] | None = getattr(transport, "settle", None)
    return settle is None or settle(peer)


class Followed(Protocol):
    """A transfer that is advanced by being polled: then `status` is what it is while it runs. `outcome` is set at its
    end, and `reported` once."""

    status: TransferStatus
    outcome: TransferStatus | TransferError | None
    reported: bool


FollowedTransfer = TypeVar("FollowedTransfer", bound=Followed)
Options = TypeVar("Options", bound=msgspec.Struct)


def options_of(name: str, given: Mapping[str, object], form: type[Options]) -> Options:
    """`transport_options` as a transport's struct of options.

    Raises:
        InvalidConfig: an unknown or mistyped option.
    """
    try:
        return msgspec.convert(given, type=form)
    except msgspec.ValidationError as error:
        known = ", ".join(form.__struct_fields__) or "none"
        raise InvalidConfig(f"transport_options of {name}: {error}; known options: {known}") from error


def require_library(name: str, module: str, advice: str) -> None:
    """Refuse a transport whose library is not there, without importing it.

    Raises:
        InvalidConfig: with what to do.
    """
    if importlib.util.find_spec(module) is None:
        raise InvalidConfig(f"transport: {name} cannot be imported (No module named {module!r}); {advice}")


def follow(transfer: FollowedTransfer, advance: Callable[[FollowedTransfer], None]) -> TransferStatus:
    """`Transport.poll` of such a transfer; `advance` looks at it, goes on with it and sets the outcome."""
    assert not transfer.reported, "polled after its end"
    if transfer.outcome is None:
        advance(transfer)
    if transfer.outcome is None:
        return transfer.status
    transfer.reported = True
    if isinstance(transfer.outcome, TransferError):
        raise transfer.outcome
    return transfer.outcome

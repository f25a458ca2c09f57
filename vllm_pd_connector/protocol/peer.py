"""Another instance as a worker sees it, from the first request that needs it to its death.

    CONNECTING --manifests, connected--> READY <--probe answered-- SUSPECT <--suspected-- READY
        |  ^                               |                         |
        |  +------ transport lost ---------+-------------------------+
        |                                                            |
        +--> REFUSED (for ever)    every state --replaced--> DEAD    +--too many failed fetches--> DEAD

A peer is one incarnation of one engine, named by address and incarnation: another incarnation at the same address is
another peer, and a machine that sees one declares its own peer dead for ever. Only in READY and SUSPECT the transport
is used. The manifests are both the handshake and the probe. Nothing is fetched from a peer that nobody wants, except to
settle a suspicion. Failed attempts back off with jitter; after `max_failures` in a row, or one in which the transport
did not come back, the waiting requests fail, and later ones fail at once until the back-off has passed. A refusal is
remembered, with its text.

See docs/design/protocol.md.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum
from math import inf
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

REFUSAL_S = 10.0
"""Seconds for which a refusal stands for requests that name no incarnation; for those that do, it stands for ever."""


class PeerState(Enum):
    CONNECTING = "connecting"
    READY = "ready"
    REFUSED = "refused"
    SUSPECT = "suspect"
    DEAD = "dead"


@dataclass(frozen=True, slots=True)
class PeerKey:
    """One life of one engine: its side channel's address and its incarnation (32 hex digits).

    `server_key` is the side channel's CURVE key, None without; parameters that name another key are another peer, so
    that a wrong key never stands between others and the right one.
    """

    host: str
    port: int
    incarnation: str
    server_key: str | None = None

    def __str__(self) -> str:
        return f"{self.host}:{self.port} ({self.incarnation[:8]})"


@dataclass(frozen=True, slots=True)
class Backoff:
    """The n-th failure in a row waits base_s * 2**(n-1), at most cap_s, times a random factor in [0.5, 1)."""

    base_s: float = 0.25
    cap_s: float = 10.0
    max_failures: int = 4

    def delay(self, failures: int, random: float) -> float:
        """Seconds to wait after `failures` >= 1 in a row; `random` is in [0, 1)."""
        return min(self.cap_s, self.base_s * 2.0 ** min(failures - 1, 60)) * (0.5 + random / 2)


# Events


@dataclass(frozen=True, slots=True)
class Wanted:
    """A request needs this peer; answered by exactly one of StartRequests and FailRequests, unless Unwanted."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Unwanted:
    """A request that waits was given up."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ManifestsArrived:
    """`FetchManifests` of this number was answered by an engine of `incarnation`."""

    attempt: int
    incarnation: str


@dataclass(frozen=True, slots=True)
class FetchFailed:
    """`FetchManifests` of this number had no usable answer; it may have one later. `here`: this side had no room to
    ask, which says nothing of the peer."""

    attempt: int
    reason: str
    here: bool = False


@dataclass(frozen=True, slots=True)
class Connected:
    """Answers `Connect`: manifests accepted, plan made, transport connected."""


@dataclass(frozen=True, slots=True)
class ConnectFailed:
    """Answers `Connect`: the transport did not connect, another attempt may. `late`: this one took all the time that
    requests have, so none that waits waits for another."""

    reason: str
    late: bool = False


@dataclass(frozen=True, slots=True)
class Refused:
    """Answers `Connect` or `FetchManifests`: this pair can never work; the text of IncompatiblePeer, or of a version
    that is not ours."""

    reason: str


@dataclass(frozen=True, slots=True)
class Suspected:
    """Something timed out; the peer may be gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The transport says that its connection is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class Replaced:
    """Another engine answers at the peer's address."""

    reason: str


@dataclass(frozen=True, slots=True)
class Dismissed:
    """The connection is to be closed in good order: idle for long, or the peer says that it ends. Whoever wants the
    peer afterwards asks it again, since nobody has proved that it is gone."""

    reason: str


@dataclass(frozen=True, slots=True)
class PeerTick:
    """Time has passed; see `next_deadline`."""


Event = (
    Wanted
    | Unwanted
    | ManifestsArrived
    | FetchFailed
    | Connected
    | ConnectFailed
    | Refused
    | Suspected
    | Lost
    | Replaced
    | Dismissed
    | PeerTick
)

# Actions


@dataclass(frozen=True, slots=True)
class FetchManifests:
    """Send GetManifests; bring back ManifestsArrived, FetchFailed, Refused or Replaced."""

    attempt: int


@dataclass(frozen=True, slots=True)
class Connect:
    """Check the manifests, plan, connect the transport; answer with Connected, ConnectFailed or Refused before any
    other event."""


@dataclass(frozen=True, slots=True)
class Disconnect:
    """Disconnect the transport. Receives that read from this peer or confirm a read fail with the reason; those that
    wait for it (Wanted, not started) are left to StartRequests and FailRequests.

    Says nothing of what may still be written: the side channel is one process of several, and each of the others is
    watched for itself (`worker.peers.process_watch`)."""

    reason: str


@dataclass(frozen=True, slots=True)
class StartRequests:
    """The peer is ready for these requests (in the order in which they came)."""

    request_ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class FailRequests:
    """These requests cannot be had from this peer."""

    request_ids: tuple[str, ...]
    reason: str


Action = FetchManifests | Connect | Disconnect | StartRequests | FailRequests


class Peer:
    """The machine of one peer.

    Args:
        key: with an empty incarnation, whichever incarnation answers first is the one that is meant; after it has gone,
            the one that answers next.
        random: returns numbers in [0, 1) and spreads the retries of many workers.
        noun: what the peer is, for messages.
    """

    def __init__(
        self, key: PeerKey, random: Callable[[], float], backoff: Backoff | None = None, noun: str = "prefill instance"
    ) -> None:
        self.key = key
        self._any_life = not key.incarnation
        self._noun = noun
        self._random = random
        self._backoff = backoff or Backoff()
        self._state = PeerState.CONNECTING
        self._reason = ""
        self._waiting: dict[str, None] = {}  # in order of arrival
        self._attempt = 0
        self._fetching = False
        self._connecting = False
        self._failures = 0
        self._retry_at = -inf
        self._refused_at = inf

    @property
    def state(self) -> PeerState:
        return self._state

    @property
    def reason(self) -> str:
        """Why the peer is in doubt, refused or dead."""
        return self._reason

    @property
    def over(self) -> bool:
        """Whether another incarnation answers at this one's address: this one is not asked any more."""
        return self._state is PeerState.DEAD and self._retry_at == inf

    def outdated(self, now: float) -> bool:
        """Whether a request that means whichever incarnation is there has to ask who it is: this one ended, or was
        refused REFUSAL_S ago and may have been replaced by one that fits."""
        return self.over or (self._state is PeerState.REFUSED and now >= self._refused_at + REFUSAL_S)

    def connects(self, arrived: ManifestsArrived) -> bool:
        """Whether these manifests would be answered by `Connect`. Whoever executes the actions may do that before it
        hands the manifests on, for it takes long."""
        alike = self._any_life or arrived.incarnation == self.key.incarnation
        return alike and self._is_current(arrived.attempt) and self._state is PeerState.CONNECTING

    def next_deadline(self) -> float | None:
        """When a `PeerTick` is due, None if none is."""
        return self._retry_at if self._wants_fetch() else None

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about an event; the actions are executed in order, before the next event."""
        if self._connecting:
            assert isinstance(event, Connected | ConnectFailed | Refused), f"Connect was answered by {event}"
        match event:
            case Wanted(request_id):
                return self._want(request_id, now)
            case Unwanted(request_id):
                self._waiting.pop(request_id, None)
                return []
            case ManifestsArrived(attempt, incarnation):
                return self._arrived(incarnation) if self._is_current(attempt) else []
            case FetchFailed(attempt, reason, here):
                return self._failed(reason, now, counted=int(not here)) if self._is_current(attempt) else []
            case Connected():
                return self._ready()
            case ConnectFailed(reason, late):
                return self._failed(reason, now, late)
            case Refused(reason):
                self._refused_at = min(self._refused_at, now)
                return self._end(PeerState.REFUSED, reason, inf)
            case Replaced(reason):
                return self._end(PeerState.DEAD, reason, inf)
            case Dismissed(reason):
                return self._end(PeerState.DEAD, reason, now)
            case Suspected(reason):
                return self._suspect(reason, now)
            case Lost(reason):
                return self._lost(reason, now)
            case PeerTick():
                return self._pursue(now)

    def _want(self, request_id: str, now: float) -> list[Action]:
        if self._state is PeerState.READY:
            return [StartRequests((request_id,))]
        if self._state is PeerState.DEAD and now >= self._retry_at:
            self._state = PeerState.CONNECTING
        if self._state in (PeerState.REFUSED, PeerState.DEAD):
            return [FailRequests((request_id,), self._reason)]
        self._waiting[request_id] = None
        return self._pursue(now)

    def _wants_fetch(self) -> bool:
        wanted = self._state is PeerState.SUSPECT or (self._state is PeerState.CONNECTING and bool(self._waiting))
        return wanted and not (self._fetching or self._connecting)

    def _pursue(self, now: float) -> list[Action]:
        if not self._wants_fetch() or now < self._retry_at:
            return []
        self._attempt += 1
        self._fetching = True
        return [FetchManifests(self._attempt)]

    def _is_current(self, attempt: int) -> bool:
        return self._fetching and attempt == self._attempt

    def _arrived(self, incarnation: str) -> list[Action]:
        self._fetching = False
        if self._any_life and self._state is PeerState.CONNECTING:
            self.key = replace(self.key, incarnation=incarnation)
        if incarnation != self.key.incarnation:
            reason = f"the {self._noun} at {self.key} was restarted: incarnation {incarnation[:8]} answers there"
            return self._end(PeerState.DEAD, reason, inf)
        if self._state is PeerState.SUSPECT:
            return self._ready()
        self._connecting = True
        return [Connect()]

    def _ready(self) -> list[Action]:
        self._connecting = False
        self._state, self._reason, self._failures, self._retry_at = PeerState.READY, "", 0, -inf
        waiting = self._take_waiting()
        return [StartRequests(waiting)] if waiting else []

    def _failed(self, reason: str, now: float, late: bool = False, counted: int = 1) -> list[Action]:
        self._fetching = self._connecting = False
        self._count_failure(reason, now, counted)
        if not (late or (counted and self._failures >= self._backoff.max_failures)):
            return []
        text = f"the {self._noun} at {self.key} cannot be reached ({self._failures} attempts failed): {reason}"
        if late:
            text = f"the {self._noun} at {self.key} answers and cannot be connected to: {reason}"
        return self._end(PeerState.DEAD, text, self._retry_at)

    def _suspect(self, reason: str, now: float) -> list[Action]:
        if self._state is not PeerState.READY:
            return []
        self._state, self._reason = PeerState.SUSPECT, reason
        return self._pursue(now)

    def _lost(self, reason: str, now: float) -> list[Action]:
        if not self._has_transport():
            return []
        self._state = PeerState.CONNECTING
        self._count_failure(reason, now)
        return [Disconnect(reason)]

    def _count_failure(self, reason: str, now: float, counted: int = 1) -> None:
        self._reason = reason
        self._failures += counted
        self._retry_at = now + self._backoff.delay(max(self._failures, 1), self._random())

    def _end(self, state: PeerState, reason: str, retry_at: float) -> list[Action]:
        self._fetching = self._connecting = False
        if self._retry_at == inf:  # refused or replaced before: that reason stays
            return []
        waiting = self._take_waiting()
        actions: list[Action] = [FailRequests(waiting, reason)] if waiting else []
        if self._has_transport():
            actions.append(Disconnect(reason))
        self._state, self._reason, self._retry_at = state, reason, retry_at
        return actions

    def _has_transport(self) -> bool:
        return self._state in (PeerState.READY, PeerState.SUSPECT)

    def _take_waiting(self) -> tuple[str, ...]:
        waiting, self._waiting = tuple(self._waiting), {}
        return waiting

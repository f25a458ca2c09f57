"""All instances that a worker is or was linked to: their handshakes, doubts, deaths and removal.

A peer's state machine decides (`protocol.peer`), its `PeerLink` holds the plan and the connected ranks; this class
brings the machines their events and carries out what they ask for. What it means for requests goes to the `User`, who
owns them: start these, fail those, all that reads from this link is over.
"""

from __future__ import annotations

import random
import time
from collections import deque
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Generic

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import (
    Busy,
    DeadlineExceeded,
    IncompatiblePeer,
    PDConnectorError,
    PeerLost,
    ProtocolError,
    TransferError,
)
from vllm_pd_connector.observability.stats import FailureKind, Phase
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.protocol.peer import Peer, PeerKey, PeerState
from vllm_pd_connector.protocol.wire.messages import Failure, FailureCode, GetManifests, Manifests, VersionMismatch
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.worker.peers.connecting import Connecting, LinkKind
from vllm_pd_connector.worker.peers.earliest import Earliest
from vllm_pd_connector.worker.peers.link import over

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.bounded import Pieces
    from vllm_pd_connector.config import Config
    from vllm_pd_connector.geometry.manifest import Manifest
    from vllm_pd_connector.sidechannel.client import Outcome
    from vllm_pd_connector.transport.base import Transport
    from vllm_pd_connector.worker.peers.event_queue import EventQueue
    from vllm_pd_connector.worker.peers.process_watch import ProcessWatches
    from vllm_pd_connector.worker.peers.user import User
    from vllm_pd_connector.worker.rpc import PendingCalls

logger = init_logger(__name__)

FETCH_ATTEMPTS = 4
IDLE_LINK_S = 3600.0
MAX_LINKS = 1024

# An endpoint of the library that is being made is asked for again after this time.
_REMAKE_S = 0.5


@dataclass(frozen=True, slots=True)
class _GivenUp(Generic[LinkKind]):
    """Something that was begun on a link and then given up, and when it should have ended. `left`: None once it has,
    else how far it is, which grows as long as it moves; `seen` is what it said last."""

    link: LinkKind
    due: float
    left: Callable[[], int | None]
    seen: int | None = None


class Links(Generic[LinkKind]):
    """See the module. Lives in the transfer thread.

    Args:
        manifest: this worker's, without the endpoint.
        make: a link of the kind that these are, from its machine, engine id, endpoint and the time.
        noun: what is at the other end, for messages.
        connected: called with every link that was connected, before it is used.
        chunk_bytes: what a staged transfer may take of the staging buffer at a time; 0 if there is no staging buffer.
        processes: watches the ranks of every instance that is linked.
        events: everything for machines goes through it, and the user is called while one of its events is handled.
        observe: takes the seconds of a phase, for the statistics.
    """

    def __init__(
        self,
        config: Config,
        manifest: Manifest,
        transport: Transport,
        chunk_bytes: int,
        calls: PendingCalls,
        processes: ProcessWatches,
        events: EventQueue,
        user: User,
        observe: Callable[[Phase, float], None],
        make: Callable[[Peer, str, str, float], LinkKind],
        noun: str = "prefill instance",
        connected: Callable[[LinkKind], None] | None = None,
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._transport = transport
        self._chunk_bytes = chunk_bytes
        self._calls = calls
        self._processes = processes
        self._events = events
        self._user = user
        self._observe = observe
        self._make = make
        self._noun = noun
        self._connected = connected
        self._links: dict[tuple[PeerKey, str, bool], LinkKind] = {}
        self._connecting = Connecting(transport, self._pieces, config.handshake_timeout)
        self._given_up: list[_GivenUp[LinkKind]] = []
        self._due = Earliest()
        self._losses = processes.losses

    def get(self, key: PeerKey, engine_id: str, now: float, *, same_weights: bool = False) -> LinkKind:
        """The link to this incarnation of this engine, made if there is none.

        `same_weights`: the scheduler half has compared the weights of this request's prefill, by names that were told
        since. The link may be one then of which the manifests' weights were not compared, and that no request gets of
        which nobody has compared them: it says nothing of others.
        """
        link = self._links.get((key, engine_id, False))
        if same_weights and (link is None or link.machine.state is not PeerState.READY):
            link = self._links.get((key, engine_id, True))
        if link is not None and not key.incarnation and link.machine.outdated(now):
            link = None  # whichever incarnation is at the address now is meant
        if link is not None and link.machine.state is PeerState.READY and (reason := link.deserted(now)):
            self.drive(link, peers.Lost(reason), now)
        if link is None:
            if len(self._links) >= MAX_LINKS:
                self._drop_idle(now, oldest=True)
            machine = Peer(key, random.random, noun=self._noun)
            address = endpoint(key.host, key.port, key.server_key)
            link = self._links[key, engine_id, same_weights] = self._make(machine, engine_id, address, now)
            link.same_weights |= same_weights
            self._doubt_others_at(link, now)
            self._due.lower(now + IDLE_LINK_S)
        link.used_at = now
        return link

    def drive(self, link: LinkKind, event: peers.Event, now: float) -> None:
        """Give a peer's machine an event, in its turn."""
        self._events.put(lambda: self._handle(link, event, now))

    def _handle(self, link: LinkKind, event: peers.Event, now: float, connected: peers.Event | None = None) -> None:
        """Carry out what a peer's machine asks for; `connected` is what came of connecting to the peer, if that has
        been done."""
        events: deque[peers.Event] = deque([event])
        while events:
            for action in link.machine.handle(events.popleft(), now):
                match action:
                    case peers.FetchManifests(attempt):
                        self._fetch(link, attempt, now)
                    case peers.Connect():
                        assert connected is not None, "manifests were handed on before the peer was connected"
                        events.append(connected)
                    case peers.Disconnect(reason):
                        self._disconnect(link, reason, now)
                    case peers.StartRequests(request_ids):
                        for request_id in request_ids:
                            self._user.ready(request_id, now)
                    case peers.FailRequests(request_ids, reason):
                        refused = link.machine.state is peers.PeerState.REFUSED
                        kind = FailureKind.INCOMPATIBLE_PEER if refused else FailureKind.PEER_UNREACHABLE
                        for request_id in request_ids:
                            self._user.refused(request_id, reason, kind, now)
        self._due.lower(link.machine.next_deadline())

    def departed(self, endpoint: str, now: float) -> None:
        """The instance at this endpoint says that it ends: let go of its memory at once."""
        for link in [link for link in self._links.values() if link.endpoint == endpoint]:
            self.drive(link, peers.Dismissed(f"the {self._noun} is shutting down"), now)

    def failed(self, link: LinkKind, connection: object, error: TransferError, what: str, now: float) -> None:
        """A transfer failed that was begun when `connection` was the link's: doubt its peer, or take it for lost.

        `what` says what may still run. A connection that was cut says nothing of the one that others use now.
        """
        if connection is not link.connection:
            self.drive(link, peers.Suspected(str(error)), now)
            return
        if not error.terminal:
            link.stalled = what
        self.drive(link, (peers.Lost if isinstance(error, PeerLost) else peers.Suspected)(str(error)), now)

    def give_up(self, link: LinkKind, left: Callable[[], int | None], now: float) -> None:
        """A request was given up while transfers of its run on this link (see `_GivenUp`). If nothing of what is `left`
        ends within the time that a transfer may stand still, no request with a deadline is there that would notice."""
        self._begin_waiting(_GivenUp(link, now + self._config.transfer_timeout, left, left()))

    def _begin_waiting(self, entry: _GivenUp[LinkKind]) -> None:
        self._given_up.append(entry)
        self._due.lower(entry.due)

    def tick(self, now: float) -> None:
        """What is due: peers to be connected, retries, probes, the removal of links to who has ended, and of those that
        nobody has used for long."""
        for link, arrived, result in self._connecting.go_on():
            self._events.put(partial(self._tried, link, arrived, result, now))
        if self._losses != (losses := self._processes.losses):
            self._losses = losses
            self._let_go_of_ended(now)
        if not self._due.over(now):
            return
        for entry in [entry for entry in self._given_up if entry.due <= now]:
            self._given_up.remove(entry)
            if (left := entry.left()) is None:
                continue
            if left != entry.seen:
                self.give_up(entry.link, entry.left, now)
                continue
            entry.link.stalled = "transfers of a request that was given up do not end"
            self.drive(entry.link, peers.Suspected(entry.link.stalled), now)
        for link in list(self._links.values()):
            if (due := link.machine.next_deadline()) is not None and due <= now:
                self.drive(link, peers.PeerTick(), now)
        self._drop_idle(now)
        moments = [link.machine.next_deadline() for link in self._links.values()]
        moments += [link.used_at + IDLE_LINK_S for link in self._links.values()]
        self._due.renew([*moments, *(entry.due for entry in self._given_up)])

    def next_deadline(self) -> float | None:
        """When a `tick` is due, None if none is."""
        return min((at for at in (self._connecting.due, self._due.at) if at is not None), default=None)

    def connects(self, link: LinkKind) -> bool:
        """Whether the peer of this link has answered and is being connected."""
        return link in self._connecting

    def _doubt_others_at(self, newcomer: LinkKind, now: float) -> None:
        """Two incarnations of an engine at one address: one of them is over. The parameters of a request prove nothing,
        so the older link is only asked to check."""
        for link in list(self._links.values()):
            told, at = newcomer.machine.key.incarnation, link.endpoint
            if at == newcomer.endpoint and told not in ("", link.machine.key.incarnation):
                self.drive(link, peers.Suspected("another incarnation is announced at its address"), now)

    def _end_others_at(self, link: LinkKind, incarnation: str, now: float) -> None:
        """Every other incarnation at this address has ended: the one that runs there has answered."""
        for other in list(self._links.values()):
            known = self._connecting.incarnation(other) or other.machine.key.incarnation
            if other is not link and other.endpoint == link.endpoint and known not in ("", incarnation):
                self.drive(other, peers.Replaced(f"incarnation {incarnation[:8]} answers at its address"), now)

    def _fetch(self, link: LinkKind, attempt: int, now: float) -> None:
        put, fetched = self._events.put, partial(self._fetched, link, attempt)
        message, timeout = GetManifests(link.engine_id), self._config.handshake_timeout / FETCH_ATTEMPTS
        try:
            self._calls.ask(link.endpoint, message, timeout, lambda outcome, at: put(partial(fetched, outcome, at)))
        except ProtocolError as error:
            put(partial(fetched, error, now))

    def _fetched(self, link: LinkKind, attempt: int, outcome: Outcome, now: float) -> None:
        event: peers.Event
        match outcome:
            case Manifests(engine_id=_, incarnation=incarnation, manifests=manifests):
                self._end_others_at(link, incarnation, now)
                event = arrived = peers.ManifestsArrived(attempt, incarnation)
                if link.machine.connects(arrived):
                    self._connecting.begin(link, arrived, manifests)
                    return
                doubted = link.machine.state is peers.PeerState.SUSPECT  # else it is not connected and will be
                if doubted and link.stalled and incarnation == link.machine.key.incarnation:
                    link.manifests = manifests
                    event = self._relink(link, arrived, now)
            case Failure(code=FailureCode.FOREIGN_ENGINE, message=message):
                event = peers.Replaced(message)
            case Failure(code=FailureCode.VERSION | FailureCode.MALFORMED, message=message):
                event = peers.Refused(message)
            case VersionMismatch():
                event = peers.Refused(str(outcome))
            case _:
                event = peers.FetchFailed(attempt, str(outcome), isinstance(outcome, Busy))
        self._handle(link, event, now)

    def _relink(self, link: LinkKind, answer: peers.ManifestsArrived, now: float) -> peers.Event:
        """`_link_anew`. After a defect, of a transport say, the peer is asked again: else who waits for it waits for
        ever."""
        stalled = link.stalled
        try:
            return self._link_anew(link, answer, now)
        except Exception as error:
            logger.exception("%s %s at %s cannot be linked anew", self._noun, link.engine_id, link.machine.key)
            link.stalled = stalled
            return peers.FetchFailed(answer.attempt, f"unexpected {type(error).__name__}: {error}")

    def _link_anew(self, link: LinkKind, answer: peers.ManifestsArrived, now: float) -> peers.Event:
        """A peer in doubt lives, but what it was asked for stands still: use another endpoint of the library for it.
        Without one it is used as it is, and what stands still ends by its deadline. One that is being made is
        asked for again."""
        reason = f"{link.stalled}, though {self._noun} {link.engine_id} answers: it is linked anew"
        link.stalled = ""
        try:
            for rank in link.ranks.values():
                self._transport.replace_endpoint(rank)
        except TransferError as error:
            if error.retryable:
                self._begin_waiting(_GivenUp(link, now + _REMAKE_S, lambda: 0, 0))
                return answer
            logger.warning("%s; not possible: %s", reason, error)
            return answer
        if link.ranks:  # else an attempt to link it anew has failed before
            self._user.stalled(link, reason, now)
        link.disconnect(self._transport)
        self._forget_given_up(link)
        match self._connecting.at_once(link):
            case peers.Connected():
                return answer
            case peers.ConnectFailed(reason=text):
                link.stalled = "it could not be linked anew"
                return peers.FetchFailed(answer.attempt, text)
            case refusal:
                return refusal

    def _tried(self, link: LinkKind, arrived: peers.ManifestsArrived, result: peers.Event, now: float) -> None:
        if link.machine.connects(arrived):
            self._handle(link, arrived, now, result)
        else:  # it has come to an end in the same moment
            link.disconnect(self._transport)

    def _pieces(self, link: LinkKind) -> Pieces[peers.Event]:
        began = time.monotonic()
        try:
            verdict = yield from link.connecting(self._manifest, self._transport, self._chunk_bytes)
            yield
            link.watch(self._processes, began)
            if self._connected is not None:
                self._connected(link)
        except Exception as error:
            link.disconnect(self._transport)
            return self._not_connected(link, error)
        finally:
            link.met, link.manifests = (link.manifests if self._config.trace_dir is not None else ()), ()
        link.handshake = began, time.monotonic()
        seconds = link.handshake[1] - began
        self._observe(Phase.HANDSHAKE, seconds)
        logger.info(
            "linked to %s %s at %s over %s in %.1f ms: %s",
            self._noun,
            link.engine_id,
            link.machine.key,
            over(self._transport, self._manifest),
            1e3 * seconds,
            verdict,
        )
        return peers.Connected()

    def _not_connected(self, link: LinkKind, error: Exception) -> peers.Event:
        if isinstance(error, IncompatiblePeer):
            logger.error("%s", error)
            return peers.Refused(str(error))
        if isinstance(error, PDConnectorError):
            return peers.ConnectFailed(str(error), late=isinstance(error, DeadlineExceeded))
        # A defect of ours that one peer's manifests met must not reach the requests of others.
        logger.exception("%s %s at %s cannot be linked", self._noun, link.engine_id, link.machine.key)
        return peers.ConnectFailed(f"unexpected {type(error).__name__}: {error}")

    def _disconnect(self, link: LinkKind, reason: str, now: float) -> None:
        logger.warning("disconnecting %s %s at %s: %s", self._noun, link.engine_id, link.machine.key, reason)
        link.disconnect(self._transport)
        self._user.lost(link, reason, now)
        self._forget_given_up(link)

    def _forget_given_up(self, link: LinkKind) -> None:
        """What was begun before says nothing of the connection that comes next."""
        self._given_up = [entry for entry in self._given_up if entry.link is not link]

    def _drop_idle(self, now: float, *, oldest: bool = False) -> None:
        """Let go of the links that nobody has used for long; `oldest`: of the one that was not used for longest."""
        for key, link in sorted(self._links.items(), key=lambda entry: entry[1].used_at):
            if not oldest and link.used_at + IDLE_LINK_S > now:
                return
            if self._user.uses(link):
                link.used_at = now if not oldest else link.used_at
                continue
            self._remove(key, "not used for long", now)
            if oldest:
                return

    def _let_go_of_ended(self, now: float) -> None:
        """Disconnect whose process has ended, also where nobody wants it: a library may keep its memory mapped, which
        its next life lacks. This needs no proof and ends no quarantine: one that lives all the same is linked anew for
        the next request."""
        for key, link in list(self._links.items()):
            if reason := link.ended():
                self.drive(link, peers.Lost(reason), now)
                if not self._user.uses(link):
                    self._remove(key, reason, now)

    def _remove(self, key: tuple[PeerKey, str, bool], reason: str, now: float) -> None:
        self.drive(self._links[key], peers.Dismissed(reason), now)
        del self._links[key]

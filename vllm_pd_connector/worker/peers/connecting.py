"""Peers that are being connected.

To connect takes milliseconds for each rank of a peer, in which nothing else of the transfer thread goes on. So it is
done piece by piece, before the peer's machine is told of the manifests that have come: when it says `Connect` all of
that is done. Where it wants that no more by then, the peer is let go of.

A transport may do a part aside (`transport.base.is_met`), in a library that may never come back. It is looked at ever
more rarely, and a peer that waits for it is given up where it has not come back, with any, for as long as requests wait
for a handshake; those behind it that were begun as long ago are given up at their first wait. Who has many ranks, or
comes behind many, takes the time that it takes.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from vllm_pd_connector.errors import DeadlineExceeded
from vllm_pd_connector.protocol.peer import ConnectFailed
from vllm_pd_connector.sidechannel.net.files import FilesLeft
from vllm_pd_connector.worker.peers.link import PeerLink
from vllm_pd_connector.worker.poll_interval import LONGEST_OF_OLD_S, SHARE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm_pd_connector.bounded import Pieces
    from vllm_pd_connector.protocol.peer import Event, ManifestsArrived
    from vllm_pd_connector.transport.base import Transport

PIECES_S = 0.001
"""So long a turn connects, and for what is left of the piece in which this time is over."""

AT_ONCE_S = 1.0
"""So long at most a peer that stands still is connected anew: all that the thread serves waits meanwhile."""

LinkKind = TypeVar("LinkKind", bound=PeerLink)


@dataclass(frozen=True, slots=True)
class _Begun:
    arrived: ManifestsArrived
    pieces: Pieces[Event]
    at: float


class Connecting(Generic[LinkKind]):
    """See the module.

    Args:
        connect: what it takes to connect a link, which comes to what its machine is to be told, also where a
            DeadlineExceeded comes in between; raises nothing.
        limit_s: how long a transport may do its part aside.
    """

    def __init__(self, transport: Transport, connect: Callable[[LinkKind], Pieces[Event]], limit_s: float) -> None:
        self._transport = transport
        self._connect = connect
        self._limit_s = limit_s
        self._due = 0.0
        self._waits_since: float | None = None  # for the transport; it goes on where who waited is given up
        self._begun: dict[LinkKind, _Begun] = {}
        self._files = FilesLeft()

    def __bool__(self) -> bool:
        return bool(self._begun)

    def __contains__(self, link: object) -> bool:
        return link in self._begun

    @property
    def due(self) -> float | None:
        """When to go on, None if nothing is being connected."""
        return self._due if self._begun else None

    def incarnation(self, link: LinkKind) -> str:
        """Which life of a peer that is being connected has answered; empty if it is not. Its machine hears of it in the
        end."""
        begun = self._begun.get(link)
        return begun.arrived.incarnation if begun is not None else ""

    def begin(self, link: LinkKind, arrived: ManifestsArrived, manifests: Sequence[bytes]) -> None:
        """Begin to connect to a peer whose manifests have come; what was begun with others of it is abandoned."""
        self.abandon(link)
        if not self._begun:
            self._waits_since = None
        self._files.look()
        link.manifests = manifests
        self._begun[link] = _Begun(arrived, self._connect(link), time.monotonic())
        self._due = 0.0

    def abandon(self, link: LinkKind) -> None:
        """Let go of a peer, if it is being connected."""
        if (begun := self._begun.pop(link, None)) is not None:
            begun.pieces.close()
            link.manifests = ()
            link.disconnect(self._transport)

    def go_on(self) -> Iterator[tuple[LinkKind, ManifestsArrived, Event]]:
        """Connect for as long as a turn may, one peer after the other; yields those with which it is done."""
        until = (now := time.monotonic()) + PIECES_S
        if now < self._due:
            return
        self._due = 0.0
        while self._begun:
            link, begun = next(iter(self._begun.items()))
            if link.machine.connects(begun.arrived):
                waited_for = link.waits_for
                try:
                    self._step(link, begun.pieces, max(begun.at, self._waits_since or now), self._limit_s)
                    if waited_for not in ("", link.waits_for):
                        self._waits_since = None
                except StopIteration as end:
                    del self._begun[link]
                    if not (isinstance(end.value, ConnectFailed) and end.value.late):
                        self._waits_since = None
                    yield link, begun.arrived, end.value
            else:  # its machine has come to an end meanwhile
                self.abandon(link)
            now = time.monotonic()
            if link in self._begun and link.waits_for:
                self._waits_since = self._waits_since or now
                self._due = now + min((now - begun.at) * SHARE, LONGEST_OF_OLD_S)
                return
            if now >= until:
                return

    def at_once(self, link: LinkKind) -> Event:
        """Connect a link with nothing done in between; one that waits for its transport for at most AT_ONCE_S."""
        pieces, began = self._connect(link), time.monotonic()
        while True:
            try:
                self._step(link, pieces, began, min(AT_ONCE_S, self._limit_s))
            except StopIteration as end:
                result: Event = end.value
                return result

    def _step(self, link: LinkKind, pieces: Pieces[Event], began: float, limit_s: float) -> None:
        """Do a piece; where it waits and its time is over, end it. StopIteration has what comes of it."""
        next(pieces)
        if link.waits_for and time.monotonic() >= began + limit_s:
            pieces.throw(DeadlineExceeded(f"it was not connected within {limit_s:g} s: {link.waits_for}"))

"""Peers that are being connected.

To connect takes milliseconds for each rank of a peer, in which nothing else of the transfer thread goes on. So it is
done piece by piece, before the peer's machine is told of the manifests that have come: when it says `Connect` all of
that is done. Where it wants that no more by then, the peer is let go of.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

from vllm_pd_connector.sidechannel.net.files import FilesLeft
from vllm_pd_connector.worker.peers.link import PeerLink

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from vllm_pd_connector.bounded import Pieces
    from vllm_pd_connector.protocol.peer import Event, ManifestsArrived
    from vllm_pd_connector.transport.base import Transport

PIECES_S = 0.001
"""So long a turn connects, and for what is left of the piece in which this time is over."""

LinkKind = TypeVar("LinkKind", bound=PeerLink)


@dataclass(frozen=True, slots=True)
class _Begun:
    arrived: ManifestsArrived
    pieces: Pieces[Event]


class Connecting(Generic[LinkKind]):
    """See the module.

    Args:
        connect: what it takes to connect a link, which comes to what its machine is to be told; raises nothing.
    """

    def __init__(self, transport: Transport, connect: Callable[[LinkKind], Pieces[Event]]) -> None:
        self._transport = transport
        self._connect = connect
        self._begun: dict[LinkKind, _Begun] = {}
        self._files = FilesLeft()

    def __bool__(self) -> bool:
        return bool(self._begun)

    def __contains__(self, link: object) -> bool:
        return link in self._begun

    def incarnation(self, link: LinkKind) -> str:
        """Which life of a peer that is being connected has answered; empty if it is not. Its machine hears of it in the
        end."""
        begun = self._begun.get(link)
        return begun.arrived.incarnation if begun is not None else ""

    def begin(self, link: LinkKind, arrived: ManifestsArrived, manifests: Sequence[bytes]) -> None:
        """Begin to connect to a peer whose manifests have come; what was begun with others of it is abandoned."""
        self.abandon(link)
        self._files.look()
        link.manifests = manifests
        self._begun[link] = _Begun(arrived, self._connect(link))

    def abandon(self, link: LinkKind) -> None:
        """Let go of a peer, if it is being connected."""
        if (begun := self._begun.pop(link, None)) is not None:
            begun.pieces.close()
            link.manifests = ()
            link.disconnect(self._transport)

    def go_on(self) -> Iterator[tuple[LinkKind, ManifestsArrived, Event]]:
        """Connect for as long as a turn may, one peer after the other; yields those with which it is done."""
        until = time.monotonic() + PIECES_S
        while self._begun:
            link, begun = next(iter(self._begun.items()))
            if link.machine.connects(begun.arrived):
                try:
                    next(begun.pieces)
                except StopIteration as end:
                    del self._begun[link]
                    yield link, begun.arrived, end.value
            else:  # its machine has come to an end meanwhile
                self.abandon(link)
            if time.monotonic() >= until:
                return

"""What a pool of links (`peers.pool`) tells whoever owns the requests that need them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from vllm_pd_connector.observability.stats import FailureKind
    from vllm_pd_connector.worker.peers.link import PeerLink


class User(Protocol):
    """The owner of the requests that need links. All but `uses` are called as an event of the queue, so that no
    machine is half way through its actions; what comes of it for a link goes to `Links.drive`."""

    def ready(self, request_id: str, now: float) -> None:
        """The link of this request, which was `Wanted`, is ready."""

    def refused(self, request_id: str, reason: str, kind: FailureKind, now: float) -> None:
        """The link of this request, which was `Wanted`, cannot be had."""

    def lost(self, link: PeerLink, reason: str, now: float) -> None:
        """A link was cut; what may still write does. Requests that still wait for the link are not concerned; they are
        started or refused."""

    def stalled(self, link: PeerLink, reason: str, now: float) -> None:
        """The peer of this link is well and is linked anew, because what was begun on it stands still."""

    def uses(self, link: PeerLink) -> bool:
        """Whether a request holds this link."""

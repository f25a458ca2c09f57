"""Large replies that clients have not taken yet.

zmq bounds how many messages wait for a client, not their bytes. So who is owed MAX_PER_CLIENT already, or when
MAX_BYTES wait for all together, is told BUSY instead.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import zmq

MAX_PER_CLIENT = 2
MAX_BYTES = 256 * 1024 * 1024


class _Unsent(NamedTuple):
    client: bytes
    size: int
    tracker: zmq.MessageTracker


class UnsentReplies:
    """What zmq still holds of the replies that were added. Used by the server's thread alone."""

    def __init__(self) -> None:
        self._replies: list[_Unsent] = []

    def add(self, client: bytes, size: int, tracker: zmq.MessageTracker | None) -> None:
        """A reply was given to zmq; `tracker` is what it returned."""
        if tracker is not None and not tracker.done:
            self._forget_sent()
            self._replies.append(_Unsent(client, size, tracker))

    def has_room(self, client: bytes) -> bool:
        """Whether another large reply may wait for this client."""
        self._forget_sent()
        theirs = sum(reply.client == client for reply in self._replies)
        return theirs < MAX_PER_CLIENT and sum(reply.size for reply in self._replies) < MAX_BYTES

    def _forget_sent(self) -> None:
        self._replies = [reply for reply in self._replies if not reply.tracker.done]

"""What has come of pushes, until whoever asks takes it: answers that are due, and what the lease table has to hear."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm_pd_connector.protocol.push.command_queue import Ticket
    from vllm_pd_connector.protocol.wire.fields import LeaseRef
    from vllm_pd_connector.protocol.wire.messages import ReadDone, Reply


class PushResults:
    """The outgoing half of `PushTable`, which fills it. Each entry is taken once."""

    def __init__(self) -> None:
        self._replies: list[tuple[Ticket, Reply]] = []
        self._served: list[ReadDone] = []
        self._kept: list[tuple[LeaseRef, float]] = []
        self._unneeded: list[str] = []
        self._failed: list[str] = []
        self._freed: list[str] = []

    @property
    def has_replies(self) -> bool:
        """Whether answers are due."""
        return bool(self._replies)

    def take_replies(self) -> list[tuple[Ticket, Reply]]:
        """Answers that are due, in order."""
        replies, self._replies = self._replies, []
        return replies

    def take_served(self) -> list[ReadDone]:
        """Readers that have all their bytes since the last call, as if they had read them themselves."""
        served, self._served = self._served, []
        return served

    def take_kept(self) -> list[tuple[LeaseRef, float]]:
        """Leases that readers compare with from now on, and the seconds for which each must not expire."""
        kept, self._kept = self._kept, []
        return kept

    def take_unneeded(self) -> list[str]:
        """Request ids of finished prefills of which nothing is needed: their lease need not be kept."""
        unneeded, self._unneeded = self._unneeded, []
        return unneeded

    def take_failed(self) -> list[str]:
        """Request ids of finished prefills that cannot be pushed any more: their lease need not be kept."""
        failed, self._failed = self._failed, []
        return failed

    def take_freed(self) -> list[str]:
        """Request ids that `close` was called for and whose blocks nothing reads any more, each once."""
        freed, self._freed = self._freed, []
        return freed

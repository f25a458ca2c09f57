"""What the transfer thread hands to the engine's thread: finished requests, quarantine changes, counts.

The engine's thread takes everything that has gathered once per step; both sides only swap small objects under a lock.
What the transfer thread counts is handed over with the next report, in one piece: the step that hears of a request's
end hears of what it counted too. An instance may take no step after it for hours, unless it is told of one that is due.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import KVConnectorTransferResults
from vllm_pd_connector.metadata import WorkerReport
from vllm_pd_connector.observability.stats import PDStats

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


class Outbox:
    """Thread-safe; every receive is put in once and taken out once.

    `counting` is the transfer thread's own, without the lock: it counts there, and a report or `flush` hands over.
    `ring` is called when something is in it that a step must take out, with the attempt and name of a receive that went
    well and of which no report tells more, else with nothing.
    """

    def __init__(self, ring: Callable[[bytes], None] = lambda received: None) -> None:
        self.counting = PDStats()
        self._ring = ring
        self._lock = threading.Lock()
        self._filled = False  # with results, or a report
        self._results = KVConnectorTransferResults()
        self._report = WorkerReport()
        self._pending: WorkerReport | None = None
        self._stats: PDStats | None = None

    def finished(
        self,
        request_id: str,
        *,
        ok: bool,
        quarantined: bool,
        unshareable: Mapping[int, int] | None = None,
        spare: bool = False,
        attempt: bytes = b"",
    ) -> None:
        """A receive ended on this rank. What belongs to it (a quarantine, `WorkerReport.unshareable`) is announced in
        the same step, never later. That a `spare` one failed is our own business and not told to vLLM."""
        with self._lock:
            self._filled = True
            self._results.finished_recving.add(request_id)
            if not ok and spare:
                self._report.spared.add(request_id)
            elif not ok:
                self._results.failed_recving.add(request_id)
                self._report.failed.add(request_id)
            if quarantined:
                self._report.quarantined[request_id] = 1
            if ok and unshareable:
                self._report.unshareable[request_id] = dict(unshareable)
            self._hand_over()
        self._ring(attempt + request_id.encode() if ok and not quarantined and not unshareable else b"")

    def drained(self, request_id: str) -> None:
        """Nothing writes into this request's blocks any more on this rank."""
        with self._lock:
            self._filled = True
            self._report.drained[request_id] = self._report.drained.get(request_id, 0) + 1
        self._ring(b"")

    def speaks(self, transport: str, protocol: str) -> None:
        """This worker's transport speaks `protocol`; the first step tells."""
        with self._lock:
            self._stats = self._stats or PDStats()
            self._stats.speaks(transport, protocol)

    def flush(self) -> None:
        """Hand over what was counted since the last report; for the transfer thread."""
        if self.counting.is_empty():
            return
        with self._lock:
            self._hand_over()

    def _hand_over(self) -> None:
        if not self.counting.is_empty():
            self._stats = (self._stats or PDStats()).aggregate(self.counting)
            self.counting.reset()

    def take_results(self) -> KVConnectorTransferResults:
        """Receives that ended since the last call, and with them the report that belongs to the same step."""
        if not self._filled:  # as in most steps, which wait for nobody
            return KVConnectorTransferResults()
        with self._lock:
            self._filled = False
            results, self._results = self._results, KVConnectorTransferResults()
            if self._report != WorkerReport():
                self._pending, self._report = self._report, WorkerReport()
        return results

    def take_report(self) -> WorkerReport | None:
        """The report of the results taken last. vLLM asks for it right after the results, in the same step."""
        report, self._pending = self._pending, None
        return report

    def take_stats(self) -> PDStats | None:
        if self._stats is None:
            return None
        with self._lock:
            stats, self._stats = self._stats, None
        return stats

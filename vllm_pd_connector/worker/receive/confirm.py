"""How a decode worker asks whether the prefill side still held what was read: `ReadDone` also ends its lease there.

The receive's machine decides, and repeats the question until its deadline; this module sends it and reads the verdict.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd_connector.errors import Busy, DeadlineExceeded, ProtocolError
from vllm_pd_connector.observability.stats import FailureKind
from vllm_pd_connector.protocol import peer as peers
from vllm_pd_connector.protocol import receive as receives
from vllm_pd_connector.protocol.wire.messages import Failure, ReadDone, ReadVerdict
from vllm_pd_connector.sidechannel.client import busy_of
from vllm_pd_connector.worker.receive.ending import kind_of

if TYPE_CHECKING:
    from vllm_pd_connector.sidechannel.client import Outcome
    from vllm_pd_connector.worker.peers.earliest import Earliest
    from vllm_pd_connector.worker.receive.active import ActiveReceive, Drive
    from vllm_pd_connector.worker.rpc import PendingCalls

ATTEMPTS = 3
RETRY_S = 0.5
"""Behind an answer that did not help: it may come at once each time."""


class Confirmer:
    """See the module. `timeout_s` is for all attempts together; this is worker `reader` of the `readers` that read.
    `due` learns when somebody is to be asked again."""

    def __init__(
        self, calls: PendingCalls, timeout_s: float, reader: int, readers: int, drive: Drive, due: Earliest
    ) -> None:
        self._calls = calls
        self._timeout_s = timeout_s
        self._reader, self._readers = reader, readers
        self._drive = drive
        self._due = due

    def ask(self, active: ActiveReceive, now: float) -> None:
        """Ask for the verdict; it comes as an event."""
        assert active.lease is not None
        request, active.busy = active.request, ""
        message = ReadDone(active.lease, self._reader, self._readers, request.attempt, request.shared, active.taken)
        try:
            self._calls.ask(
                active.link.endpoint,
                message,
                self._timeout_s / ATTEMPTS,
                lambda outcome, at: self._answered(active, outcome, at),
            )
        except Busy as error:  # it only has to wait
            self._answered(active, error, now)
        except ProtocolError as error:
            self._drive(active, receives.Verdict(False, str(error)), now, FailureKind.INTERNAL)

    def _answered(self, active: ActiveReceive, outcome: Outcome, now: float) -> None:
        if busy := busy_of(outcome):
            active.busy = busy
            self._again_at(active, now + RETRY_S)
            return
        match outcome:
            case ReadVerdict(held=held, reason=reason):
                self._drive(active, receives.Verdict(held, reason), now, kind_of(reason, FailureKind.LEASE_LOST))
            case Failure(message=message):
                self._drive(active, receives.Verdict(False, message), now, FailureKind.LEASE_LOST)
            case _:
                active.links.drive(active.link, peers.Suspected(str(outcome)), now)
                # A timeout already cost its wait.
                self._again_at(active, now if isinstance(outcome, DeadlineExceeded) else now + RETRY_S)

    def _again_at(self, active: ActiveReceive, moment: float) -> None:
        active.retry_at = moment
        self._due.lower(moment)

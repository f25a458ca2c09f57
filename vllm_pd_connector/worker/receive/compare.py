"""Verification on the decode side: the prefill side's checksums over a receive are asked for, ours made, both compared.

Sums are made and compared in a thread of their own, beside the transfers; what was found comes back to the transfer
thread as an event of the receive. The checksums themselves are `worker.checksums`'s.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.memory import make_device_current
from vllm_pd_connector.errors import Busy, ProtocolError, TransferError
from vllm_pd_connector.geometry.checksums.sums import Checksum, checksums, common_starts, difference
from vllm_pd_connector.observability.stats import FailureKind
from vllm_pd_connector.protocol import receive as receives
from vllm_pd_connector.protocol.wire.messages import Failure, GetChecksums, LeaseChecksums
from vllm_pd_connector.sidechannel.client import busy_of
from vllm_pd_connector.worker.checksums import memory_of, of_pieces, starts_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm_pd_connector.config import Config
    from vllm_pd_connector.geometry.blocks import BlockTables
    from vllm_pd_connector.geometry.manifest import Manifest
    from vllm_pd_connector.sidechannel.client import Outcome
    from vllm_pd_connector.wake import Wake
    from vllm_pd_connector.worker.receive.active import ActiveReceive, Drive
    from vllm_pd_connector.worker.rpc import PendingCalls
    from vllm_pd_connector.worker.staging.base import Copier

logger = init_logger(__name__)

RETRY_S = 0.5
"""After this the prefill side is asked again that had too much to do, or that could not be asked."""


class ChecksumComparison:
    """See the module. Lives in the transfer thread, but for `close`; `wake` ends that thread's sleep."""

    def __init__(self, config: Config, manifest: Manifest, wake: Wake) -> None:
        self._timeout_s = config.transfer_timeout
        self._manifest = manifest
        self._memory = memory_of(manifest.segments) if config.verify != "off" else []
        self._wake = wake
        self._summing = ThreadPoolExecutor(1, "pd-sums")
        self._current = False
        self._results: deque[Callable[[float], None]] = deque()
        self._again: deque[tuple[float, Callable[[float], None]]] = deque()  # when and how to ask, the next one first

    def begin(self, active: ActiveReceive, copier: Copier, calls: PendingCalls, drive: Drive, now: float) -> None:
        """Ask for the prefill side's checksums and make ours of what `copier` makes visible; what they say comes back
        to this thread. Raises nothing: without a thread to be had, say, this receive alone fails."""
        try:
            copier.arrived()
            self._begin(active, calls, drive, now)
        except Exception as error:
            drive(active, receives.Compared(_told(active, error)), now, FailureKind.INTERNAL)

    def _begin(self, active: ActiveReceive, calls: PendingCalls, drive: Drive, now: float) -> None:
        request, lease = active.request, active.lease
        assert lease is not None and active.plan is not None
        unfilled = active.plan.unfilled
        starts = starts_of(request, self._manifest, active.first_valid_tokens)
        ours, theirs = common_starts(starts, active.plan, request.stop)
        mine = active.summing = self._summing.submit(self._sums, request.blocks, ours, request.stop)

        def compare(outcome: Outcome) -> str:
            match outcome:
                case LeaseChecksums(pieces):
                    return difference(mine.result(), of_pieces(pieces), unfilled)
                case Failure(message=reason):
                    return reason
                case _:
                    return str(outcome)

        def compared(problem: Future[str]) -> None:
            if problem.cancelled():  # this instance ends
                return
            error = problem.exception()
            text = problem.result() if error is None else f"{type(error).__name__}: {error}"

            def told(at: float) -> None:
                summed = mine.done() and mine.exception() is None
                active.verified = not (summed and not mine.result())  # without a sum nothing was compared
                drive(active, receives.Compared(text), at, FailureKind.VERIFICATION)

            self._results.append(told)
            self._wake.set()

        def answered(outcome: Outcome, at: float) -> None:
            if busy := busy_of(outcome):
                active.busy = busy
                self._again.append((at + RETRY_S, ask))
                return
            active.comparing = True
            self._summing.submit(compare, outcome).add_done_callback(compared)

        def ask(at: float) -> None:
            if active.reported:  # it has failed since
                return
            try:
                message = GetChecksums(lease, tuple(theirs), request.stop)
                active.busy = ""
                calls.ask(active.link.endpoint, message, self._timeout_s, answered)
            except Busy as error:  # it only has to wait
                answered(error, at)
            except ProtocolError as error:
                drive(active, receives.Compared(str(error)), at, FailureKind.VERIFICATION)
            except Exception as error:
                drive(active, receives.Compared(_told(active, error)), at, FailureKind.INTERNAL)

        ask(now)

    def _sums(self, blocks: BlockTables, starts: Sequence[int], stop: int) -> list[Checksum]:
        """In the pool's thread. In one of torch's device 0 each rank of a host would begin a context on that GPU, of
        hundreds of MiB."""
        if not self._current:
            make_device_current(self._manifest.segments)
            self._current = True
        return checksums(self._manifest, self._memory, blocks, starts, stop)

    def turn(self, now: float) -> None:
        """Give the receives what was found since, and ask again whom there was no time for."""
        while self._results:
            self._results.popleft()(now)
        while self._again and self._again[0][0] <= now:
            _, ask = self._again.popleft()
            ask(now)

    def next_deadline(self) -> float | None:
        """When a `turn` is due by itself, None if none is."""
        return self._again[0][0] if self._again else None

    def close(self) -> None:
        """End: what waits to be summed is not summed any more."""
        self._summing.shutdown(cancel_futures=True)


def _told(active: ActiveReceive, error: Exception) -> str:
    """Why a receive could not be compared; what is no refusal of the transport's is logged with its place."""
    if isinstance(error, TransferError):
        return str(error)
    logger.error("request %s: what it received cannot be compared", active.request.request_id, exc_info=error)
    return f"unexpected {type(error).__name__}: {error}"

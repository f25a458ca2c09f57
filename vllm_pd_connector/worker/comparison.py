"""Verification on the decode side: the prefill side's sums over a receive are asked for, ours made, both compared.

Sums are made and compared in a thread of their own, beside the transfers; what was found comes back to the transfer
thread as an event of the receive. The sums themselves are `verify`'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.manifest import Manifest
from vllm_pd_connector.geometry.sums import difference
from vllm_pd_connector.observability.stats import FailureKind
from vllm_pd_connector.protocol import receive as receives
from vllm_pd_connector.protocol.messages import Failure, Verified, Verify
from vllm_pd_connector.sidechannel.client import Outcome
from vllm_pd_connector.sidechannel.waiting import Wake
from vllm_pd_connector.worker.active import Active, Drive
from vllm_pd_connector.worker.calls import Calls
from vllm_pd_connector.worker.verify import memory_of, of_pieces, received_sums, starts_of


class Comparison:
    """See the module. Lives in the transfer thread, but for `close`; `wake` ends that thread's sleep."""

    def __init__(self, config: Config, manifest: Manifest, wake: Wake) -> None:
        self._timeout_s = config.transfer_timeout
        self._manifest = manifest
        self._memory = memory_of(manifest.segments) if config.verify != "off" else []
        self._wake = wake
        self._summing = ThreadPoolExecutor(1, "pd-sums")
        self._results: deque[Callable[[float], None]] = deque()

    def begin(self, active: Active, calls: Calls, drive: Drive, now: float) -> None:
        """Ask for the prefill side's sums and make ours; what they say comes back to this thread."""
        order, lease = active.order, active.lease
        assert lease is not None
        active.verified = True
        starts = starts_of(order, self._manifest, active.late_starts)
        mine = self._summing.submit(received_sums, self._manifest, self._memory, order, starts)

        def compare(outcome: Outcome) -> str:
            match outcome:
                case Verified(pieces):
                    return difference(mine.result(), of_pieces(pieces))
                case Failure(message=reason):
                    return reason
                case _:
                    return str(outcome)

        def compared(problem: Future[str]) -> None:
            if problem.cancelled():  # this instance ends
                return
            error = problem.exception()
            text = problem.result() if error is None else f"{type(error).__name__}: {error}"
            self._results.append(lambda at: drive(active, receives.Verified(text), at, FailureKind.VERIFICATION))
            self._wake.set()

        def answered(outcome: Outcome, _: float) -> None:
            self._summing.submit(compare, outcome).add_done_callback(compared)

        try:
            message = Verify(lease, starts, order.stop)
            calls.ask(active.link.endpoint, message, self._timeout_s, answered)
        except ProtocolError as error:
            drive(active, receives.Verified(str(error)), now, FailureKind.VERIFICATION)

    def turn(self, now: float) -> None:
        """Give the receives what was found since."""
        while self._results:
            self._results.popleft()(now)

    def close(self) -> None:
        """End: what waits to be summed is not summed any more."""
        self._summing.shutdown(cancel_futures=True)

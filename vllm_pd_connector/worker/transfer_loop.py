"""The transfer thread of one worker: it owns the transport, the side-channel client, the receives and the pushes.

Other threads only put orders in (`submit`) and take results out of the outbox. The thread sleeps until the side channel
has input, a request came or a deadline is due; only while a transfer runs does it look every few milliseconds, because
transports are polled. What it does then is in `receive.driver` and, on a prefill instance that writes, `push.driver`.

A turn is short: what comes in large numbers or takes long (orders, binding, giving slices to the transport, looking at
transfers, copies of conversion) is begun piece by piece while TURN_S last, and what is left goes on in the next turn,
after answers and deadlines. What is written has half as much again where reads have taken all of it.

A request's way: request -> its peer is wanted -> (handshake, once per incarnation) -> bind -> reads -> the prefill side
confirms that it held the blocks -> report. Whatever goes wrong on the way ends in one failed report with the reason.
"""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import time
from collections import deque
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.geometry.manifest import GroupKind
from vllm_pd_connector.sidechannel.net.keys import keys_of
from vllm_pd_connector.wake import Wake
from vllm_pd_connector.worker.forward_thread import ForwardThread
from vllm_pd_connector.worker.peers.auto_mode import AutoMode
from vllm_pd_connector.worker.peers.bandwidth_test import SCRATCH_BYTES
from vllm_pd_connector.worker.peers.event_queue import EventQueue
from vllm_pd_connector.worker.peers.process_watch import ProcessWatches
from vllm_pd_connector.worker.push.active import ActivePush
from vllm_pd_connector.worker.push.driver import Pushes, PushSetup
from vllm_pd_connector.worker.receive.active import ActiveReceive
from vllm_pd_connector.worker.receive.compare import ChecksumComparison
from vllm_pd_connector.worker.receive.driver import Receives
from vllm_pd_connector.worker.rpc import PendingCalls
from vllm_pd_connector.worker.staging.stager import Stager

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from vllm_pd_connector.config import Config
    from vllm_pd_connector.geometry.manifest import LivenessAddress, Manifest, Segment
    from vllm_pd_connector.metadata import ReceiveRequest
    from vllm_pd_connector.transport.addresses import Address
    from vllm_pd_connector.transport.base import Transport
    from vllm_pd_connector.worker.outbox import Outbox
    from vllm_pd_connector.worker.staging.base import Memory

logger = init_logger(__name__)

SHUTDOWN_S = 10.0
START_LOG_S = 60.0
GOODBYE_S = 0.5

TURN_S = 0.001
"""No other piece of work is begun in a turn that took this long; each takes a millisecond or two at most."""
PAUSE_S = 0.1
_LOOPBACK = ipaddress.ip_address("127.0.0.1")


class TransferLoop:
    """See the module.

    Args:
        manifest: this worker's, without the endpoint, which the transport gives when the thread has started.
        reader: this worker's number among the `readers` workers of its instance.
        push: for a worker of a prefill instance that writes; else None.
        received: called in the thread before a good receive is reported (the digest trace), or None; its other
            arguments are the prefill's request id and `Bound.first_valid_tokens`.
        address: where this worker is dialled by who watches it.
        microbatches: see `ForwardThread`.
    """

    name = "pd-transfer"

    def __init__(
        self,
        config: Config,
        manifest: Manifest,
        make_transport: Callable[[], Transport],
        outbox: Outbox,
        reader: int,
        readers: int,
        push: PushSetup | None = None,
        received: Callable[[ReceiveRequest, str, Mapping[int, int]], None] | None = None,
        address: Address = _LOOPBACK,
        microbatches: bool = False,
    ) -> None:
        self._config = config
        self._manifest = manifest
        self._make_transport = make_transport
        self._outbox = outbox
        self._reader, self._readers = reader, readers
        self._received = received
        self._address = address
        self._keys = keys_of(config)
        self._push = push
        self._pushes: Pushes | None = None
        self._scratch: Memory | None = None
        self._inbox: deque[ReceiveRequest | str] = deque()  # to begin, and names of those to give up
        self._wake = Wake()
        self._forwards = ForwardThread(microbatches=microbatches)
        self._comparison = ChecksumComparison(config, manifest, self._wake)
        self._stop = self._failed = self._holds = False
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._started: Future[bytes] = Future()

    def start(self) -> bytes:
        """Start the thread, create the transport in it and register the memory; returns the transport's endpoint. Each
        START_LOG_S the log says that it waits: a library may take long for much memory, or never answer.

        Raises:
            PDConnectorError: the transport cannot be created, or refuses the memory.
        """
        self._thread.start()
        began = time.monotonic()
        while not wait((self._started,), START_LOG_S).done:
            logger.warning(
                "transport %s has not registered the caches after %.0f s; the engine waits for its library "
                "(py-spy dump --native shows where)",
                self._config.transport,
                time.monotonic() - began,
            )
        return self._started.result()

    @property
    def life(self) -> LivenessAddress:
        """Where this worker is watched, once the thread has started."""
        return self._processes.own

    @property
    def scratch(self) -> Segment | None:
        """Memory for self-tests, once the thread has started."""
        return self._scratch.segment if self._scratch is not None else None

    def submit(self, requests: Sequence[ReceiveRequest], aborts: Sequence[str]) -> None:
        """Begin and give up receives; called in the thread that launches forwards, returns at once."""
        self._forwards.here()
        self._inbox.extend((*requests, *aborts))
        self._wake.set()

    def step_launched(self, step: int, is_done: Callable[[], bool], waves: int | None = None) -> None:
        """A forward was launched in the calling thread, or waves of its layers; see `StepClock`. Returns at once."""
        assert self._push is not None
        self._forwards.here()
        news = self._push.clock.launched(step, is_done, waves)
        if news and self._pushes is not None and self._pushes.waiting:
            self._wake.set()

    def close(self) -> None:
        """End the thread: receives and pushes under way fail and their leases are given back, but nobody takes their
        reports any more. No cache is read or written after this returns, unless it still `runs`."""
        self._stop = True
        self._wake.set()
        if self._thread.ident is not None:  # else there was no thread to be had
            self._thread.join(timeout=SHUTDOWN_S)
        self._comparison.close()
        if not self.runs:
            self._wake.close()

    @property
    def runs(self) -> bool:
        """Whether caches may still be read or written: the thread has not ended, or its transport did not close."""
        return self._thread.is_alive() or self._holds

    @property
    def stuck(self) -> bool:
        """Whether it `runs` for good: nobody is left who could close the transport."""
        return self._holds and not self._thread.is_alive()

    # Everything below runs in the thread.

    def _run(self) -> None:
        with contextlib.ExitStack() as ending:
            try:
                self._begin_work(ending)
                self._started.set_result(self._transport.describe())
            except BaseException as error:
                self._started.set_exception(error)
                return
            while not self._stop:
                self._sleep()
                self._turn(time.monotonic())
            self._end_all("this instance is shutting down", time.monotonic())
        if not self._holds:  # else its reads may go on
            self._receives.ended()

    def _end_all(self, reason: str, now: float) -> None:
        """No order is left untaken: vLLM would wait for its report."""
        while self._inbox:
            if not isinstance(order := self._inbox.popleft(), str):
                self._receives.fail(order, reason, now)
        self._fail_all(reason, now)

    def _fail_all(self, reason: str, now: float) -> None:
        self._receives.fail_all(reason, now)
        if self._pushes is not None:
            self._pushes.fail_all(reason, now)

    def _begin_work(self, ending: contextlib.ExitStack) -> None:
        """Make what the thread works with; `ending` gets what becomes of it, however far this comes."""
        self._processes = ProcessWatches(self._address, self._wake.set)
        ending.callback(self._let_go)
        self._transport = self._make_transport()
        self._holds = True
        states = any(group.kind is GroupKind.STATE for group in self._manifest.groups)
        self._stager = Stager(self._transport, self._manifest.segments, self._config.staging_bytes, states=states)
        if self._config.mode == "auto" or self._push is not None:
            self._scratch = self._stager.copier.allocate(SCRATCH_BYTES, "the self-test")
        scratch = () if self.scratch is None else (self.scratch,)
        self._transport.register((*self._manifest.segments, *self._stager.segments, *scratch))
        self._calls = PendingCalls(self._keys)
        ending.callback(self._calls.close, linger_s=GOODBYE_S)
        self._auto_mode = AutoMode(self._transport, self.scratch, self._config.handshake_timeout, self._outbox.counting)
        self._events = EventQueue()
        common = (
            *(self._config, self._manifest, self._transport),
            *(self._stager, self._calls, self._processes, self._events),
        )
        self._receives = Receives(
            *common,
            self._comparison,
            self._outbox,
            self._reader,
            self._readers,
            connected=self._auto_mode.begin if self._config.mode == "auto" else None,
            received=self._received,
        )
        if self._push is not None:
            self._pushes = Pushes(*common, self._push, self._reader, self._outbox.counting)

    def _let_go(self) -> None:
        """Last: end the transport, and then be seen to have ended. Where it does not close, what it moves may land: the
        memory must stay, and who watches this worker must not take it for ended."""
        try:
            if self._holds:
                self._transport.close()
        except Exception:
            logger.exception("transport %s does not close: restart the instance", self._config.transport)
            return
        self._holds = False
        self._processes.close()

    def _sleep(self) -> None:
        """Until something is to be done; without memory to wait with, say, for a moment. Without this thread nobody's
        receive would end."""
        try:
            now = time.monotonic()
            self._calls.wait(self._wake, self._next_deadline(now), exact=self._forwards.idle(now))
        except Exception:
            logger.exception("the transfer thread could not wait")
            time.sleep(PAUSE_S)

    def _turn(self, now: float) -> None:
        """One round: replies, orders, transfers, deadlines. An unexpected error fails receives and pushes, not the
        thread."""
        try:
            self._events.drain()  # what an error in the last turn has left
            # Replies first: the goodbye of a process must not meet the links of orders that name the next one there.
            for endpoint in self._calls.deliver(now):
                self._receives.departed(endpoint, now)
                if self._pushes is not None:
                    self._pushes.departed(endpoint, now)
            until = time.monotonic() + TURN_S
            if not self._receives.waited:  # for orders: they take their turns
                self._take_orders(now, until)
            self._comparison.turn(now)
            self._receives.poll(now, until)
            if not self._receives.bound_long:
                self._poll_staged(now)
            self._auto_mode.turn()
            self._receives.tick(now)
            if self._pushes is not None:
                # Reads that run may take the whole of every turn: what is written has time of its own.
                self._pushes.turn(now, max(until, time.monotonic() + TURN_S / 2))
            self._processes.tick(now)
        except Exception as error:
            logger.exception("the transfer thread met an unexpected error")
            self._fail_all(f"unexpected {type(error).__name__}: {error}", now)
            self._wake.set()
            if self._failed:  # as each turn may, and nothing is left that a pause would hold up
                time.sleep(PAUSE_S)
            self._failed = True
        else:
            self._failed = False
        self._outbox.flush()

    def _take_orders(self, now: float, until: float) -> None:
        while self._inbox:
            match self._inbox.popleft():
                case str(request_id):
                    self._receives.abort(request_id, now)
                case request:
                    self._begin(request, now)
            if time.monotonic() >= until:
                break

    def _begin(self, request: ReceiveRequest, now: float) -> None:
        try:
            self._receives.begin(request, now)
        except Exception as error:  # a defect of ours that one request met must not reach the others
            logger.exception("request %s: its receive could not begin", request.request_id)
            self._receives.fail(request, f"unexpected {type(error).__name__}: {error}", now)

    def _poll_staged(self, now: float) -> None:
        for stream, failure in self._stager.poll():
            match stream.owner:
                case ActiveReceive() as active:
                    self._receives.staged(active, stream, failure, now)
                case ActivePush() as push:
                    assert self._pushes is not None
                    self._pushes.staged(push, stream, failure, now)

    def _next_deadline(self, now: float) -> float | None:
        due = [now if self._inbox else None, self._receives.next_deadline(now), self._comparison.next_deadline()]
        due += [now + pause for pause in (self._stager.pause(), self._auto_mode.pause()) if pause is not None]
        due += [self._pushes.next_deadline(now)] if self._pushes is not None else []
        return min((moment for moment in due if moment is not None), default=None)

"""Opening peers in Mooncake's library, so that one that stopped does not stop the others.

The library opens a peer with its first submit: an exchange with the peer's engine that blocks, under a lock that every
submit takes. It waits 5 s for the connection (MC_HANDSHAKE_CONNECT_TIMEOUT) and 60 s for the answer, which cannot be
set. Hence:

- **A peer is probed first.** A probe is the same exchange with the same port, without the lock, in a thread of its own.
  Whoever is frozen, or whose port is filtered, is found here while the others go on.
- **It is opened when it has answered**, again in a thread, and nothing is submitted while that runs: milliseconds,
  unless the peer stops just then.
- **What is overdue is ended.** The library has no call for that, but a connection can be shut down under it
  (`sockets`). The exchange then fails as if the peer had gone.
- **An open peer is asked again**, over RDMA: for its queue pairs with the first descriptor, and for its memory after an
  error, in threads that serve all peers. So exchanges with a peer that is lost, or of whose descriptors none has ended
  for long, are ended too.
- **What is ended for one link fails no other.** A connection does not say for whom it was made, and a lost peer's next
  link leads to the same port. A step that such an end may have met is taken again, and none begins meanwhile.

Source of the library's behaviour: mooncake-transfer-engine 0.3.13.post1, observed and read.
"""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.transport.mooncake.sockets import hang_up

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.transport.addresses import Address

logger = logging.getLogger(__name__)

# Nothing is submitted to anybody for this long at most, while a peer that answered the probe is opened.
OPEN_S = 5.0

# The library ends an exchange with nobody after its 5 s for a connection; longer, closing does not wait.
CLOSE_S = 6.0
_AGAIN_S = 0.25


@dataclass(eq=False, slots=True)
class Opening:
    """The way to one engine: not begun, probed, then opened; `result` of the step is 0 when it worked. `disturbed`:
    what was ended there for another link may have been this step."""

    segment: str
    address: Address
    port: int
    thread: threading.Thread | None = None
    opens: bool = False
    result: int = -1
    deadline: float = 0.0
    overdue: bool = False
    disturbed: bool = False
    hung_up_at: float = 0.0

    @property
    def place(self) -> tuple[Address, int]:
        return self.address, self.port

    def runs(self) -> bool:
        return self.thread is not None and self.thread.is_alive()


class Openings:
    """The openings of an engine. One thread calls; `timeout` is the seconds that a peer has to answer the probe."""

    def __init__(self, engine: Any, timeout: float) -> None:
        self._engine = engine
        self._timeout = timeout
        self._running: list[Opening] = []
        self._ending: list[tuple[tuple[Address, int], threading.Thread]] = []

    def ready(self, opening: Opening) -> bool:
        """Whether descriptors of this peer can be submitted now without waiting; takes the next step to that.

        Raises:
            TransferError: the engine does not answer, or refuses, or no thread is left to ask it in.
        """
        self._look_after(time.monotonic())
        if opening.runs() or any(place == opening.place for place, _ in self._ending):
            return False
        if opening.thread is None:
            self._begin(opening, self._timeout)
            return False
        if opening.result and opening.disturbed and not opening.overdue:
            self._begin(opening, opening.deadline - time.monotonic())
            return False
        if opening.result:
            why = "no answer in time; it is stopped, or the port is filtered" if opening.overdue else "see its log"
            raise TransferError(f"Mooncake cannot open {opening.segment}: {why}")
        if any(other.opens for other in self._running):
            return False
        if not opening.opens:
            opening.opens = True
            self._begin(opening, min(self._timeout, OPEN_S))
            return False
        return True

    def end_exchanges(self, opening: Opening, now: float) -> None:
        """End whatever the library asks this engine, which is open; called as long as that is wanted. It is done beside
        the caller: a process with thousands of peers has many descriptors to look at."""
        if now < opening.hung_up_at + _AGAIN_S:
            return
        opening.hung_up_at = now
        self._disturb(opening)
        thread = threading.Thread(target=_hang_up, args=(opening,), name="pd-mooncake-hang-up", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no thread is left; who calls has transfers that are well
            logger.warning("an exchange of Mooncake with %s cannot be ended yet: %s", opening.segment, error)
            return
        self._ending.append((opening.place, thread))

    def close(self) -> None:
        """End what runs, and let go of the engine.

        Raises:
            TransferError: a step does not end; the engine stays until it does.
        """
        until = time.monotonic() + CLOSE_S
        while self._running and time.monotonic() < until:
            for opening in self._running:
                _hang_up(opening)
                assert opening.thread is not None
                opening.thread.join(_AGAIN_S)
            self._look_after(time.monotonic())
        self._engine = None
        if self._running:
            peers = ", ".join(opening.segment for opening in self._running)
            reason = (
                f"Mooncake is still opening {peers}: its engine stays until that ends, and bytes may land until then"
            )
            raise TransferError(reason, terminal=False)

    def _step(self, opening: Opening) -> Callable[[str], int]:
        """The probe, or, when that has worked, an empty read: it opens a peer and moves nothing."""
        engine = self._engine
        if not opening.opens:
            probe: Callable[[str], int] = engine.send_probe
            return probe
        return lambda segment: engine.batch_transfer_sync_read(segment, [], [], [])

    def _begin(self, opening: Opening, seconds: float) -> None:
        step = self._step(opening)

        def run() -> None:
            opening.result = step(opening.segment)

        opening.result, opening.disturbed, opening.overdue = -1, False, False
        opening.deadline = time.monotonic() + seconds
        thread = threading.Thread(target=run, name="pd-mooncake-open", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            raise TransferError(f"Mooncake cannot open {opening.segment}: {error}") from error
        opening.thread = thread
        self._running.append(opening)

    def _look_after(self, now: float) -> None:
        """Forget what ended, and end what is overdue, again and again until it is connected or has ended."""
        self._running = [opening for opening in self._running if opening.runs()]
        self._ending = [(place, thread) for place, thread in self._ending if thread.is_alive()]
        for opening in self._running:
            if now >= opening.deadline:
                opening.overdue, opening.deadline = True, now + _AGAIN_S
                self._disturb(opening)
                _hang_up(opening)

    def _disturb(self, ended: Opening) -> None:
        """What is ended there for this opening may be a step of another."""
        for opening in self._running:
            if opening is not ended and opening.place == ended.place:
                opening.disturbed = True


def _hang_up(opening: Opening) -> None:
    """End what the library asks there, if this process can look at its sockets now; else its caller tries again. Who
    calls may have come for another peer."""
    try:
        hang_up(*opening.place)
    except OSError as error:
        logger.warning("an exchange of Mooncake with %s cannot be ended yet: %s", opening.segment, error)

"""Keeps leases alive on prefill instances while requests queue here, on a thread of its own.

A decode instance may queue a request for longer than the lease, and its forward loop must not decide whether the
lease lives. The thread starts with the first remote request, sleeps until the next renewal or command, and speaks
only to the side channel. A renewal that fails is only logged: the read that follows is what finds out, and fails
the request with the prefill side's reason.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire.push_messages import DeclinePush, KeepPrefills, PrefillRef
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.errands import Errands
from vllm_pd_connector.sidechannel.waiting import wait
from vllm_pd_connector.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.protocol.wire.fields import Reading
    from vllm_pd_connector.sidechannel.net.keys import Keys

logger = init_logger(__name__)

RENEWALS_PER_LEASE = 3
MIN_RENEWAL_S = 0.05
"""A lease that a request's parameters call shorter than this takes is not kept: they may be an unauthenticated peer's,
and renewals without a pause would take the engine's core from it and flood the prefill side."""
FIRST_RENEWAL_S = 2.0
"""A lease is renewed after so long at the latest where its request still queues: how old it was when its parameters
came here, nobody has said. Most requests are read before, without one."""
UNKNOWN_S = 30.0
"""The lease that prefill instances give where they are not told another (`Config.kv_lease_duration`)."""
REPLY_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 2.0
"""How long a request waits to hear whether a lease is held that it can do without."""
AGAIN_S = 0.5
REMEMBER = 1024
_NAMED = 3  # leases in a warning
CANNOT_BEGIN = "lease renewal cannot begin yet: what requests came for may expire before it is read"


class LeaseRenewer:
    """Renews and releases leases; all but `close` may be called from any thread, also after it.

    Args:
        lease_seconds: of this instance; the prefill side should have the same. A prefill that has no lease yet, or
            whose lease is not known here, is kept as often as one of that duration is, or of UNKNOWN_S if that is
            less: what lease the prefill side gives is not known.
    """

    def __init__(self, keys: Keys | None, lease_seconds: float):
        self._keys = keys
        self._interval = max(min(lease_seconds, UNKNOWN_S) / RENEWALS_PER_LEASE, MIN_RENEWAL_S)
        self._prefills: dict[str, tuple[Callable[[], str | None], PrefillRef, float]] = {}
        self._prefills_due = math.inf
        self._commands: deque[Callable[[], object]] = deque()
        self._leases: dict[str, dict[Reading, tuple[float, float]]] = {}
        self._due: dict[str, float] = {}
        self._asked: dict[int, str] = {}  # whom, by the client's tokens
        self._awaited: dict[int, Callable[[object], None]] = {}  # by whom
        self._gone: Bounded[str, None] = Bounded(REMEMBER)  # of which it was said
        self._errands = Errands()
        self._wake = Wake()
        self._stop = False
        self._until = 0.0
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()  # around the beginning and the end of the thread
        self._closed = False

    def keep(self, address: str, reading: Reading, lease_seconds: float) -> None:
        """Renew this lease of so many seconds, held at `address`, until `drop`."""
        self._submit(lambda: self._add(address, reading, lease_seconds))

    def ask(self, address: str, reading: Reading, lease_seconds: float, answered: Callable[[object], None]) -> None:
        """As `keep`; `answered` is called once, in the renewer's thread, with the answer to a first renewal."""
        self._submit(lambda: self._add(address, reading, lease_seconds, answered))

    def find(self, address: str, name: str, answered: Callable[[object], None]) -> None:
        """Ask what is kept of a conversation; `answered` is called once, in the renewer's thread, with the answer."""
        self._submit(lambda: self._ask(address, m.FindConversation(name), answered))

    def drop(self, address: str, reading: Reading, *, release: bool) -> None:
        """Stop renewing; with `release`, tell the prefill side that this request will not read, also one that was
        never kept."""
        self._submit(lambda: self._remove(address, reading, release))

    def keep_prefill(self, request_id: str, where: Callable[[], str | None], prefill: PrefillRef) -> None:
        """Keep a prefill for a request that queues here until `drop_prefill`. `where` gives the prefill side's address,
        None while that is not known, in the renewer's thread."""
        self._submit(lambda: self._add_prefill(request_id, where, prefill))

    def drop_prefill(self, request_id: str) -> None:
        """The request does not queue here any more."""
        self._submit(lambda: self._prefills.pop(request_id, None))

    def decline(self, address: str, prefill: PrefillRef, began: float) -> None:
        """Tell the prefill side at `address` that a request which came here at `began` needs nothing of a prefill that
        has no lease yet."""
        self._submit(lambda: self._decline(address, prefill, began))

    def close(self) -> None:
        """End the thread, after the answers to what was sent or half of the reply time-out."""
        with self._lock:
            self._closed = True
        if self._thread is not None:
            self._commands.append(self._end)
            self._wake.set()
            self._thread.join(timeout=REPLY_TIMEOUT_S)
        if self._thread is None or not self._thread.is_alive():
            self._wake.close()

    def _submit(self, command: Callable[[], object]) -> None:
        with self._lock:
            if self._closed:
                return
            self._commands.append(command)
            if self._thread is None or not self._thread.is_alive():
                thread = threading.Thread(target=self._run, name="pd-lease-renew", daemon=True)
                try:
                    thread.start()
                    self._thread = thread
                except RuntimeError:  # no thread is left; the next command tries again
                    logger.exception(CANNOT_BEGIN)
        self._wake.set()

    # Everything below runs in the renewer's thread.

    def _begun(self) -> bool:
        """Whether there is a client; without a descriptor for one it is tried again: requests wait for answers. Once
        also where this was closed already: what was to be given back waits among the commands."""
        told = False
        while True:
            try:
                self._client = SideChannelClient(keys=self._keys)
                return True
            except Exception:
                if not told:
                    logger.exception(CANNOT_BEGIN)
                told = True
            if self._closed:
                return False
            time.sleep(AGAIN_S)

    def _run(self) -> None:
        if not self._begun():
            return
        while not self._stop or (self._asks() and time.monotonic() < self._until):
            self._sleep()
            self._turn()
        self._client.close()

    def _asks(self) -> bool:
        """Whether something was not answered, or is still to be sent in time."""
        again = self._errands.next_deadline()
        return self._client.under_way() > 0 or (again is not None and again < self._until)

    def _sleep(self) -> None:
        """Until something is to be done; without memory to wait with, say, for a moment. Without this thread no lease
        would be renewed before the next command, and nobody answered who asked."""
        try:
            again = self._errands.next_deadline()
            dues = (self._until,) if self._stop else (*self._due.values(), self._prefills_due)
            due = min((*dues, math.inf if again is None else again))
            wait(self._client, self._wake, due if due < math.inf else None)
        except Exception:
            logger.exception("lease renewal could not wait")
            time.sleep(AGAIN_S)

    def _turn(self) -> None:
        while self._commands:
            _guarded(self._commands.popleft())
        _guarded(lambda: self._renew_due(time.monotonic()))
        _guarded(lambda: self._renew_prefills(time.monotonic()))
        _guarded(lambda: self._errands.turn(self._client, time.monotonic()))
        _guarded(self._collect)

    def _collect(self) -> None:
        now = time.monotonic()
        for token, outcome in self._client.receive():
            if self._errands.take(token, outcome, now):
                continue
            address = self._asked.pop(token)
            awaited = self._awaited.pop(token, partial(self._answered, address))
            _guarded(partial(awaited, outcome))

    def _answered(self, address: str, outcome: object) -> None:
        if isinstance(outcome, m.Renewed) and (gone := [name for name in outcome.gone if name not in self._gone]):
            self._gone.update(dict.fromkeys(gone))
            logger.warning("the prefill side no longer holds %s", ", ".join(gone))
        elif isinstance(outcome, Exception):
            kept = sorted(reading.request_id for reading in self._leases.get(address, ()))
            names = [*kept[:_NAMED], *([f"{len(kept) - _NAMED} more"] if len(kept) > _NAMED else [])]
            logger.warning("lease renewal at %s: %s; kept there: %s", address, outcome, ", ".join(names) or "none")

    def _add(
        self, address: str, reading: Reading, lease_seconds: float, answered: Callable[[object], None] | None = None
    ) -> None:
        interval = max(lease_seconds / RENEWALS_PER_LEASE, MIN_RENEWAL_S)
        due = time.monotonic() + min(interval, FIRST_RENEWAL_S)
        self._leases.setdefault(address, {})[reading] = interval, due
        if answered is not None:
            self._ask(address, m.Renew((reading,)), answered)
        elif reading.shared:  # before another request that shares the lease has read it
            self._send(address, m.Renew((reading,)))
        self._due[address] = min(self._due.get(address, due), due)

    def _ask(self, address: str, request: m.Request, answered: Callable[[object], None]) -> None:
        try:
            token = self._client.send(address, request, ASK_TIMEOUT_S)
        except Exception as error:  # whatever it is: who asked waits for the answer
            answered(error)
        else:
            self._asked[token], self._awaited[token] = address, answered

    def _add_prefill(self, request_id: str, where: Callable[[], str | None], prefill: PrefillRef) -> None:
        self._prefills[request_id] = where, prefill, time.monotonic()
        self._prefills_due = min(self._prefills_due, time.monotonic() + self._interval)

    def _remove(self, address: str, reading: Reading, release: bool) -> None:
        leases = self._leases.get(address, {})
        leases.pop(reading, None)
        if not leases:
            self._leases.pop(address, None)
            self._due.pop(address, None)
        if release:
            self._give_back(address, lambda: m.Release((reading,)))

    def _renew_due(self, now: float) -> None:
        for address in [address for address, due in self._due.items() if due <= now]:
            leases = self._leases[address]
            renewed = [reading for reading, (interval, due) in leases.items() if due <= now + interval / 4]
            leases.update((reading, (leases[reading][0], now + leases[reading][0])) for reading in renewed)
            self._due[address] = min(due for _, due in leases.values())
            for batch in m.lease_batches(renewed):
                self._send(address, m.Renew(batch))

    def _renew_prefills(self, now: float) -> None:
        if now < self._prefills_due:
            return
        self._prefills_due = now + self._interval if self._prefills else math.inf
        by_address: dict[str, list[PrefillRef]] = {}
        for where, prefill, _ in self._prefills.values():
            if (address := where()) is not None:
                by_address.setdefault(address, []).append(prefill)
        for address, prefills in by_address.items():
            for batch in m.lease_batches(prefills):
                self._send(address, KeepPrefills(batch))

    def _send(self, address: str, request: m.Request) -> None:
        try:
            self._asked[self._client.send(address, request, REPLY_TIMEOUT_S)] = address
        except ProtocolError as error:
            logger.warning("lease renewal at %s: %s", address, error)
        except Exception:  # nobody else's is to be left out for it
            logger.exception("lease renewal at %s", address)

    def _decline(self, address: str, prefill: PrefillRef, began: float) -> None:
        self._give_back(address, lambda: DeclinePush(prefill, max(time.monotonic() - began, 0.0)))

    def _give_back(self, address: str, make: Callable[[], m.Request]) -> None:
        try:
            self._errands.send(self._client, address, make, REPLY_TIMEOUT_S, time.monotonic())
        except ProtocolError as error:
            logger.warning("giving back at %s: %s", address, error)
        except Exception:  # nobody else's is to be kept for it
            logger.exception("giving back at %s", address)

    def _end(self) -> None:
        """Nobody will read what still queues here."""
        self._stop, self._until = True, time.monotonic() + REPLY_TIMEOUT_S / 2
        self._errands.end()
        for address, leases in self._leases.items():
            for batch in m.lease_batches(list(leases)):
                self._give_back(address, partial(m.Release, batch))
        for where, prefill, began in self._prefills.values():
            if (place := where()) is not None:
                self._decline(place, prefill, began)
        self._leases, self._due, self._prefills = {}, {}, {}


def _guarded(step: Callable[[], object]) -> None:
    """One lease, or one request, that meets a defect of ours must not take the turns of the others."""
    try:
        step()
    except Exception:
        logger.exception("lease renewal met an unexpected error")

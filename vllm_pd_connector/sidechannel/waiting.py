"""Sleeping until there is something to do: input on a client's sockets, another thread's call, or a deadline.

A loop that owns a `SideChannelClient` waits here and nowhere else, so an idle one costs nothing.
"""

from __future__ import annotations

import ctypes
import math
import time
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from vllm_pd_connector.protocol.wire.messages import Request
    from vllm_pd_connector.sidechannel.client import Outcome, SideChannelClient
    from vllm_pd_connector.wake import Wake


_PR_SET_TIMERSLACK = 29
"""Linux's prctl(2): so many nanoseconds later than asked may this thread's sleeps end; 0 is what it began with."""

_process = ctypes.CDLL(None)


def sleep(seconds: float, *, exact: bool) -> None:
    """Sleep; if `exact`, without the 50 us that the kernel may add. What waking takes it always adds: 20 us, also to a
    sleep of 0 s. Threads inherit the slack of the one that makes them, so it is set for the sleep alone. Where that is
    forbidden the sleep is like any other."""
    if not exact:
        time.sleep(seconds)
        return
    _process.prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)
    try:
        time.sleep(seconds)
    finally:
        _process.prctl(_PR_SET_TIMERSLACK, 0, 0, 0, 0)


def wait(client: SideChannelClient, wake: Wake, deadline: float | None, *, exact: bool = False) -> bool:
    """Return when the client has input, `wake` was set, or time.monotonic() reaches `deadline` (None: never); whether
    the client is to `receive`, since there is input or its deadline is over. A transfer is looked at behind each such
    sleep, hundreds of times a second, so one costs little: no poller is made, no event taken that was not seen. Where
    the deadline is over and nothing came this sleeps all the same, for 0 s, of which the kernel makes 70 us: others
    have the interpreter and the core meanwhile. Without it long receives beside a busy forward end no sooner, and its
    steps take longer (docs/design/transports.md, Pauses). A sleep is as `exact` as the caller wants it."""
    due = client.next_deadline()
    moments = [moment for moment in (deadline, due) if moment is not None]
    seconds = max(0.0, min(moments) - time.monotonic()) if moments else None
    sockets = [(socket, zmq.POLLIN) for socket in (wake.fileno(), *client.sockets())]
    if seconds is not None and seconds < 0.001:
        # zmq counts in milliseconds: input that comes during so short a sleep is seen after it.
        if not (ready := zmq.zmq_poll(sockets, 0)):
            sleep(seconds, exact=exact)
    else:
        ready = zmq.zmq_poll(sockets, -1 if seconds is None else math.ceil(seconds * 1000))
    awoken = any(socket == wake.fileno() for socket, _ in ready)
    if awoken:
        wake.clear()
    return len(ready) > awoken or (due is not None and due <= time.monotonic())


def ask(client: SideChannelClient, wake: Wake, endpoint: str, request: Request, timeout_s: float) -> Outcome:
    """Send a request and wait for what becomes of it.

    Raises:
        ProtocolError: it cannot be sent; see `SideChannelClient.send`.
    """
    token = client.send(endpoint, request, timeout_s)
    while (outcome := dict(client.receive()).get(token)) is None:
        wait(client, wake, None)
    return outcome

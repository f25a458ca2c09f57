"""Sleeping until there is something to do: input on a client's sockets, another thread's call, or a deadline.

A loop that owns a `SideChannelClient` waits here and nowhere else, so an idle one costs nothing.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

import zmq

if TYPE_CHECKING:
    from vllm_pd_connector.protocol.wire.messages import Request
    from vllm_pd_connector.sidechannel.client import Outcome, SideChannelClient
    from vllm_pd_connector.wake import Wake


def wait(client: SideChannelClient, wake: Wake, deadline: float | None) -> None:
    """Return when the client has input, `wake` was set, or time.monotonic() reaches `deadline` (None: never)."""
    moments = [moment for moment in (deadline, client.next_deadline()) if moment is not None]
    seconds = max(0.0, min(moments) - time.monotonic()) if moments else None
    poller = zmq.Poller()
    poller.register(wake.fileno(), zmq.POLLIN)
    for socket in client.sockets():
        poller.register(socket, zmq.POLLIN)
    if seconds is not None and seconds < 0.001:
        # zmq counts in milliseconds: input that comes during so short a sleep is seen after it.
        if not poller.poll(0):
            time.sleep(seconds)
    else:
        poller.poll(None if seconds is None else math.ceil(seconds * 1000))
    wake.clear()


def ask(client: SideChannelClient, wake: Wake, endpoint: str, request: Request, timeout_s: float) -> Outcome:
    """Send a request and wait for what becomes of it.

    Raises:
        ProtocolError: it cannot be sent; see `SideChannelClient.send`.
    """
    token = client.send(endpoint, request, timeout_s)
    while (outcome := dict(client.receive()).get(token)) is None:
        wait(client, wake, None)
    return outcome

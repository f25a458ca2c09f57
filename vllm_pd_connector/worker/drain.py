"""The orderly end of a prefill worker: its memory stays readable until nobody holds a lease on it, for a while.

vLLM ends its workers before the scheduler half, so a worker asks its own instance's side channel how many leases are
held, and waits until none is or its time is over. Readers that come later are told by the scheduler half that the
instance leaves, or find its memory gone; either way their requests fail, or are computed by the decode instance.
"""

from __future__ import annotations

import contextlib
import time
from contextlib import closing
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import DeadlineExceeded, ProtocolError
from vllm_pd_connector.protocol.wire.messages import GetLeaseCount, LeaseCount
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.waiting import ask, wait
from vllm_pd_connector.wake import Wake

if TYPE_CHECKING:
    from vllm_pd_connector.sidechannel.net.keys import Keys

logger = init_logger(__name__)

_ASK_EVERY_S = 0.05
_REPLY_S = 1.0


def wait_for_readers(endpoint: str, keys: Keys | None, seconds: float) -> bool:
    """Wait until this instance's side channel at `endpoint` holds no lease, at most some seconds; whether it does."""
    until = time.monotonic() + seconds
    wake = Wake()
    with closing(SideChannelClient(keys=keys)) as client, closing(wake), contextlib.suppress(ProtocolError):
        while (left := until - time.monotonic()) > 0:
            outcome = ask(client, wake, endpoint, GetLeaseCount(), min(_REPLY_S, left))
            if outcome == LeaseCount(0):
                return True
            if not isinstance(outcome, LeaseCount | DeadlineExceeded):  # else it may be busy, and readers still read
                break  # the side channel has ended already: nobody can be waiting for it
            wait(client, wake, min(until, time.monotonic() + _ASK_EVERY_S))
    logger.warning("shutting down although decode instances may still read from this worker")
    return False

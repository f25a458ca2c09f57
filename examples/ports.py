"""Free ports, for who must name one before somebody listens there: servers that are started, and tests.

They lie below the range from which the kernel takes the ports of connections and of those who leave the choice to it,
every process of a parallel run of the tests has its own share of them, and none is given again soon: what is free when
it is looked at stays free, though a server listens long after its ports were picked.
"""

from __future__ import annotations

import os
import random
import socket
from collections import deque
from collections.abc import Sequence

PORTS = range(18000, 32000)
SHARES = 20

SOON = 256

_given: deque[int] = deque(maxlen=SOON)


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nobody listens."""
    return free_ports((0,), host)


def free_ports(offsets: Sequence[int], host: str = "127.0.0.1") -> int:
    """A port such that nobody listens at any of `offsets` from it."""
    share = _share()
    while True:
        base = random.SystemRandom().randrange(share.start, share.stop - max(offsets))
        wanted = {base + offset for offset in offsets}
        if wanted.isdisjoint(_given) and all(_is_free(host, port) for port in wanted):
            _given.extend(wanted)
            return base


def _share() -> range:
    """The ports of this process."""
    worker = os.environ.get("PYTEST_XDIST_WORKER")
    if worker is None:
        return PORTS
    size = len(PORTS) // SHARES
    first = PORTS.start + int(worker.removeprefix("gw")) % SHARES * size
    return range(first, first + size)


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        try:
            probe.bind((host, port))
        except OSError:
            return False
        return True

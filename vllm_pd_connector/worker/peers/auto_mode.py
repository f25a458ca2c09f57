"""Mode auto: which way a prefill instance is used, found when the link to it is made.

An instance that offers memory for it is tried both ways (`bandwidth_test`), beside whatever else the transfer thread
does, and the faster one is taken for the requests that come afterwards. Those that come before are read, and so are all
if anything stands against a try.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.worker.peers.bandwidth_test import Bandwidth, measure_bandwidth
from vllm_pd_connector.worker.peers.process_watch import has_ended
from vllm_pd_connector.worker.poll_interval import pause

if TYPE_CHECKING:
    from collections.abc import Generator

    from vllm_pd_connector.geometry.manifest import Segment
    from vllm_pd_connector.observability.stats import PDStats
    from vllm_pd_connector.transport.base import Transport, TransportPeer
    from vllm_pd_connector.worker.peers.process_watch import ProcessWatch
    from vllm_pd_connector.worker.receive.read_link import ReadLink

    Running = tuple[ReadLink, TransportPeer, ProcessWatch | None, Generator[None, None, Bandwidth]]

logger = init_logger(__name__)


class AutoMode:
    """The self-tests under way. Lives in the transfer thread.

    Args:
        scratch: memory of this worker for them, None if there is none.
        warm_s: seconds that it may take to open connections.
    """

    def __init__(self, transport: Transport, scratch: Segment | None, warm_s: float, stats: PDStats) -> None:
        self._transport = transport
        self._scratch = scratch
        self._warm_s = warm_s
        self._stats = stats
        self._running: list[Running] = []
        self._began = 0.0

    def begin(self, link: ReadLink) -> None:
        """Measure both ways to the instance of this link; `link.bandwidth` will say what was found."""
        if link.scratch is None or self._scratch is None:
            logger.info("prefill engine %s reads only: it does not offer to write", link.engine_id)
            return
        peer, there = link.scratch
        connected = partial(_connected, link, peer)
        test = measure_bandwidth(self._transport, peer, self._scratch, there, connected, self._warm_s)
        self._running.append((link, peer, link.watch_of(peer), test))
        self._began = time.monotonic()
        self.turn()

    def turn(self) -> None:
        """Go on with all of them. What the transport never ends is over with the process at the other end."""
        for entry in list(self._running):
            link, peer, watch, test = entry
            bandwidth: Bandwidth | None = None
            try:
                if not _connected(link, peer) and has_ended(watch, self._transport, peer, time.monotonic()):
                    raise PeerLost("its worker has ended")
                next(test)
                continue
            except StopIteration as end:
                bandwidth = end.value
            except TransferError as error:
                logger.warning("self-test with prefill engine %s: %s; it is read from", link.engine_id, error)
            except Exception:  # a defect of ours that one test met must not reach the receives
                logger.exception("self-test with prefill engine %s; it is read from", link.engine_id)
            self._running.remove(entry)
            if bandwidth is not None:
                self._found(link, bandwidth)

    def pause(self) -> float | None:
        """Seconds until a `turn` is due; None if nothing runs."""
        return pause(time.monotonic() - self._began) if self._running else None

    def _found(self, link: ReadLink, bandwidth: Bandwidth) -> None:
        link.bandwidth = bandwidth
        way = "is asked to write" if bandwidth.prefers_push else "is read from"
        logger.info("self-test with prefill engine %s: %s; it %s", link.engine_id, bandwidth, way)
        if bandwidth.run_cost:
            link.use_run_cost(bandwidth.run_cost)
            self._stats.gauge("run cost", bandwidth.run_cost)
        self._stats.gauge("read bytes/s", round(bandwidth.read))
        self._stats.gauge("write bytes/s", round(bandwidth.write))
        self._stats.gauge("push chosen", int(bandwidth.prefers_push))


def _connected(link: ReadLink, peer: TransportPeer) -> bool:
    """Whether the rank that is tested is still the link's."""
    return link.scratch is not None and link.scratch[0] is peer

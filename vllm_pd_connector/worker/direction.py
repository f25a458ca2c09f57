"""Mode auto: which way a prefill instance is used, found when the link to it is made.

An instance that offers memory for it is tried both ways (`selftest`), and the faster one is taken for all requests of
this link; whatever stands against a try, it is read from.
"""

from __future__ import annotations

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.observability.stats import PDStats
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.worker.link import Link
from vllm_pd_connector.worker.selftest import self_test

logger = init_logger(__name__)


def find_direction(link: Link, transport: Transport, scratch: Segment | None, stats: PDStats) -> None:
    """Measure both ways with `scratch`, memory of this worker; `link.figures` say what was found."""
    if link.scratch is None or scratch is None:
        logger.info("prefill engine %s reads only: it does not offer to write", link.engine_id)
        return
    try:
        link.figures = self_test(transport, link.scratch[0], scratch, link.scratch[1])
    except TransferError as error:
        logger.warning("self-test with prefill engine %s: %s; it is read from", link.engine_id, error)
        return
    way = "is asked to write" if link.figures.prefers_push else "is read from"
    logger.info("self-test with prefill engine %s: %s; it %s", link.engine_id, link.figures, way)
    stats.gauge("read bytes/s", round(link.figures.read))
    stats.gauge("write bytes/s", round(link.figures.write))
    stats.gauge("push chosen", int(link.figures.prefers_push))

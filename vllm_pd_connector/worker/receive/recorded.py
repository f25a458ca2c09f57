"""The record of a receive that is over, where an operator ordered one (`observability.record`)."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import IncompatiblePeer, PDConnectorError
from vllm_pd_connector.observability.record import RECORD_VERSION, Moved, Record, Stage, append, shareable
from vllm_pd_connector.observability.stats import Phase
from vllm_pd_connector.worker.peers.link import decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_pd_connector.geometry.manifest import Manifest
    from vllm_pd_connector.worker.receive.active import ActiveReceive

logger = init_logger(__name__)


def record(
    active: ActiveReceive, manifest: Manifest, chunk_bytes: int, failure: str, quarantined: bool, now: float
) -> None:
    """Add the record of a reported receive to its request's file, if there is to be one. Raises nothing: a request must
    be reported in any case.

    Args:
        manifest: this worker's.
        chunk_bytes: what a staged transfer may take of the staging buffer at a time.
        failure: why it failed, empty if it did not.
    """
    into = active.request.record
    if into is None or (into.failures and not failure):
        return
    try:
        append(Path(into.path), _record(active, manifest, chunk_bytes, failure, quarantined, now))
        logger.info("request %s: its receive is recorded in %s", active.request.request_id, into.path)
    except (OSError, PDConnectorError) as error:
        logger.error("request %s: its receive cannot be recorded: %s", active.request.request_id, error)
    except Exception:
        logger.exception("request %s: recording its receive", active.request.request_id)


def _record(
    active: ActiveReceive, manifest: Manifest, chunk_bytes: int, failure: str, quarantined: bool, now: float
) -> Record:
    request, link, moved = active.request, active.link, active.taken.moved
    key = link.machine.key
    stages = [Stage(name=phase, began=a - active.began, ended=b - active.began) for phase, a, b in active.phases]
    if link.handshake is not None and link.handshake[1] >= active.began:
        began, ended = (moment - active.began for moment in link.handshake)
        stages.append(Stage(name=Phase.HANDSHAKE, began=began, ended=ended))
    return Record(
        version=RECORD_VERSION,
        software=manifest.software,
        at=time.time(),
        request=request.request_id,
        prefill=active.prefill,
        peer=f"{key.host}:{key.port}",
        way="push" if active.asks else "pull",
        start=request.start,
        stop=request.stop,
        blocks=tuple(request.blocks),
        source_blocks=None if request.read is None else tuple(request.read.blocks),
        destination=shareable(manifest),
        sources=_known(link.met or link.manifests),
        same_weights=link.same_weights,
        chunk_bytes=chunk_bytes,
        run_cost=active.run_cost,
        verified=active.verified,
        waited_s=request.waited_s,
        stages=tuple(sorted(stages, key=lambda stage: (stage.began, stage.ended))),
        moved=Moved(bytes=moved.bytes, runs=moved.runs, descriptors=moved.descriptors),
        ok=not failure,
        reason=failure,
        kind=active.kind if failure else "",
        quarantined=quarantined,
        seconds=max(now - active.began, 0.0),
    )


def _known(encoded: Sequence[bytes]) -> tuple[Manifest, ...]:
    """What the peer said of itself; nothing if it cannot be read, which the receive's failure then says."""
    try:
        return tuple(shareable(decode(one)) for one in encoded)
    except IncompatiblePeer:
        return ()

"""A staged transfer and its chunks under way (`stager`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.worker.peers.process_watch import has_ended

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_pd_connector.geometry.staging.chunks import Chunk
    from vllm_pd_connector.transport.base import Transfer, Transport, TransportPeer
    from vllm_pd_connector.worker.peers.process_watch import ProcessWatch
    from vllm_pd_connector.worker.staging.base import Copying

logger = init_logger(__name__)


@dataclass(eq=False, slots=True)
class InFlightChunk:
    """A chunk in its slot: while `transfer` is set it is read or written, else `copying`."""

    stream: Stream
    chunk: Chunk
    slot: int
    copying: Copying
    transfer: Transfer | None = None


@dataclass(eq=False, slots=True)
class Stream:
    """One staged transfer of `owner` (whoever asked for it) from or to a rank of `instance`, whose process is known by
    `watch`; counts are of what the transport was given so far, and in `landed` of the chunks that are where they
    belong. `waiting` is the chunk that is next, `made`: that there are no more. `may_write`: one that was written may
    go on, and nobody will say that it has ended. `unsettled`: it was told that this cannot be asked."""

    owner: object
    index: int
    instance: object
    peer: TransportPeer
    rest: Iterator[Chunk]
    watch: ProcessWatch | None = None
    waiting: Chunk | None = None
    made: bool = False
    may_write: bool = False
    in_flight: list[InFlightChunk] = field(default_factory=list)
    bytes: int = 0
    runs: int = 0
    descriptors: int = 0
    landed: int = 0
    unsettled: bool = False

    @property
    def unmade(self) -> bool:
        """Whether its next chunk, or that there is none, is still to be found out."""
        return self.waiting is None and not self.made

    def has_ended(self, transport: Transport, now: float) -> bool:
        """Whether its worker has, and nothing of it lands any more. A transport that meets a defect when it is asked
        keeps the slots, and costs no other stream a turn."""
        try:
            return has_ended(self.watch, transport, self.peer, now)
        except Exception:
            if not self.unsettled:  # it is asked again at each look
                logger.exception("whether a staged transfer has ended cannot be asked: its room is kept")
            self.unsettled = True
            return False

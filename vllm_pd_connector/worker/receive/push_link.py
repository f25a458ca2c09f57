"""The link of a decode worker to a prefill instance that it asks to write.

It only checks the pair, so that a request fails with the reason before anything moves; its transport is not touched.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm_pd_connector.geometry.plan import Plan, planning
from vllm_pd_connector.worker.peers.link import PeerLink, verdict

if TYPE_CHECKING:
    from vllm_pd_connector.bounded import Pieces
    from vllm_pd_connector.geometry.manifest import Manifest
    from vllm_pd_connector.transport.base import Transport


@dataclass(eq=False, slots=True)
class AskLink(PeerLink):
    """To a prefill instance that is asked to write."""

    plan: Plan | None = None
    same_weights: bool = True  # the prefill side compares them with each question

    def connecting(self, local: Manifest, transport: Transport, chunk_bytes: int = 0) -> Pieces[str]:
        """Check the pair, and plan.

        Raises:
            IncompatiblePeer: this pair can never work.
        """
        cannot = "decode engine {} cannot be written into by prefill engine {}"
        remote, check = yield from self._accept(local, local, cannot)
        self.plan = yield from planning(local, remote)  # as each rank there makes it: it tells what is written here
        return verdict(check, self.plan.unfilled, remote[0], "writes here")

    def disconnect(self, transport: Transport) -> None:
        """See `PeerLink`."""
        PeerLink.disconnect(self, transport)
        self.plan = None

    def deserted(self, now: float) -> str:
        """A rank that is not watched any more may be another's by now."""
        for watch in self.watches.values():
            if watch is not None:
                watch.look(now)
                if watch.lost:
                    return str(watch)
        return ""

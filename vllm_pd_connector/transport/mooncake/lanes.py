"""Mooncake's connections to peers that are gone, over TCP: the library keeps them for ever, and they are files.

It opens up to four (MC_TCP_LANES_PER_PEER) to a peer's data port and has no call to close them; when the peer ends, its
kernel closes them there, and here they stay. Whoever meets peer after peer would have no file left at last. But it
closes one itself when a transfer over it fails, and gives each of some transfers that come together one of those that
are idle. So a peer that is gone is asked, as often as it has connections, for one byte, which goes to a place of its
own. Should another process be at that port by now, it refuses an address of memory that it has not registered, and
nobody looks at the byte of one that it has.

A peer that is left alive is kept in view on its liveness link until its process ends: most say before that they will,
and are left then.

Closing a descriptor under the library, or putting another in its place, would be worse than to leave it there: the
library would use whatever has its number next.

Source of the library's behaviour: mooncake-transfer-engine 0.3.13.post1, observed; `tcp_transport_lane_impl.h`.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.transport.liveness_link import LivenessState

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_pd_connector.transport.liveness_link import LivenessLink
    from vllm_pd_connector.transport.mooncake.opening import Opening, Openings

logger = logging.getLogger(__name__)

# The library's own number of them, and the most that it takes.
LANES, MAX_LANES = 4, 16

# Where a byte of a peer that is gone would land, in memory that outlives every engine.
_BYTE = ctypes.create_string_buffer(1)


@dataclass(eq=False, slots=True)
class _Left:
    """A peer that nobody uses any more; `place` is an address that it offers."""

    opening: Opening
    liveness: LivenessLink
    place: int


class Lanes:
    """The connections to peers that were left. One thread calls. `read` is the library's word for it; `count` is how
    many it keeps to one peer, 0 where it keeps none."""

    def __init__(self, engine: Any, openings: Openings, read: Any, count: int) -> None:
        self._engine, self._openings = engine, openings
        self._read, self._count = read, count
        self._left: dict[str, _Left] = {}
        self._asked: list[int] = []

    def leave(self, name: str, opening: Opening, liveness: LivenessLink, place: int | None) -> None:
        """A peer is not used any more. `place`: None if nothing was ever moved, so that there are no connections."""
        self._forget(name)
        if place is None or not self._count:
            liveness.hang_up()
        else:
            self._left[name] = _Left(opening, liveness, place)
        self.close_dead()

    def meet(self, name: str) -> None:
        """A peer is to be used, on a liveness link of its own; it may have been left before."""
        self._forget(name)
        self.close_dead()

    def close_dead(self) -> None:
        """Have the library close what leads to peers that are gone by now; never waits, and fails nothing of others."""
        try:
            self._close_dead()
        except Exception:
            logger.exception("connections to peers that ended could not be closed")
            self._asked = []

    def _close_dead(self) -> None:
        self._asked = [batch for batch in self._asked if self._engine.transfer_check_status(batch) == 0]
        for name, left in [entry for entry in self._left.items() if entry[1].liveness.state is LivenessState.LOST]:
            if not self._openings.ready(left.opening):  # it is open; a submit would wait for another that is not yet
                continue
            self._forget(name)
            for _ in range(self._count):
                here = ctypes.addressof(_BYTE)
                batch = self._engine.batch_transfer_async(left.opening.segment, [here], [left.place], [1], self._read)
                self._asked += [batch] if batch else []

    def close(self) -> None:
        for name in tuple(self._left):
            self._forget(name)
        self._engine = None

    def _forget(self, name: str) -> None:
        if (left := self._left.pop(name, None)) is not None:
            left.liveness.hang_up()


def lanes_per_peer(protocol: str, environment: Mapping[str, str]) -> int:
    """How many connections to one peer the library keeps; what it does not take as a number is its own number."""
    if protocol != "tcp" or environment.get("MC_TCP_ENABLE_CONNECTION_POOL", "1").lower() in ("0", "false", "no"):
        return 0
    given = environment.get("MC_TCP_LANES_PER_PEER", environment.get("MC_TCP_MAX_CONNECTIONS_PER_PEER", ""))
    return int(given) if given.isascii() and given.isdecimal() and 1 <= int(given) <= MAX_LANES else LANES

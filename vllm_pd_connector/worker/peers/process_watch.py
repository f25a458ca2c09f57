"""Whether the processes of other workers are there: what ends the quarantine of what they may still write.

A write that was begun is carried by the writer's library, its threads or its network card, and only the writer's own
process can say that it is over, or that process's end. The side channel says nothing of that end: it is another
process wherever an instance has several workers, and a port that refuses, or that somebody else answers, may be a
packet filter's or a proxy's doing while the workers write on.

So every worker listens for liveness links (`transport.liveness`), which move nothing, and whoever depends on a worker's
writes holds one to it from before the first of them. It is the worker's kernel that closes an open link when the
process ends, whatever it died of; a stopped process keeps its links, and a packet filter cannot close one in good
order. A reset, a refusal and silence prove nothing. A proxy in between may close a link, too: there the hub sees
another dial than who does, and says so, and no end is seen; that process alone can say what it writes no more. What was
closed is dialled again and again; only when the process does not answer SETTLE_S later is it over. What it had sent has
arrived by then: a network that was silent for longer would have cost the link its life by silence, which is no proof.

    DIALLING --answered--> HERE --closed in good order--> CLOSED --direct, not answered again, SETTLE_S later--> OVER
        |  ^                |                               |
        |  +----------------+------ answered again ---------+
        +--refused, silence--> LOST <--reset, silence-- HERE        and LOST --dialled again--> DIALLING

vLLM ends a worker that outlives its engine core when its step is over, and its links with it.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
from math import inf
from typing import TYPE_CHECKING

from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import LivenessAddress
from vllm_pd_connector.transport.addresses import Address, local_address, source_address
from vllm_pd_connector.transport.base import has_settled
from vllm_pd_connector.transport.liveness import SAYS, SILENCE_S, LivenessHub
from vllm_pd_connector.transport.liveness_link import LivenessLink, LivenessState

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.transport.base import Transport, TransportPeer

SETTLE_S = float(SILENCE_S)
AGAIN_S = 5.0
DIAL_S = 10.0
LOOK_S = 0.25
"""How often one looks who waits for an end."""
MAX_WATCHES = 4096
IDLE_S, TICK_S = 3600.0, 60.0

_BETWEEN = (
    "closed its line, or a proxy in between did, or what translates addresses there: its end cannot be seen through "
    "that; let workers reach each other's ports directly"
)


class ProcessWatch:
    """What is known of one worker's process. Lives in the transfer thread; `look` is called by who wants to know."""

    def __init__(self, life: LivenessAddress, dial: Callable[[ProcessWatch], LivenessLink]) -> None:
        self.life = life
        self.used_at = -inf
        self._dial = dial
        self._link: LivenessLink | None = None
        self._closed_at: float | None = None
        self._direct = True  # what was closed; a release whose hub does not say it is believed
        self._dialled_at = -inf
        self._over = False
        self._reason = ""

    @property
    def here(self) -> bool:
        """Whether there is an open link: the end of the process will be noticed."""
        return self._link is not None and self._link.state is LivenessState.OPEN

    @property
    def lost(self) -> bool:
        """Whether the latest link was lost or could not be had."""
        return self._link is None or self._link.state is LivenessState.LOST

    @property
    def closed(self) -> bool:
        """Whether an open link was closed from there: in all likelihood the process has ended."""
        told = self._link is not None and self._link.closed_at is not None
        return self._over or told or self._closed_at is not None

    @property
    def ended_at(self) -> float | None:
        """When an open link was closed from there with nothing in between that might have done it, by the monotonic
        clock; None if it was not, or is open again."""
        if self._link is not None and self._link.closed_at is not None:
            return self._link.closed_at if self._link.direct is not False else None
        return self._closed_at if self._direct and not self.here else None

    @property
    def over(self) -> bool:
        """Whether nothing that the process had begun can arrive any more; for ever."""
        return self._over

    def __str__(self) -> str:
        if self._over:
            state = "has ended"
        elif self.closed:
            state = "closed its line and is dialled again" if self._direct else _BETWEEN
        else:
            state = "is there" if self.here else self._reason or "has not answered yet"
        return f"worker at {self.life.address} port {self.life.port}: {state}"

    def ended(self, now: float) -> bool:
        """Whether it is over, when it was looked at once more."""
        self.look(now)
        return self.over

    def look(self, now: float) -> None:
        """See what became of the link; dial where there is none."""
        self.used_at = now
        link = self._link
        if self._over or (link is not None and link.state is LivenessState.DIALLING):
            return
        if link is not None and link.state is LivenessState.OPEN:
            self._closed_at = None
            return
        if link is not None:
            self._reason = link.reason
            if link.closed_at is not None:
                self._closed_at, self._direct = link.closed_at, link.direct is not False
            elif self._closed_at is not None and self._direct and self._dialled_at >= self._closed_at + SETTLE_S:
                self._over = True
                return
        if now >= self._dialled_at + AGAIN_S:
            self._dialled_at = now
            try:
                self._link = self._dial(self)
            except TransferError as error:  # ours to mend, and no word of that process
                self._link, self._reason = None, str(error)

    def let_go(self) -> None:
        """End the link until somebody looks again."""
        if self._link is not None and (self._closed_at is None or self.here):
            self._link.hang_up()
            self._link = self._closed_at = None


def has_ended(watch: ProcessWatch | None, transport: Transport, peer: TransportPeer, now: float) -> bool:
    """Whether nothing that a rank's process had begun with `transport` can land any more: it is known to be over, and
    what had come of it until then, to sockets of this host say, has been taken in."""
    return watch is not None and watch.ended(now) and has_settled(transport, peer)


class ProcessWatches:
    """This worker's own life, and the watches of others. Lives in the transfer thread. `losses` counts links that were
    lost: where it has grown, there may be something to see.

    Args:
        address: where to listen, and so be dialled.
        wake: called from another thread when a link was lost.

    Raises:
        TransferError: nothing can listen at the address.
    """

    def __init__(self, address: Address, wake: Callable[[], None]) -> None:
        name = f"{SAYS}{secrets.token_hex(16)}"
        self._wake, self.losses = wake, 0
        self._hub = LivenessHub(str(address), name, lost=self._hear)
        self.own = LivenessAddress(str(address), self._hub.port, name)
        self._watches: dict[LivenessAddress, ProcessWatch] = {}  # a name alone is what any instance may say
        self._ticked_at = -inf

    def watch(self, life: LivenessAddress, now: float) -> ProcessWatch:
        """The watch of a worker, begun if there is none."""
        watch = self._watches.get(life)
        if watch is None:
            self._make_room()
            watch = self._watches[life] = ProcessWatch(life, self._dial)
        watch.look(now)
        return watch

    def _hear(self) -> None:
        self.losses += 1
        self._wake()

    def tick(self, now: float) -> None:
        """Forget whom nobody has looked at for long, until who holds the watch looks again."""
        if now < self._ticked_at + TICK_S:  # called in every turn, and there may be thousands
            return
        self._ticked_at = now
        for life, watch in list(self._watches.items()):
            if watch.used_at + IDLE_S <= now:
                watch.let_go()
                del self._watches[life]

    def close(self) -> None:
        """End all links: who watches this worker takes it for ended."""
        self._hub.close()

    def _make_room(self) -> None:
        if len(self._watches) >= MAX_WATCHES:
            oldest = min(self._watches.values(), key=lambda w: w.used_at)
            oldest.let_go()
            del self._watches[oldest.life]

    def _dial(self, watch: ProcessWatch) -> LivenessLink:
        life = watch.life
        if life not in self._watches:  # it had given way, and whoever holds it looks again
            self._make_room()
            self._watches[life] = watch
        try:
            address = ipaddress.ip_address(life.address)
        except ValueError:
            raise TransferError(f"{life.address[:80]!r} is no IP address") from None
        return self._hub.dial(str(address), life.port, life.name, DIAL_S, wait_ms=0)


def address_towards(host: str) -> Address:
    """The address at which this worker is seen from `host`, its instance's side channel: on the same machine that one.

    A host that is a name is looked up. Without a route to it, the address on the default route.
    """
    try:
        found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_DGRAM)[0][4][0]
        source = source_address(ipaddress.ip_address(str(found).partition("%")[0]))
    except OSError:
        source = None
    return source or local_address("", "")

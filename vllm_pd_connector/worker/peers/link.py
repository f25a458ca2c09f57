"""Another instance as this worker is linked to it: the peer's state machine, its processes, the connected ranks.

Everything about a peer is in one object. The handshake is `connect`: decode the manifests, check the pair, plan, and
only then touch the transport; a refusal leaves no trace there. What the plan is for differs by who moves the bytes:
`receive.read_link`, `receive.push_link` and `push.link` are the kinds of links.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

import msgspec

from vllm_pd_connector.errors import IncompatiblePeer, PDConnectorError
from vllm_pd_connector.geometry.manifest import LivenessAddress, Manifest, Rank
from vllm_pd_connector.geometry.staging.chunks import RUN_COST_BYTES
from vllm_pd_connector.geometry.topology import TopologyCheck, checking, not_moved
from vllm_pd_connector.transport.base import is_met

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from vllm_pd_connector.bounded import Pieces
    from vllm_pd_connector.protocol.peer import Peer
    from vllm_pd_connector.transport.base import Transport, TransportPeer
    from vllm_pd_connector.worker.peers.process_watch import ProcessWatch, ProcessWatches

logger = logging.getLogger(__name__)

_decoder = msgspec.msgpack.Decoder(Manifest)


@dataclass(eq=False, slots=True)
class PeerLink(ABC):
    """See the module. `manifests` is the latest answer of the side channel, not yet trusted.

    `ranks` are those that the transport is connected to. `stalled` says what has not ended in time though it was
    started, empty if nothing. `watches` has every rank of the peer, since it was connected first, None for one that
    cannot be watched. `same_weights`: that both sides have the same is known otherwise of each request that has this
    link, or is for the prefill side to say; manifests tell those with which their instances began. `handshake`: when
    the latest one began and ended; `met`: the manifests it was made with, kept where receives may be recorded.
    `waits_for`: what the transport does aside before it connects, empty if nothing.
    """

    machine: Peer
    engine_id: str
    endpoint: str
    used_at: float
    manifests: Sequence[bytes] = ()
    ranks: dict[Rank, TransportPeer] = field(default_factory=dict)
    stalled: str = ""
    watches: dict[Rank, ProcessWatch | None] = field(default_factory=dict)
    same_weights: bool = False
    handshake: tuple[float, float] | None = None
    met: Sequence[bytes] = ()
    waits_for: str = ""
    _liveness: dict[Rank, LivenessAddress | None] = field(default_factory=dict)

    @property
    def connection(self) -> object:
        """The same object until the link is disconnected."""
        return self.ranks

    @abstractmethod
    def connecting(self, local: Manifest, transport: Transport, chunk_bytes: int = 0) -> Pieces[str]:
        """Check, plan, connect. What comes of it is the verdict for the log.

        Args:
            chunk_bytes: what a staged transfer may take of the staging buffer at a time; 0 if there is no staging
                buffer.

        Raises:
            IncompatiblePeer: this pair can never work.
            TransferError: the transport did not connect.

        Whatever is raised, and where it is not gone on with, ranks may be connected: `disconnect` then.
        """

    def disconnect(self, transport: Transport) -> None:
        """Let go of the peer's memory, and of what was planned. What a transport makes of that ends no link."""
        ranks, self.ranks, self.stalled, self.waits_for = self.ranks, {}, "", ""
        for peer in ranks.values():
            try:
                transport.disconnect(peer)
            except Exception:
                logger.exception("a rank of engine %s could not be disconnected", self.engine_id)

    def _accept(
        self, local: Manifest, ours: Manifest | Sequence[Manifest], cannot: str
    ) -> Pieces[tuple[list[Manifest], TopologyCheck]]:
        """The peer's manifests, if the pair is possible; no side effect.

        Raises:
            IncompatiblePeer: it is not; the text begins with `cannot`, filled with both engines.
        """
        remote = []
        for encoded in self.manifests:
            remote.append(decode(encoded))
            yield
        for manifest in remote:
            if manifest.engine_id != self.engine_id:
                raise IncompatiblePeer(
                    f"engine {self.engine_id} serves a manifest of engine {manifest.engine_id}: two instances share "
                    "an address, or that instance is broken"
                )
        if self.same_weights:
            remote = [with_weights(manifest, local.model.weights) for manifest in remote]
        check = yield from checking(ours, remote)
        if not check.allowed:
            here = f"{local.engine_id} rank {local.parallel.number}"
            reason = check.reason if not check.differences else ""
            raise IncompatiblePeer(
                f"{cannot.format(here, self.engine_id)}: {check.status}: {reason}", check.differences
            )
        self._liveness = {m.parallel.rank: m.life for m in remote}
        yield
        return remote, check

    def _meeting(self, transport: Transport, rank: Rank, endpoint: bytes) -> Pieces[None]:
        """Wait until `connect` to a rank is due. Raises as `base.is_met`."""
        while not is_met(transport, endpoint):
            self.waits_for = f"the library of transport {transport.name} has not come back with rank {rank}"
            yield
        self.waits_for = ""

    def watch(self, processes: ProcessWatches, now: float) -> None:
        """Watch every rank that the manifests of the latest `connect` name."""
        self.watches = {
            rank: processes.watch(life, now) if life is not None else None for rank, life in self._liveness.items()
        }

    def watch_of(self, peer: TransportPeer) -> ProcessWatch | None:
        """The watch of a connected rank."""
        return next((self.watches.get(rank) for rank, connected in self.ranks.items() if connected is peer), None)

    def ended(self) -> str:
        """Whose process has ended, in all likelihood, since the peer was connected, in words; empty if nobody's."""
        connected_at = self.handshake[0] if self.handshake is not None else inf
        for watch in self.watches.values():
            if watch is not None and watch.ended_at is not None and watch.ended_at >= connected_at:
                return f"its worker at {watch.life.address} port {watch.life.port} has ended or closed its transport"
        return ""

    def deserted(self, now: float) -> str:
        """Why nothing new may be begun on this link though nobody has said that it is cut; empty if it may."""
        return ""


def run_cost_of(transport: Transport) -> int:
    """What one run costs this transport, in bytes, until a self-test has measured it: its `run_cost_bytes`, if it has
    one."""
    return int(getattr(transport, "run_cost_bytes", RUN_COST_BYTES))


def over(transport: Transport, local: Manifest) -> str:
    """What moves the bytes, and of which memory, for the log: a transport may say it itself (`over`)."""
    places = {f"{s.device}:{s.device_id}" if s.device != "cpu" else s.device for s in local.segments}
    return f"{getattr(transport, 'over', transport.name)}, {' and '.join(sorted(places))} memory"


def verdict(check: TopologyCheck, unfilled: Collection[str], source: Manifest, moves: str) -> str:
    """What came of a handshake, for the log; `unfilled` are the layers that no rank of the prefill instance has."""
    return ", ".join(filter(None, (str(check.status), moves, not_moved(unfilled, source))))


def with_weights(manifest: Manifest, name: str) -> Manifest:
    """The manifest of an instance whose weights are known to be these."""
    return msgspec.structs.replace(manifest, model=msgspec.structs.replace(manifest.model, weights=name))


def decode(encoded: bytes) -> Manifest:
    """A peer's manifest; its content is checked by `checking`.

    Raises:
        IncompatiblePeer: not a manifest of this version.
    """
    try:
        return _decoder.decode(encoded)
    except (msgspec.MsgspecError, PDConnectorError, ValueError, RecursionError) as error:
        raise IncompatiblePeer(
            f"a manifest of the other instance cannot be read ({error}): run the same release of vllm_pd_connector "
            "on both sides"
        ) from error

"""What the two halves tell each other in an engine step.

`StepMetadata` goes from the scheduler half to every worker (pickled by vLLM, every step, so it stays small and is
empty most of the time); `WorkerReport` comes back, aggregated over the ranks. Block ids are logical.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm_pd_connector.errors import OtherWeights, ProtocolError, UnauthenticatedPeer, Withdrawn
from vllm_pd_connector.geometry.bind import latest
from vllm_pd_connector.protocol.wire.fields import NONCE_BYTES, LeaseRef, Weights

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm_pd_connector.geometry.blocks import BlockTable
    from vllm_pd_connector.protocol.peer import PeerKey
    from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef


@dataclass(frozen=True, slots=True)
class ReadFrom:
    """A finished prefill that is read: its instance, the lease under which it is held, and its blocks there, one table
    per transfer group."""

    peer: PeerKey
    engine_id: str
    lease: LeaseRef
    blocks: tuple[BlockTable, ...]


@dataclass(frozen=True, slots=True)
class PushFrom:
    """A prefill that its instance is asked to write, finished or not; `home` is where the decode instance's own
    manifests are. The incarnation in `peer` is empty if the request does not tell it."""

    peer: PeerKey
    engine_id: str
    prefill: PrefillRef
    home: InstanceAddress
    prompt_digest: str

    @property
    def lease(self) -> LeaseRef | None:
        """Under which it is held; None where that is not known, since nobody has computed it yet."""
        return LeaseRef(self.prefill.name, self.prefill.nonce) if self.prefill.nonce is not None else None


@dataclass(frozen=True, slots=True)
class Either:
    """A finished prefill that comes by whichever is the faster way to its instance."""

    read: ReadFrom
    push: PushFrom


class Refusal(StrEnum):
    """What a refusal counts as: the kind of failure that has the same value."""

    BAD_PARAMETERS = "bad_parameters"
    NOT_TRUSTED = "not_trusted"
    WEIGHTS = "weights"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class BadParameters:
    """None: the request's parameters were refused. A worker reports it, in the way that vLLM's contract wants."""

    reason: str
    kind: Refusal = Refusal.BAD_PARAMETERS

    @classmethod
    def of(cls, error: ProtocolError) -> BadParameters:
        """For which error they were refused."""
        match error:
            case UnauthenticatedPeer():
                kind = Refusal.NOT_TRUSTED
            case OtherWeights():
                kind = Refusal.WEIGHTS
            case Withdrawn():
                kind = Refusal.WITHDRAWN
            case _:
                kind = Refusal.BAD_PARAMETERS
        return cls(str(error), kind)


Source = ReadFrom | PushFrom | Either | BadParameters
"""Whose caches a request gets, and by which way."""


@dataclass(frozen=True, slots=True)
class RecordInto:
    """Each worker adds a record of its receive to this file, or, with `failures`, of one that fails."""

    path: str
    failures: bool


def draw_attempt() -> bytes:
    """The name of one request's use of a lease."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """Get tokens [start, stop) of a request into `blocks`: one entry per transfer group, which names the blocks that
    are to be filled. A group gets the tokens from its first block on; what a prefix hit holds is not named.

    `attempt` and `shared` are those of `protocol.wire.fields.Reading`; `waited_s` is since the request arrived here.
    `weights` are those that it will go on with; `same_weights`: the prefill's are known to be these, whatever the
    manifests say, which are as old as their instances.
    `spare`: the request is computed if it cannot be had, whatever vLLM's policy says of failed loads.
    `trace`: the headers of its trace, None if it is not traced. `record`: None if it is not recorded.
    """

    request_id: str
    source: Source
    blocks: tuple[BlockTable, ...]
    start: int
    stop: int
    attempt: bytes = field(default_factory=draw_attempt)
    shared: bool = False
    waited_s: float = 0.0
    weights: Weights = field(default_factory=Weights)
    same_weights: bool = False
    spare: bool = False
    trace: Mapping[str, str] | None = None
    record: RecordInto | None = None

    @property
    def read(self) -> ReadFrom | None:
        """What can be read; None if nothing can."""
        match self.source:
            case (ReadFrom() as read) | Either(read=read):
                return read
        return None

    @property
    def push(self) -> PushFrom | None:
        """What can be written; None if nothing can."""
        match self.source:
            case (PushFrom() as push) | Either(push=push):
                return push
        return None

    @property
    def lease(self) -> LeaseRef | None:
        """Under which the prefill is held; None if that is not known."""
        prefill = self.read or self.push
        return prefill.lease if prefill is not None else None


@dataclass(frozen=True, slots=True)
class HeldRequest:
    """A finished prefill whose blocks are held; sent to the workers only for the digest trace."""

    request_id: str
    blocks: tuple[BlockTable, ...]
    num_tokens: int


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM ships no types
    """From the scheduler half to every worker. `step` counts the steps of an instance that pushes: the commands on the
    side channel name the step that they must wait for. `ends_prefill` says that a prefill is complete after it which a
    decode instance may read. `calm`: the next step may be long in coming. `bell` comes with orders: the address of the
    bell to ring when something is in the outbox, empty if nobody listens."""

    step: int = 0
    ends_prefill: bool = False
    calm: bool = False
    bell: str = ""
    receives: list[ReceiveRequest] = field(default_factory=list)
    aborts: list[str] = field(default_factory=list)
    held: list[HeldRequest] = field(default_factory=list)

    def __reduce__(self) -> tuple[type[StepMetadata], tuple[object, ...]]:
        """Pickled in each step: without the names of its fields that takes two thirds of the time, and without what is
        empty, as in most steps, less again."""
        calm = self.step, self.ends_prefill, self.calm
        if not (self.receives or self.aborts or self.held or self.bell):
            return StepMetadata, calm
        return StepMetadata, (*calm, self.bell, self.receives, self.aborts, self.held)


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM ships no types
    """From the workers to the scheduler half: ranks that put a request's blocks into quarantine or out of it, per
    received request and transfer group the last logical block (numbered in the request) that must not be shared,
    requests that could not be received, and apart from them those that go on without (`ReceiveRequest.spare`)."""

    quarantined: dict[str, int] = field(default_factory=dict)
    drained: dict[str, int] = field(default_factory=dict)
    unshareable: dict[str, dict[int, int]] = field(default_factory=dict)
    spared: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        private = {
            request_id: latest(report.unshareable.get(request_id, {}) for report in (self, other))
            for request_id in self.unshareable.keys() | other.unshareable.keys()
        }
        return WorkerReport(
            _add(self.quarantined, other.quarantined),
            _add(self.drained, other.drained),
            private,
            self.spared | other.spared,
            self.failed | other.failed,
        )


def _add(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in a.keys() | b.keys()}

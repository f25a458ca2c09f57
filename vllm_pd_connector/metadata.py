"""What the two halves tell each other in an engine step.

`StepMetadata` goes from the scheduler half to every worker (pickled by vLLM, every step, so it stays small and is
empty most of the time); `WorkerReport` comes back, aggregated over the ranks. Block ids are logical.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import KVConnectorMetadata, KVConnectorWorkerMetadata
from vllm_pd_connector.geometry.bind import latest
from vllm_pd_connector.protocol.wire.fields import NONCE_BYTES

if TYPE_CHECKING:
    from vllm_pd_connector.geometry.blocks import BlockTable
    from vllm_pd_connector.protocol.params.parse import RemotePrefill
    from vllm_pd_connector.protocol.peer import PeerKey
    from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef


@dataclass(frozen=True, slots=True)
class PushTerms:
    """Whom a decode worker asks to write: the prefill instance, which prefill there, and where the decode instance's
    own manifests are. The incarnation in `peer` is empty if the request does not tell it. `waited_s`: since the request
    arrived here, when it was ordered."""

    peer: PeerKey
    engine_id: str
    prefill: PrefillRef
    home: InstanceAddress
    prompt_digest: str
    waited_s: float = 0.0


def draw_attempt() -> bytes:
    """The name of one request's use of a lease."""
    return secrets.token_bytes(NONCE_BYTES)


@dataclass(frozen=True, slots=True)
class ReceiveRequest:
    """Get tokens [start, stop) of a request into `blocks`: one entry per transfer group, which names the blocks that
    are to be filled. A group gets the tokens from its first block on; what a prefix hit holds is not named.

    They are read from `remote`, or, if `push` is set, written by the prefill instance that it names; with `either`, by
    whichever is the faster way to that instance. `error` is set instead of both when the request's parameters were
    refused: the worker reports the failure in the way that vLLM's contract wants. `attempt` and `shared` are those of
    `protocol.wire.fields.Reading`.
    """

    request_id: str
    remote: RemotePrefill | None
    error: str
    blocks: tuple[BlockTable, ...]
    start: int
    stop: int
    push: PushTerms | None = None
    either: bool = False
    attempt: bytes = field(default_factory=draw_attempt)
    shared: bool = False


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


@dataclass
class WorkerReport(KVConnectorWorkerMetadata):  # type: ignore[misc]  # vLLM ships no types
    """From the workers to the scheduler half: ranks that put a request's blocks into quarantine or out of it, and per
    received request and transfer group the last logical block (numbered in the request) that must not be shared."""

    quarantined: dict[str, int] = field(default_factory=dict)
    drained: dict[str, int] = field(default_factory=dict)
    unshareable: dict[str, dict[int, int]] = field(default_factory=dict)

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerReport:
        assert isinstance(other, WorkerReport)
        private = {
            request_id: latest(report.unshareable.get(request_id, {}) for report in (self, other))
            for request_id in self.unshareable.keys() | other.unshareable.keys()
        }
        return WorkerReport(_add(self.quarantined, other.quarantined), _add(self.drained, other.drained), private)


def _add(a: dict[str, int], b: dict[str, int]) -> dict[str, int]:
    return {key: a.get(key, 0) + b.get(key, 0) for key in a.keys() | b.keys()}

"""What a worker or the scheduler half counted since it was last asked.

One `PDStats` is filled by the transfer thread, taken by each engine step, aggregated over ranks and over time by
vLLM, and observed once in the API server (`series`). Counts are sums over ranks. `LABELLED` counts have a row for each
value of one label; those of peers are names that others chose, so a table has at most `MAX_PEERS` of them, and the rest
is counted as `OTHER`. `gauges` are set by the scheduler half and, for self-tests, by a worker; the newest value wins.
`protocols` are what the workers' transport speaks.

Source: vLLM 0.32, `kv_connector/v1/metrics.py` (KVConnectorStats).
"""

from __future__ import annotations

from enum import StrEnum
from statistics import quantiles
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.base import KVConnectorStats

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


class Phase(StrEnum):
    """Phases of one receive on one rank; durations in seconds."""

    HANDSHAKE = "handshake"
    QUEUE = "queue"
    POST = "post"
    TRANSFER = "transfer"
    CONFIRM = "confirm"
    TOTAL = "total"


class FailureKind(StrEnum):
    """Why a receive failed; a small closed set, used as a label."""

    BAD_PARAMETERS = "bad_parameters"
    NOT_TRUSTED = "not_trusted"
    WEIGHTS = "weights"
    INCOMPATIBLE_PEER = "incompatible_peer"
    PEER_UNREACHABLE = "peer_unreachable"
    LEASE_LOST = "lease_lost"
    WITHDRAWN = "withdrawn"
    TRANSFER_FAILED = "transfer_failed"
    DEADLINE = "deadline"
    VERIFICATION = "verification"
    ABORTED = "aborted"
    INTERNAL = "internal"


class NotHeld(StrEnum):
    """Why a prefill for a decode instance ended and is not held for one; a small closed set, used as a label."""

    WEIGHTS = "weights"
    ROLE = "role"
    REFUSED = "refused"
    ENDED = "ended"
    ABORTED = "aborted"


class ComputedHere(StrEnum):
    """Why nothing is used of what a request came for with good parameters, so that this instance computes what its
    prefix cache lacks; a small closed set, used as a label."""

    OWN = "own"
    BATCH = "batch"
    USED = "used"
    OUTDATED = "outdated"


COUNTS = (
    "bytes", "runs", "descriptors", "receives", "verified", "given_bytes", "given", "leases_expired",
    "leases_over_limit", "relinked", "conversations_kept", "conversations_read", "conversations_dropped",
    "turns_computed", "turns_read", "turn_tokens",
)  # fmt: skip
REASONS: dict[str, type[StrEnum]] = {
    "failures": FailureKind, "failed_pushes": FailureKind, "not_held": NotHeld, "computed_here": ComputedHere,
}  # fmt: skip
BY_REASON = tuple(REASONS)
BY_PEER = ("peer_bytes", "peer_receives", "peer_failures", "peer_given_bytes", "peer_given")
LABELLED = (*BY_REASON, *BY_PEER)
SIZES = ("bytes", "descriptors")
MAX_PEERS = 64
OTHER = "other"
"""The peer as which those are counted that come after `MAX_PEERS` others."""
MAX_SAMPLES = 4096


_NO_COUNTS = dict.fromkeys(COUNTS, 0)
_TABLES = (*LABELLED, "phases", "sizes", "gauges", "protocols")


def peer_row(table: Mapping[str, object], peer: str) -> str:
    """Under which name a peer is counted in a table that has these."""
    return peer if peer in table or len(table) < MAX_PEERS else OTHER


class PDStats(KVConnectorStats):  # type: ignore[misc]  # vLLM ships no types
    """Counts since the last `take`; `data` is a plain dict because it crosses processes."""

    def __init__(self, data: dict[str, Any] | None = None):
        super().__init__(data if data else {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        self.data: dict[str, Any] = {**_NO_COUNTS, **{name: {} for name in _TABLES}}

    def count(self, name: str, amount: int = 1) -> None:
        self.data[name] += amount

    def fail(self, kind: FailureKind, what: str = "failures") -> None:
        """Count a receive that failed, or a push."""
        self._add(what, kind.value, 1)

    def not_held(self, reason: NotHeld, amount: int) -> None:
        """So many prefills for decode instances ended and are not held."""
        self._add("not_held", reason.value, amount)

    def computed_here(self, reason: ComputedHere, amount: int) -> None:
        """So many requests that came for caches are computed here."""
        self._add("computed_here", reason.value, amount)

    def of_peer(self, what: str, peer: str, amount: int = 1) -> None:
        """Count in a table of `BY_PEER`; `peer` is an engine's id."""
        self._add(what, peer, amount)

    def gave(self, peer: str, amount: int, *, whole: bool) -> None:
        """A reader of this engine has `amount` bytes; `whole`: with them a request was served."""
        self.count("given_bytes", amount)
        self.count("given", int(whole))
        self.of_peer("peer_given_bytes", peer, amount)
        self.of_peer("peer_given", peer, int(whole))

    def _add(self, what: str, label: str, amount: int) -> None:
        table = self.data[what]
        label = peer_row(table, label) if what in BY_PEER else label
        table[label] = table.get(label, 0) + amount

    def observe_phase(self, phase: Phase, seconds: float) -> None:
        self._sample("phases", phase.value, [seconds])

    def observe_size(self, of: str, amount: int) -> None:
        """One good receive's share in a count of `SIZES`."""
        self._sample("sizes", of, [amount])

    def _sample(self, what: str, of: str, more: Sequence[float]) -> None:
        samples = self.data[what].setdefault(of, [])
        samples.extend(more[: MAX_SAMPLES - len(samples)])

    def gauge(self, name: str, value: int) -> None:
        self.data["gauges"][name] = value

    def speaks(self, transport: str, protocol: str) -> None:
        """Tell what a worker's transport speaks."""
        self.data["protocols"][protocol] = transport

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name in COUNTS:
            self.data[name] += other.data[name]
        for what in LABELLED:
            for label, number in other.data[what].items():
                self._add(what, label, number)
        for what in ("phases", "sizes"):
            for of, samples in other.data[what].items():
                self._sample(what, of, samples)
        for newest in ("gauges", "protocols"):
            self.data[newest].update(other.data[newest])
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for vLLM's periodic log; times are milliseconds, an average and the 90th percentile. `MB/s` is what
        came in a second of the phase `transfer`: of one receive on one rank, however many run beside each other."""
        summary: dict[str, int | float] = {
            "receives": self.data["receives"],
            "MB": round(self.data["bytes"] / 1e6, 3),
            "runs": self.data["runs"],
            "descriptors": self.data["descriptors"],
            "given": self.data["given"],
            "given MB": round(self.data["given_bytes"] / 1e6, 3),
            "failures": sum(self.data["failures"].values()),
            "failed pushes": sum(self.data["failed_pushes"].values()),
            "leases expired": self.data["leases_expired"],
        }
        transfer = self.data["phases"].get(Phase.TRANSFER, [])
        if 0 < len(transfer) < MAX_SAMPLES and (seconds := sum(transfer)) > 0:  # else not every one of them is there
            summary["MB/s"] = round(self.data["bytes"] / 1e6 / seconds, 3)
        for phase, samples in self.data["phases"].items():
            if samples:
                summary[f"{phase} ms"] = round(1e3 * sum(samples) / len(samples), 3)
                summary[f"{phase} p90 ms"] = round(1e3 * _p90(samples), 3)
        summary.update(self.data["gauges"])
        return summary

    def is_empty(self) -> bool:
        return not any(self.data.values())


def _p90(samples: Sequence[float]) -> float:
    return samples[0] if len(samples) == 1 else quantiles(samples, n=10, method="inclusive")[8]

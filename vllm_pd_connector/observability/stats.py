"""What a worker or the scheduler half counted since it was last asked, and its Prometheus series.

One `PDStats` is filled by the transfer thread, taken by each engine step, aggregated over ranks and over time by
vLLM, and observed once in the API server. Counts are sums over ranks. `gauges` are set by the scheduler half and, for
self-tests, by a worker; the newest value wins. `protocols` are what the workers' transport speaks. The series are the
same for every transport.

Source: vLLM 0.32, `kv_connector/v1/metrics.py` (KVConnectorStats, KVConnectorPromMetrics).
"""

from __future__ import annotations

from dataclasses import replace
from enum import StrEnum
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from vllm_pd_connector.compat.base import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm_pd_connector.compat.model.facts import engine_info
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.instance_info import INFO_SERIES, INFO_TEXT, LABELS, EngineInfo
from vllm_pd_connector.sidechannel.net.keys import keys_of


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
    INCOMPATIBLE_PEER = "incompatible_peer"
    PEER_UNREACHABLE = "peer_unreachable"
    LEASE_LOST = "lease_lost"
    TRANSFER_FAILED = "transfer_failed"
    DEADLINE = "deadline"
    VERIFICATION = "verification"
    ABORTED = "aborted"
    INTERNAL = "internal"


_CONVERSATIONS = {
    "conversations_kept": "Finished requests whose caches were kept for the next turn of their conversation.",
    "conversations_read": "Those of them that were read.",
    "conversations_dropped": "Those of them that were given back early, for requests that needed blocks.",
    "turns_computed": "Prefills that named a conversation and read nothing of it; the log says why.",
    "turns_read": "Prefills that were told to read the beginning of their conversation.",
    "turn_tokens": "Tokens that these were told to read.",
}
_COUNTS = (
    "bytes", "runs", "descriptors", "receives", "verified", "leases_expired", "leases_over_limit", "relinked",
    *_CONVERSATIONS,
)  # fmt: skip
_FAILURES = {
    "failures": ("vllm:pd_failed_receives", "Receives that failed, by reason, summed over ranks."),
    "failed_pushes": ("vllm:pd_failed_pushes", "Pushes that failed on the prefill side, by reason, summed over ranks."),
}
_PHASE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
_MAX_SAMPLES = 4096


class PDStats(KVConnectorStats):  # type: ignore[misc]  # vLLM ships no types
    """Counts since the last `take`; `data` is a plain dict because it crosses processes."""

    def __init__(self, data: dict[str, Any] | None = None):
        super().__init__(data if data else {})
        if not self.data:
            self.reset()

    def reset(self) -> None:
        empty: dict[str, Any] = dict.fromkeys(_COUNTS, 0)
        tables: dict[str, Any] = {name: {} for name in (*_FAILURES, "phases", "gauges", "protocols")}
        self.data: dict[str, Any] = empty | tables

    def count(self, name: str, amount: int = 1) -> None:
        self.data[name] += amount

    def fail(self, kind: FailureKind, what: str = "failures") -> None:
        """Count a receive that failed, or what else is named in `_FAILURES`."""
        self.data[what][kind.value] = self.data[what].get(kind.value, 0) + 1

    def observe_phase(self, phase: Phase, seconds: float) -> None:
        samples = self.data["phases"].setdefault(phase.value, [])
        if len(samples) < _MAX_SAMPLES:
            samples.append(seconds)

    def gauge(self, name: str, value: int) -> None:
        self.data["gauges"][name] = value

    def speaks(self, transport: str, protocol: str) -> None:
        """Tell what a worker's transport speaks."""
        self.data["protocols"][protocol] = transport

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name in _COUNTS:
            self.data[name] += other.data[name]
        for what in _FAILURES:
            for kind, number in other.data[what].items():
                self.data[what][kind] = self.data[what].get(kind, 0) + number
        for phase, samples in other.data["phases"].items():
            mine = self.data["phases"].setdefault(phase, [])
            mine.extend(samples[: _MAX_SAMPLES - len(mine)])
        for newest in ("gauges", "protocols"):
            self.data[newest].update(other.data[newest])
        return self

    def reduce(self) -> dict[str, int | float]:
        """One line for vLLM's periodic log; times are averages in milliseconds."""
        summary: dict[str, int | float] = {
            "receives": self.data["receives"],
            "MB": round(self.data["bytes"] / 1e6, 3),
            "runs": self.data["runs"],
            "descriptors": self.data["descriptors"],
            "failures": sum(self.data["failures"].values()),
            "failed pushes": sum(self.data["failed_pushes"].values()),
            "leases expired": self.data["leases_expired"],
        }
        for phase, samples in self.data["phases"].items():
            if samples:
                summary[f"{phase} ms"] = round(1e3 * sum(samples) / len(samples), 3)
        summary.update(self.data["gauges"])
        return summary

    def is_empty(self) -> bool:
        return not (
            any(self.data[name] for name in _COUNTS)
            or any(self.data[what] for what in _FAILURES)
            or any(self.data[what] for what in ("phases", "gauges", "protocols"))
        )


_SERIES_OF_COUNTS = {
    "bytes": ("vllm:pd_received_bytes", "Bytes that came from prefill instances, summed over ranks."),
    "runs": ("vllm:pd_runs", "Contiguous runs that they were moved in, summed over ranks."),
    "descriptors": ("vllm:pd_descriptors", "Descriptors given to the transport, summed over ranks."),
    "receives": ("vllm:pd_receives", "Receives that ended well, summed over ranks."),
    "verified": ("vllm:pd_verified_receives", "Receives whose sums equalled the prefill side's, over ranks."),
    "relinked": ("vllm:pd_relinked_peers", "Peers linked anew because transfers stood still."),
    "leases_expired": ("vllm:pd_leases_expired", "Requests whose lease ended before they were read (prefill)."),
    "leases_over_limit": ("vllm:pd_leases_over_limit", "Those of them whose lease reached kv_lease_limit."),
} | {name: (f"vllm:pd_{name}", text) for name, text in _CONVERSATIONS.items()}
_SERIES_OF_GAUGES = {
    "leases": ("vllm:pd_leases", "Requests whose blocks the prefill side holds for a reader."),
    "leased blocks": ("vllm:pd_leased_blocks", "Blocks that the prefill side holds for readers."),
    "leased blocks limit": (
        "vllm:pd_leased_blocks_limit",
        "Blocks that prefills for decode instances may take (kv_lease_share).",
    ),
    "prefills held back": (
        "vllm:pd_prefills_held_back",
        "Prefills for decode instances that wait because leases have their share of the blocks.",
    ),
    "quarantined blocks": (
        "vllm:pd_quarantined_blocks",
        "Blocks kept back because a failed read may still write into them.",
    ),
    "read bytes/s": (
        "vllm:pd_selftest_read_bytes_per_second",
        "Mode auto: speed of reads from the prefill instance that was met last.",
    ),
    "write bytes/s": (
        "vllm:pd_selftest_write_bytes_per_second",
        "Mode auto: speed of writes to the prefill instance that was met last.",
    ),
    "run cost": (
        "vllm:pd_selftest_run_cost_bytes",
        "Mode auto: what one run of a read costs there, in bytes that could be read instead.",
    ),
    "push chosen": ("vllm:pd_push_chosen", "Mode auto: 1 if that instance is asked to write, 0 if it is read."),
    "free blocks": ("vllm:pd_free_blocks", "Free blocks of the KV-cache pool."),
}


class PDPromMetrics(KVConnectorPromMetrics):  # type: ignore[misc]  # vLLM ships no types
    """Prometheus series of the connector, one child per engine."""

    def __init__(
        self,
        vllm_config: Any,
        metric_types: dict[type[PromMetric], type[PromMetricT]],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        counter, histogram = metric_types[Counter], metric_types[Histogram]
        # With several API servers an engine's numbers come through one of them or another; by default each would show
        # a row of its own, with its process id and the last value that it happened to get.
        gauges_of_vllm: Any = metric_types[Gauge]
        gauge = partial(gauges_of_vllm, multiprocess_mode="mostrecent")
        self._counts = {
            key: counter(name=name, documentation=text, labelnames=labelnames)
            for key, (name, text) in _SERIES_OF_COUNTS.items()
        }
        self._failures = {
            what: counter(name=name, documentation=text, labelnames=[*labelnames, "reason"])
            for what, (name, text) in _FAILURES.items()
        }
        self._phases = histogram(
            name="vllm:pd_phase_seconds",
            documentation="Duration of each phase of a receive on one rank, in seconds.",
            buckets=_PHASE_BUCKETS,
            labelnames=[*labelnames, "phase"],
        )
        self._gauges = {
            key: gauge(name=name, documentation=text, labelnames=labelnames)
            for key, (name, text) in _SERIES_OF_GAUGES.items()
        }
        self._protocols = gauge(
            name="vllm:pd_transport_info",
            documentation="What the workers' transport speaks; always 1, one row for each protocol among the ranks.",
            labelnames=[*labelnames, "transport", "protocol"],
        )
        info = gauge(name=INFO_SERIES, documentation=INFO_TEXT, labelnames=[*labelnames, *LABELS])
        for index, values in per_engine_labelvalues.items():
            own = _said(vllm_config, index).labels()
            info.labels(*map(str, values), *(own[name] for name in LABELS)).set(1)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for key, metric in self._counts.items():
            metric.labels(*labels).inc(transfer_stats_data[key])
        for what, failures in self._failures.items():
            for kind, number in transfer_stats_data[what].items():
                failures.labels(*labels, kind).inc(number)
        for phase, samples in transfer_stats_data["phases"].items():
            child = self._phases.labels(*labels, phase)
            for sample in samples:
                child.observe(sample)
        for key, value in transfer_stats_data["gauges"].items():
            self._gauges[key].labels(*labels).set(value)
        for protocol, transport in transfer_stats_data["protocols"].items():
            self._protocols.labels(*labels, transport, protocol).set(1)


def _said(vllm_config: Any, index: int) -> EngineInfo:
    """What engine `index` tells routers: its facts, and the key that its side channel has."""
    keys = keys_of(parse_config(vllm_config.kv_transfer_config.kv_connector_extra_config))
    return replace(engine_info(vllm_config, index), server_key=keys.public if keys is not None else "")

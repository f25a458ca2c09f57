"""The Prometheus series of an instance: which there are, and how what was counted comes into them.

vLLM's API server makes one object of `PDPromMetrics` and gives it each step's counts. Every row whose labels are known
is there from the start, at 0: `increase()` sees nothing of a counter's first value. Rows of peers come with the peers,
of which the first `MAX_PEERS` have their own. The series are the same for every transport.

Source: vLLM 0.32, `kv_connector/v1/metrics.py` (KVConnectorPromMetrics).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client import Counter, Gauge, Histogram

from vllm_pd_connector.compat.base import KVConnectorPromMetrics, PromMetric, PromMetricT
from vllm_pd_connector.compat.model.facts import engine_info
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.instance_info import INFO_SERIES, INFO_TEXT, LABELS
from vllm_pd_connector.observability.nixl_series import NixlSeries
from vllm_pd_connector.observability.stats import BY_PEER, BY_REASON, REASONS, Phase, peer_row
from vllm_pd_connector.sidechannel.net.keys import keys_of

_PHASE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
                  30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)  # fmt: skip

_SERIES_OF_COUNTS = {
    "bytes": ("vllm:pd_received_bytes", "Bytes that came from prefill instances, summed over ranks."),
    "runs": ("vllm:pd_runs", "Contiguous runs that they were moved in, summed over ranks."),
    "descriptors": ("vllm:pd_descriptors", "Descriptors given to the transport, summed over ranks."),
    "receives": ("vllm:pd_receives", "Receives that ended well, summed over ranks."),
    "verified": ("vllm:pd_verified_receives", "Receives whose sums equalled the prefill side's, over ranks."),
    "relinked": ("vllm:pd_relinked_peers", "Peers linked anew because transfers stood still."),
    "leases_expired": ("vllm:pd_leases_expired", "Requests whose lease ended before they were read (prefill)."),
    "leases_over_limit": ("vllm:pd_leases_over_limit", "Those of them whose lease reached kv_lease_limit."),
    "given_bytes": (
        "vllm:pd_given_bytes",
        "Bytes that readers of this instance's caches got, over ranks.",
    ),
    "given": ("vllm:pd_given_requests", "Requests of other instances that got this instance's caches."),
    "conversations_kept": (
        "vllm:pd_conversations_kept",
        "Finished requests whose caches were kept for the next turn of their conversation.",
    ),
    "conversations_read": ("vllm:pd_conversations_read", "Those of them that were read."),
    "conversations_dropped": (
        "vllm:pd_conversations_dropped",
        "Those of them that were given back early, for requests that needed blocks.",
    ),
    "turns_computed": (
        "vllm:pd_turns_computed",
        "Prefills that named a conversation and read nothing of it; the log says why.",
    ),
    "turns_read": ("vllm:pd_turns_read", "Prefills that were told to read the beginning of their conversation."),
    "turn_tokens": ("vllm:pd_turn_tokens", "Tokens that these were told to read."),
}
_SERIES_BY_REASON = {
    "failures": ("vllm:pd_failed_receives", "Receives that failed, by reason, summed over ranks."),
    "failed_pushes": ("vllm:pd_failed_pushes", "Pushes that failed on the prefill side, by reason, summed over ranks."),
    "not_held": (
        "vllm:pd_prefills_not_held",
        "Prefills for decode instances that ended and are not held for one, by reason.",
    ),
    "computed_here": (
        "vllm:pd_prompts_computed_here",
        "Requests that came for caches and use none: what the prefix cache lacks is computed here, by reason.",
    ),
}
_SERIES_BY_PEER = {
    "peer_bytes": ("vllm:pd_peer_received_bytes", "Bytes that came from this peer, summed over ranks."),
    "peer_receives": ("vllm:pd_peer_receives", "Receives from this peer that ended well, summed over ranks."),
    "peer_failures": ("vllm:pd_peer_failed_receives", "Receives from this peer that failed, summed over ranks."),
    "peer_given_bytes": ("vllm:pd_peer_given_bytes", "Bytes that this peer got, summed over its ranks."),
    "peer_given": ("vllm:pd_peer_given_requests", "Requests of this peer that got this instance's caches."),
}
_SERIES_OF_GAUGES = {
    "leases": ("vllm:pd_leases", "Requests whose blocks the prefill side holds for a reader."),
    "conversations held": (
        "vllm:pd_conversations_held",
        "Finished requests whose caches are held for the next turn of their conversation.",
    ),
    "leased blocks": ("vllm:pd_leased_blocks", "Blocks that the prefill side holds for readers."),
    "leased blocks limit": (
        "vllm:pd_leased_blocks_limit",
        "Blocks that prefills for decode instances may take (kv_lease_share).",
    ),
    "prefills held back": (
        "vllm:pd_prefills_held_back",
        "Prefills for decode instances that wait because leases have their share of the blocks.",
    ),
    "weights unnamed": (
        "vllm:pd_weights_unnamed",
        "1 while weights that were changed in place have no name: nothing is handed over or taken.",
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

        def made(kind: Any, table: dict[str, tuple[str, str]], *more: str) -> dict[str, Any]:
            names = [*labelnames, *more]
            return {key: kind(name=name, documentation=text, labelnames=names) for key, (name, text) in table.items()}

        self._counts = made(counter, _SERIES_OF_COUNTS)
        self._by_reason = made(counter, _SERIES_BY_REASON, "reason")
        self._by_peer = made(counter, _SERIES_BY_PEER, "peer", "transport")
        self._phases = histogram(
            name="vllm:pd_phase_seconds",
            documentation="Duration of each phase of a receive on one rank, in seconds.",
            buckets=_PHASE_BUCKETS,
            labelnames=[*labelnames, "phase"],
        )
        self._gauges = made(gauge, _SERIES_OF_GAUGES)
        self._protocols = gauge(
            name="vllm:pd_transport_info",
            documentation="What the workers' transport speaks; always 1, one row for each protocol among the ranks.",
            labelnames=[*labelnames, "transport", "protocol"],
        )
        self._peers: dict[str, dict[str, None]] = {what: {} for what in BY_PEER}
        self._transports: dict[int, str] = {}
        config = parse_config(vllm_config.kv_transfer_config.kv_connector_extra_config)
        keys = keys_of(config)
        public = keys.public if keys is not None else ""
        info = gauge(name=INFO_SERIES, documentation=INFO_TEXT, labelnames=[*labelnames, *LABELS])
        for index, values in per_engine_labelvalues.items():
            own = replace(engine_info(vllm_config, index, len(per_engine_labelvalues)), server_key=public)
            self._transports[index] = own.transport
            labels = own.labels()
            info.labels(*map(str, values), *(labels[name] for name in LABELS)).set(1)
            self._begin([str(value) for value in values])
        self._nixl = NixlSeries(metric_types, labelnames, per_engine_labelvalues) if config.nixl_series else None

    def _begin(self, labels: list[str]) -> None:
        """Have the rows of an engine that are known before anything has happened."""
        for metric in self._counts.values():
            metric.labels(*labels)
        for what, metric in self._by_reason.items():
            for reason in REASONS[what]:
                metric.labels(*labels, reason.value)
        for phase in Phase:
            self._phases.labels(*labels, phase.value)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        labels = [str(value) for value in self.per_engine_labelvalues[engine_idx]]
        for key, metric in self._counts.items():
            metric.labels(*labels).inc(transfer_stats_data[key])
        for what in BY_REASON:
            for kind, number in transfer_stats_data[what].items():
                self._by_reason[what].labels(*labels, kind).inc(number)
        for what in BY_PEER:
            for told, number in transfer_stats_data[what].items():
                peer = peer_row(self._peers[what], told)
                self._peers[what][peer] = None
                self._by_peer[what].labels(*labels, peer, self._transports[engine_idx]).inc(number)
        for phase, samples in transfer_stats_data["phases"].items():
            child = self._phases.labels(*labels, phase)
            for sample in samples:
                child.observe(sample)
        for key, value in transfer_stats_data["gauges"].items():
            self._gauges[key].labels(*labels).set(value)
        for protocol, transport in transfer_stats_data["protocols"].items():
            self._protocols.labels(*labels, transport, protocol).set(1)
        if self._nixl is not None:
            self._nixl.observe(transfer_stats_data, engine_idx)

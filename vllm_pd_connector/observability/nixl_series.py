"""The series of vLLM's NixlConnector, for dashboards and rules that were made for it (`nixl_series` of the
configuration).

Names and buckets are theirs; a test compares them with the installed vLLM. What they count is a transfer, which is here
one receive on one rank, whichever transport moves it. Of what that connector alone does, late notifications, there is
nothing to count.

Source: vLLM 0.32, `kv_connector/v1/nixl/stats.py` (NixlPromMetrics).
"""

from __future__ import annotations

from typing import Any

from prometheus_client import Counter, Histogram

_SECONDS = (0.001, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0)
_BYTES = tuple(2 ** (10 + i) for i in range(1, 25, 2))
_DESCRIPTORS = (10, 20, 30, 50, 75, 100, 200, 400, 1000, 2000, 4000, 10000, 20000, 50000)

_HISTOGRAMS = {
    "vllm:nixl_xfer_time_seconds": (_SECONDS[1:], "phases", "transfer", "Duration of a receive's transfers."),
    "vllm:nixl_post_time_seconds": (_SECONDS, "phases", "post", "Time to hand a receive to the transport."),
    "vllm:nixl_bytes_transferred": (_BYTES, "sizes", "bytes", "Bytes of a receive on one rank."),
    "vllm:nixl_num_descriptors": (_DESCRIPTORS, "sizes", "descriptors", "Descriptors of a receive on one rank."),
}
_COUNTERS = {
    "vllm:nixl_num_failed_transfers": "Receives that failed, summed over ranks.",
    "vllm:nixl_num_failed_notifications": "Always 0: PDConnector confirms on its side channel.",
    "vllm:nixl_num_kv_expired_reqs": "Requests whose lease ended before they were read (prefill).",
    "vllm:nixl_num_notifications_after_expiry": "Always 0: a late reader is refused, and fails.",
}


class NixlSeries:
    """These series, one row per engine, at 0 from the start."""

    def __init__(
        self, metric_types: dict[Any, Any], labelnames: list[str], per_engine_labelvalues: dict[int, list[object]]
    ) -> None:
        def made(kind: Any, name: str, text: str, **more: Any) -> dict[int, Any]:
            metric = metric_types[kind](name=name, documentation=text, labelnames=labelnames, **more)
            return {engine: metric.labels(*map(str, values)) for engine, values in per_engine_labelvalues.items()}

        self._histograms = {
            name: made(Histogram, name, text, buckets=list(buckets))
            for name, (buckets, _, _, text) in _HISTOGRAMS.items()
        }
        self._counters = {name: made(Counter, name, text) for name, text in _COUNTERS.items()}

    def observe(self, counted: dict[str, Any], engine: int) -> None:
        """Add the data of one `PDStats`."""
        for name, (_, table, of, _) in _HISTOGRAMS.items():
            for sample in counted[table].get(of, ()):
                self._histograms[name][engine].observe(sample)
        self._counters["vllm:nixl_num_failed_transfers"][engine].inc(sum(counted["failures"].values()))
        self._counters["vllm:nixl_num_kv_expired_reqs"][engine].inc(counted["leases_expired"])

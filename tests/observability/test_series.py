"""What an instance's `/metrics` shows: every row from the start, bounded peers, the in-tree connector's names."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector, MultiKVConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.stats import NixlPromMetrics
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats

from vllm_pd_connector import __version__, plugin
from vllm_pd_connector.config import Config
from vllm_pd_connector.instance_info import parse
from vllm_pd_connector.observability import series
from vllm_pd_connector.observability.series import PDPromMetrics
from vllm_pd_connector.observability.stats import (
    MAX_PEERS,
    MAX_SAMPLES,
    OTHER,
    ComputedHere,
    FailureKind,
    NotHeld,
    PDStats,
    Phase,
)


def config(**extra: Any) -> Any:
    return SimpleNamespace(
        kv_events_config=None,
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", engine_id="e", kv_connector_extra_config=extra),
        parallel_config=SimpleNamespace(
            data_parallel_size=1, tensor_parallel_size=1, pipeline_parallel_size=1, decode_context_parallel_size=1
        ),
    )


def kinds(registry: CollectorRegistry) -> dict[Any, Any]:
    return {
        kind: lambda kind=kind, **words: kind(registry=registry, **words)  # type: ignore[misc]
        for kind in (Counter, Gauge, Histogram)
    }


class Page:
    """An instance's series, and what they show."""

    def __init__(self, **extra: Any) -> None:
        self.registry = CollectorRegistry()
        self.metrics = PDPromMetrics(config(**extra), kinds(self.registry), ["engine"], {0: ["0"]})

    def observe(self, stats: PDStats) -> None:
        self.metrics.observe(stats.to_dict())

    def value(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(name, {"engine": "0", **labels})

    def rows(self, name: str) -> list[Mapping[str, str]]:
        return [s.labels for family in self.registry.collect() for s in family.samples if s.name == name]


def test_every_counter_and_every_reason_is_there_before_anything_happened():
    page = Page()
    for reason in FailureKind:
        assert page.value("vllm:pd_failed_receives_total", reason=reason) == 0
        assert page.value("vllm:pd_failed_pushes_total", reason=reason) == 0
    for reason in NotHeld:
        assert page.value("vllm:pd_prefills_not_held_total", reason=reason) == 0
    for phase in Phase:
        assert page.value("vllm:pd_phase_seconds_count", phase=phase) == 0
    without_peer = [
        family.name for family in page.registry.collect() if family.type == "counter" and "peer" not in family.name
    ]
    assert {name for name in without_peer if not page.rows(f"{name}_total")} == set()


def test_prefills_that_are_not_held_are_counted_by_their_reason():
    page, stats, later = Page(), PDStats(), PDStats()
    stats.not_held(NotHeld.WEIGHTS, 2)
    later.not_held(NotHeld.WEIGHTS, 1)
    later.not_held(NotHeld.ABORTED, 1)
    later.computed_here(ComputedHere.BATCH, 3)
    later.gauge("weights unnamed", 1)
    assert not stats.is_empty()
    page.observe(stats.aggregate(later))
    here = {reason.value: page.value("vllm:pd_prompts_computed_here_total", reason=reason) for reason in ComputedHere}
    assert here == {"own": 0, "batch": 3, "used": 0, "outdated": 0}
    rows = {reason.value: page.value("vllm:pd_prefills_not_held_total", reason=reason) for reason in NotHeld}
    assert rows == {"weights": 3, "role": 0, "refused": 0, "ended": 0, "aborted": 1}
    assert page.value("vllm:pd_weights_unnamed") == 1


def test_what_was_given_is_shown_by_whom_it_was_taken():
    page, stats = Page(transport="mooncake"), PDStats()
    stats.gave("decode-1", 600, whole=False)
    stats.gave("decode-1", 400, whole=True)
    stats.gave("decode-2", 50, whole=True)
    page.observe(stats)
    assert page.value("vllm:pd_given_bytes_total") == 1050 and page.value("vllm:pd_given_requests_total") == 2
    of = {"peer": "decode-1", "transport": "mooncake"}
    assert page.value("vllm:pd_peer_given_bytes_total", **of) == 1000
    assert page.value("vllm:pd_peer_given_requests_total", **of) == 1


def test_names_that_others_chose_make_no_more_rows_than_may_be():
    page = Page()
    for step in range(3):
        stats = PDStats()
        for number in range(2 * MAX_PEERS):
            stats.of_peer("peer_bytes", f"decode-{step}-{number}")
        assert len(stats.data["peer_bytes"]) == MAX_PEERS + 1
        page.observe(stats)
    rows = page.rows("vllm:pd_peer_received_bytes_total")
    assert len(rows) == MAX_PEERS + 1 and OTHER in {row["peer"] for row in rows}
    assert page.value("vllm:pd_peer_received_bytes_total", peer=OTHER, transport="nixl") == 5 * MAX_PEERS


def test_stats_of_ranks_add_up_without_more_peers_than_may_be():
    ranks = [PDStats(), PDStats()]
    for rank, stats in enumerate(ranks):
        for number in range(MAX_PEERS):
            stats.of_peer("peer_bytes", f"{rank}-{number}")
    total = ranks[0].aggregate(ranks[1])
    assert len(total.data["peer_bytes"]) == MAX_PEERS + 1 and sum(total.data["peer_bytes"].values()) == 2 * MAX_PEERS


def test_the_version_and_the_mode_are_on_the_page():
    page = Page(mode="auto")
    [engine] = parse(generate_latest(page.registry).decode()).values()
    assert (engine.version, engine.mode) == (__version__, "auto")


def test_engines_that_came_while_it_was_scaled_up_are_told_apart():
    """vLLM makes the series anew before its configuration says how many there are."""
    registry = CollectorRegistry()
    PDPromMetrics(config(side_channel_port=7000), kinds(registry), ["engine"], {0: ["0"], 1: ["1"]})
    found = parse(generate_latest(registry).decode())
    told = [(found[rank].engine_id, found[rank].side_channel_port) for rank in (0, 1)]
    assert told == [("e_dp0", 7000), ("e_dp1", 7001)]


def test_the_log_line_has_throughput_and_the_ninetieth_percentile():
    stats = PDStats()
    for tenths in range(1, 11):
        stats.observe_phase(Phase.TRANSFER, tenths / 10)
    stats.count("bytes", 55_000_000)
    line = stats.reduce()
    assert line["MB/s"] == 10.0 and line["transfer ms"] == 550.0 and line["transfer p90 ms"] == 910.0


def test_throughput_is_not_said_of_transfers_whose_times_were_not_kept():
    stats = PDStats()
    for _ in range(MAX_SAMPLES + 1):
        stats.observe_phase(Phase.TRANSFER, 1.0)
    assert "MB/s" not in stats.reduce()


@pytest.mark.parametrize("asked", [False, True])
def test_the_in_tree_connector_s_series_are_there_where_they_are_asked_for(asked):
    theirs, registry = Page(nixl_series=asked), CollectorRegistry()
    NixlPromMetrics(config(), kinds(registry), ["engine"], {0: ["0"]})

    def shapes(of: CollectorRegistry) -> set[tuple[str, str, tuple[tuple[str, str], ...]]]:
        return {
            (family.type, sample.name, tuple(sorted(sample.labels.items())))
            for family in of.collect()
            for sample in family.samples
            if family.name.startswith("vllm:nixl_") and not sample.name.endswith("_created")
        }

    assert shapes(theirs.registry) == (shapes(registry) if asked else set()) and shapes(registry)


def test_the_in_tree_connector_s_series_count_receives():
    page, stats = Page(nixl_series=True), PDStats()
    stats.observe_phase(Phase.TRANSFER, 0.02)
    stats.observe_size("bytes", 4096)
    stats.observe_size("descriptors", 12)
    stats.fail(FailureKind.DEADLINE)
    stats.count("leases_expired")
    page.observe(stats)
    assert page.value("vllm:nixl_xfer_time_seconds_sum") == 0.02
    assert page.value("vllm:nixl_bytes_transferred_sum") == 4096 and page.value("vllm:nixl_num_descriptors_sum") == 12
    assert page.value("vllm:nixl_num_failed_transfers_total") == 1
    assert page.value("vllm:nixl_num_kv_expired_reqs_total") == 1


def test_beside_another_connector_the_series_of_both_are_on_the_page():
    """vLLM's MultiConnector keeps each connector's counts under the name of its class, also between processes."""
    plugin.register()
    offloading = {"spec_name": "CPUOffloadingSpec", "cpu_bytes_to_use": 1 << 20}
    entries = [
        {"kv_connector": "PDConnector", "kv_role": "kv_consumer", "kv_connector_extra_config": {"mode": "push"}},
        {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": offloading},
    ]
    made = config()
    made.kv_transfer_config = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": entries}
    )
    registry = CollectorRegistry()
    page = MultiConnector.build_prom_metrics(made, kinds(registry), ["engine"], {0: ["0"]})
    ours, theirs = PDStats(), OffloadingConnectorStats()
    ours.count("receives", 3)
    theirs.increase_counter("vllm:kv_offload_load_bytes", 64)
    sent = MultiKVConnectorStats(data={"PDConnector": ours, "OffloadingConnector": theirs}).to_dict()
    page.observe(sent)
    assert registry.get_sample_value("vllm:pd_receives_total", {"engine": "0"}) == 3
    assert registry.get_sample_value("vllm:kv_offload_load_bytes_total", {"engine": "0"}) == 64
    [info] = parse(generate_latest(registry).decode()).values()
    assert (info.role, info.mode) == ("kv_consumer", "push"), "its own entry's"
    logged = MultiConnector.build_kv_connector_stats(sent).reduce()
    assert set(logged) == {"PDConnector", "OffloadingConnector"} and all(logged.values())


def test_a_phase_that_reached_its_deadline_is_not_beyond_every_bucket() -> None:
    deadlines = Config()
    ends = deadlines.transfer_timeout, deadlines.handshake_timeout, deadlines.confirm_timeout
    longest = max(*ends, deadlines.kv_lease_limit)  # within which a slow transfer goes on
    assert [bound for bound in series._PHASE_BUCKETS if bound > longest]

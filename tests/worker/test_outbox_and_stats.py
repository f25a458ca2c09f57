"""What the transfer thread hands over arrives once, in the right step; counts add up over ranks and time."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from unittest.mock import MagicMock

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from vllm_pd_connector.compat.base import KVConnectorTransferResults
from vllm_pd_connector.connector import PDConnector
from vllm_pd_connector.instance_info import parse
from vllm_pd_connector.metadata import WorkerReport
from vllm_pd_connector.observability.series import PDPromMetrics
from vllm_pd_connector.observability.stats import FailureKind, PDStats, Phase
from vllm_pd_connector.sidechannel.net.keys import create_keys, public_key
from vllm_pd_connector.worker.outbox import Outbox


def test_a_quarantine_is_announced_in_the_step_of_the_failure():
    outbox = Outbox()
    outbox.finished("a", ok=False, quarantined=True)
    results = outbox.take_results()
    outbox.drained("a")
    assert results.failed_recving == results.finished_recving == {"a"}
    report = outbox.take_report()
    assert report is not None and report.quarantined == {"a": 1} and not report.drained
    assert outbox.take_report() is None
    assert not outbox.take_results().finished_recving
    report = outbox.take_report()
    assert report is not None and report.drained == {"a": 1}


def test_of_two_receives_of_one_name_both_ends_are_told():
    outbox = Outbox()
    outbox.drained("a")
    outbox.drained("a")
    outbox.take_results()
    assert outbox.take_report().drained == {"a": 2}


def test_reports_of_ranks_add_up():
    first, second = Outbox(), Outbox()
    for outbox in (first, second):
        outbox.finished("a", ok=False, quarantined=True)
        outbox.take_results()
    total = first.take_report().aggregate(second.take_report())
    assert total.quarantined == {"a": 2}


def test_blocks_that_must_stay_private_are_announced_in_the_step_of_their_receive():
    first, second = Outbox(), Outbox()
    first.finished("a", ok=True, quarantined=False, unshareable={1: 4})
    first.finished("b", ok=False, quarantined=False, unshareable={1: 4})
    second.finished("a", ok=True, quarantined=False, unshareable={1: 2, 2: 3})
    assert first.take_results().finished_recving == {"a", "b"} and second.take_results()
    total = first.take_report().aggregate(second.take_report())
    assert total.unshareable == {"a": {1: 4, 2: 3}}
    assert first.take_report() is None


def test_what_was_counted_is_handed_over_with_the_report_and_once():
    outbox = Outbox()
    outbox.counting.fail(FailureKind.DEADLINE)
    assert outbox.take_stats() is None
    outbox.finished("a", ok=False, quarantined=False)
    stats = outbox.take_stats()
    assert stats is not None and stats.data["failures"] == {"deadline": 1}
    outbox.flush()
    assert outbox.take_stats() is None
    outbox.counting.count("bytes", 7)
    outbox.flush()
    stats = outbox.take_stats()
    assert stats is not None and stats.data["bytes"] == 7 and not stats.data["failures"]


def test_a_step_in_which_nothing_has_ended_waits_for_nobody_who_counts():
    outbox, taken = Outbox(), []
    take = (outbox.take_results, outbox.take_report, outbox.take_stats)
    step = threading.Thread(target=lambda: taken.extend(one() for one in take), daemon=True)
    with outbox._lock:
        step.start()
        step.join(5.0)
    assert taken == [KVConnectorTransferResults(), None, None]


def make_stats() -> PDStats:
    stats = PDStats()
    stats.count("bytes", 1000)
    stats.count("receives")
    stats.fail(FailureKind.DEADLINE)
    stats.fail(FailureKind.PEER_UNREACHABLE, "failed_pushes")
    stats.observe_phase(Phase.TOTAL, 0.25)
    stats.gauge("leases", 3)
    return stats


def test_stats_aggregate_and_survive_the_way_between_processes():
    total = make_stats().aggregate(PDConnector.build_kv_connector_stats(make_stats().to_dict()))
    assert total.data["bytes"] == 2000 and total.data["failures"] == {"deadline": 2}
    assert total.data["phases"] == {"total": [0.25, 0.25]} and total.data["gauges"] == {"leases": 3}
    summary = total.reduce()
    assert summary["receives"] == 2 and summary["total ms"] == 250.0 and summary["leases"] == 3
    total.reset()
    assert total.is_empty() and not make_stats().is_empty()


CONFIG = SimpleNamespace(
    kv_events_config=None,
    kv_transfer_config=SimpleNamespace(
        kv_role="kv_producer", engine_id="e", kv_connector_extra_config={"side_channel_port": 5600}
    ),
    parallel_config=SimpleNamespace(
        data_parallel_size=2, tensor_parallel_size=4, pipeline_parallel_size=1, decode_context_parallel_size=1
    ),
)


def test_routers_are_told_of_each_engine_what_that_engine_itself_uses():
    registry = CollectorRegistry()

    def gauge(multiprocess_mode="all", **kwargs):
        return Gauge(registry=registry, multiprocess_mode=multiprocess_mode, **kwargs)

    kinds = {Counter: MagicMock(), Gauge: gauge, Histogram: MagicMock()}
    PDPromMetrics(CONFIG, kinds, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})
    engines = parse(generate_latest(registry).decode())
    told = [(e.engine_id, e.side_channel_port, e.tp_size, e.role, e.mode) for e in engines.values()]
    assert told == [("e_dp0", 5600, 4, "kv_producer", "pull"), ("e_dp1", 5601, 4, "kv_producer", "pull")]


def test_routers_are_told_the_key_of_an_instance_s_side_channel(tmp_path):
    create_keys(tmp_path, "own")
    transfer = SimpleNamespace(**vars(CONFIG.kv_transfer_config))
    transfer.kv_connector_extra_config = {**transfer.kv_connector_extra_config, "side_channel_keys": str(tmp_path)}
    registry = CollectorRegistry()
    kinds = {
        Counter: MagicMock(),
        Gauge: lambda multiprocess_mode="all", **kwargs: Gauge(registry=registry, **kwargs),
        Histogram: MagicMock(),
    }
    PDPromMetrics(SimpleNamespace(**vars(CONFIG) | {"kv_transfer_config": transfer}), kinds, ["engine"], {0: ["0"]})
    [engine] = parse(generate_latest(registry).decode()).values()
    assert engine.server_key == public_key(tmp_path / "own.key")


def test_the_protocol_in_use_is_a_label_and_ranks_that_differ_are_two_rows():
    registry = CollectorRegistry()

    def gauge(multiprocess_mode="all", **kwargs):
        return Gauge(registry=registry, multiprocess_mode=multiprocess_mode, **kwargs)

    ranks = [Outbox(), Outbox()]
    for outbox, protocol in zip(ranks, ("rdma", "tcp"), strict=True):
        outbox.speaks("mooncake", protocol)
    told = [outbox.take_stats() for outbox in ranks]
    assert not any(outbox.take_stats() for outbox in ranks), "it is said once"
    total = told[0].aggregate(PDConnector.build_kv_connector_stats(told[1].to_dict()))
    kinds = {Counter: MagicMock(), Gauge: gauge, Histogram: MagicMock()}
    PDPromMetrics(CONFIG, kinds, ["engine"], {0: ["0"]}).observe(total.to_dict())
    rows = [row for row in generate_latest(registry).decode().splitlines() if "transport_info{" in row]
    assert rows == [
        f'vllm:pd_transport_info{{engine="0",protocol="{protocol}",transport="mooncake"}} 1.0'
        for protocol in ("rdma", "tcp")
    ]


def test_gauges_of_several_api_servers_are_one_row_with_the_newest_value():
    modes: dict[str, str | None] = {}

    def gauge(name, multiprocess_mode=None, **_):
        modes[name] = multiprocess_mode
        return MagicMock()

    kinds = {Counter: MagicMock(), Gauge: gauge, Histogram: MagicMock()}
    PDPromMetrics(CONFIG, kinds, ["model_name", "engine"], {0: ["m", "0"]})
    assert "vllm:pd_leases" in modes and "vllm:pd_instance_info" in modes
    assert set(modes.values()) == {"mostrecent"}, modes


def test_prometheus_series_show_what_was_counted():
    registry = CollectorRegistry()

    def of(kind):
        return lambda **kwargs: kind(registry=registry, **kwargs)

    metrics = PDPromMetrics(
        CONFIG,
        {Counter: of(Counter), Gauge: of(Gauge), Histogram: of(Histogram)},
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    metrics.observe(make_stats().to_dict(), 0)
    metrics.observe(make_stats().to_dict(), 0)
    labels = {"model_name": "m", "engine": "0"}
    assert registry.get_sample_value("vllm:pd_received_bytes_total", labels) == 2000
    assert registry.get_sample_value("vllm:pd_failed_receives_total", labels | {"reason": "deadline"}) == 2
    assert registry.get_sample_value("vllm:pd_failed_pushes_total", labels | {"reason": "peer_unreachable"}) == 2
    assert registry.get_sample_value("vllm:pd_phase_seconds_sum", labels | {"phase": "total"}) == 0.5
    assert registry.get_sample_value("vllm:pd_leases", labels) == 3


def test_a_failure_that_its_request_can_do_without_is_not_told_to_vllm():
    outbox = Outbox()
    outbox.finished("turn", ok=False, quarantined=True, spare=True)
    outbox.finished("decode", ok=False, quarantined=False)
    results, report = outbox.take_results(), outbox.take_report()
    assert (results.finished_recving, results.failed_recving) == ({"turn", "decode"}, {"decode"})
    assert report is not None and (report.spared, report.quarantined) == ({"turn"}, {"turn": 1})
    both = report.aggregate(WorkerReport(spared={"other"}, failed={"more"}))
    assert both.spared == {"turn", "other"} and both.failed == {"decode", "more"}

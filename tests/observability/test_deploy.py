"""Dashboards and rules name series, labels and values that exist: instances', the router's, nobody else's."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from vllm_pd_connector.observability.series import PDPromMetrics
from vllm_pd_connector.observability.stats import BY_PEER, ComputedHere, FailureKind, NotHeld, PDStats, Phase
from vllm_pd_connector.proxy.metrics import ProxyMetrics

ROOT = Path(__file__).resolve().parents[2]
DASHBOARDS = sorted((ROOT / "deploy" / "grafana").glob("*.json"))
RULES = ROOT / "deploy" / "prometheus" / "rules.yaml"
SERIES = re.compile(r"\b(?:vllm:|vllm_pd_|instance:pd_)[a-z0-9_:]+(?:\{(?P<selected>[^}]*)\})?")
SELECTED = re.compile(r'([a-z_]+)\s*(=~|!=|=|!~)\s*"([^"]*)"')
GROUPED = re.compile(r"\b(?:by|on|without)\s*\(([^)]*)\)")
OF_SCRAPES = {"instance", "job", "exported_instance", "le"}
"""Labels that Prometheus adds; `exported_instance` is what it makes of the router's own `instance`."""
VALUES = {"reason": {kind.value for kind in FailureKind}, "phase": {phase.value for phase in Phase}}
OTHER_REASONS = {
    "vllm:pd_prefills_not_held_total": {reason.value for reason in NotHeld},
    "vllm:pd_prompts_computed_here_total": {reason.value for reason in ComputedHere},
}
OF_VLLM = {
    "vllm:prompt_tokens_total": frozenset({"model_name", "engine"}),
    "vllm:prompt_tokens_by_source_total": frozenset({"model_name", "engine", "source"}),
}
"""Series of vLLM's own that rules ask for."""


@cache
def existing() -> dict[str, frozenset[str]]:
    """The labels of every series, by its name."""
    instance, labels = CollectorRegistry(), ["model_name", "engine"]
    parallel = dict.fromkeys(("data_parallel_size", "tensor_parallel_size", "pipeline_parallel_size"), 1)
    config = SimpleNamespace(
        kv_events_config=None,
        kv_transfer_config=SimpleNamespace(kv_role="kv_both", engine_id="e", kv_connector_extra_config={}),
        parallel_config=SimpleNamespace(**parallel, decode_context_parallel_size=1),
    )
    kinds: Any = {
        kind: lambda kind=kind, **words: kind(registry=instance, **words)  # type: ignore[misc]
        for kind in (Counter, Gauge, Histogram)
    }
    metrics, stats = PDPromMetrics(config, kinds, labels, {0: ["m", "0"]}), PDStats()
    for what in BY_PEER:
        stats.of_peer(what, "peer")
    for gauge in metrics._gauges:
        stats.gauge(gauge, 1)
    metrics.observe(stats.to_dict())
    router = ProxyMetrics()
    for family in (router.requests, router.legs, router.seconds, router.in_flight, router.usable):
        family.labels(*["x"] * len(family._labelnames))
    recorded = {rule["record"]: frozenset({"instance"}) for _, rule in rules() if "record" in rule}
    return (
        recorded
        | OF_VLLM
        | {
            sample.name: frozenset(sample.labels)
            for registry in (instance, router.registry)
            for family in registry.collect()
            for sample in family.samples
        }
    )


def rules() -> Iterator[tuple[str, dict[str, Any]]]:
    for group in yaml.safe_load(RULES.read_text())["groups"]:
        for rule in group["rules"]:
            yield rule.get("alert") or rule["record"], rule


def panels() -> Iterator[tuple[str, str, str]]:
    """Title, expression, legend."""
    for path in DASHBOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                yield f"{path.name}: {panel['title']}", target["expr"], target["legendFormat"]


EXPRESSIONS = [(name, rule["expr"]) for name, rule in rules()] + [(title, expr) for title, expr, _ in panels()]


def wrong(expr: str) -> list[str]:
    """What an expression names that is not there."""
    found, known = [], set(OF_SCRAPES)
    names = [(match.group(0).partition("{")[0], match.group("selected") or "") for match in SERIES.finditer(expr)]
    if not names:
        found.append("no series")
    for name, selected in names:
        if name not in existing():
            found.append(name)
            continue
        known |= existing()[name]
        for label, operator, value in SELECTED.findall(selected):
            if label not in existing()[name] | OF_SCRAPES:
                found.append(f"{name}: {label}")
            values = value.split("|") if "~" in operator else [value]
            may_be = OTHER_REASONS[name] if label == "reason" and name in OTHER_REASONS else VALUES.get(label)
            found += [f"{label}: {one}" for one in values if may_be is not None and one not in may_be]
    grouped = {label.strip() for labels in GROUPED.findall(expr) for label in labels.split(",")}
    return found + sorted(grouped - known)


@pytest.mark.parametrize(("name", "expr"), EXPRESSIONS, ids=[name for name, _ in EXPRESSIONS])
def test_an_expression_names_what_exists(name, expr):
    assert wrong(expr) == []
    assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}")


@pytest.mark.parametrize(
    ("expr", "says"),
    [
        ("rate(vllm:pd_recieved_bytes_total[1m])", ["vllm:pd_recieved_bytes_total"]),
        ('vllm:pd_failed_receives_total{cause="deadline"}', ["vllm:pd_failed_receives_total: cause"]),
        ('vllm:pd_failed_receives_total{reason=~"deadline|dead"}', ["reason: dead"]),
        ('vllm:pd_prefills_not_held_total{reason!="deadline"}', ["reason: deadline"]),
        ('vllm:pd_failed_receives_total{reason="role"}', ["reason: role"]),
        ("sum by (peer) (vllm:pd_receives_total)", ["peer"]),
        ("up == 0", ["no series"]),
    ],
)
def test_what_does_not_exist_is_found(expr, says):
    assert wrong(expr) == says


def test_the_series_of_vllm_s_own_are_there():
    found = importlib.util.find_spec("vllm.v1.metrics.loggers")
    assert found is not None and found.origin is not None
    source = Path(found.origin).read_text()
    assert [name for name in OF_VLLM if f'name="{name.removesuffix("_total")}"' not in source] == []


def test_legends_name_labels_that_their_expressions_keep():
    missing = {
        title: gone
        for title, expr, legend in panels()
        if (gone := {label for label in re.findall(r"\{\{(\w+)\}\}", legend) if not re.search(rf"\b{label}\b", expr)})
        and not ({"instance", "engine"} >= gone and " by " not in expr)
    }
    assert missing == {}


def test_every_alert_says_what_happened_and_what_to_do():
    for name, rule in rules():
        if "alert" in rule:
            assert rule["labels"]["severity"] in ("warning", "critical"), name
            assert all(rule["annotations"][part] for part in ("summary", "description")), name


def test_panels_do_not_lie_on_each_other():
    for path in DASHBOARDS:
        taken: set[tuple[int, int]] = set()
        for panel in json.loads(path.read_text())["panels"]:
            place = panel["gridPos"]
            cells = {
                (x, y)
                for x in range(place["x"], place["x"] + place["w"])
                for y in range(place["y"], place["y"] + place["h"])
            }
            assert not cells & taken and max(x for x, _ in cells) < 24, panel["title"]
            taken |= cells


def test_every_series_of_an_instance_has_its_line_in_the_documentation():
    page = (ROOT / "docs" / "observability.md").read_text()
    ours = {re.sub(r"_(bucket|sum|count|created)$", "", name) for name in existing() if name.startswith("vllm:pd_")}
    ours = {name for name in ours if f"{name}_total" not in existing()}
    assert {name for name in ours if f"`{name}" not in page} == set()

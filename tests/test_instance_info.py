"""What an instance says of itself on `/metrics` is what a router understands."""

from __future__ import annotations

import dataclasses

import pytest
from prometheus_client import CollectorRegistry, Gauge, generate_latest

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.instance_info import INFO_SERIES, INFO_TEXT, LABELS, EngineInfo, parse

INFO = EngineInfo("kv_producer", "push", "concurrent", "nixl", 'a"\\\n', "fe80::1%eth0", 5601, 2, 3, 1, 2)


def page(*engines: dict[str, str]) -> str:
    registry = CollectorRegistry()
    Gauge("vllm:other", "Something else.", registry=registry).set(3)
    gauge = Gauge(INFO_SERIES, INFO_TEXT, ["model_name", "engine", *LABELS], registry=registry)
    for labels in engines:
        gauge.labels(**({"model_name": "m"} | labels)).set(1)
    return generate_latest(registry).decode()


def test_every_engine_is_read_back_as_it_was_said() -> None:
    second = dataclasses.replace(
        INFO, engine_id="b", side_channel_port=5602, kv_events="tcp://*:5557", kv_events_replay="ipc:///run/x"
    )
    text = page({"engine": "0", **INFO.labels()}, {"engine": "1", **second.labels()})
    assert parse(text) == {0: INFO, 1: second}


def test_an_instance_without_the_connector_says_nothing() -> None:
    assert parse(page()) == parse("") == {}


@pytest.mark.parametrize(
    ("label", "value"),
    [
        ("role", "producer"),
        ("handoff", "both"),
        ("tp_size", "0"),
        ("tp_size", "²"),
        ("side_channel_port", "65536"),
        ("side_channel_port", "-1"),
        ("engine_id", ""),
        ("engine", "x"),
    ],
)
def test_a_value_that_cannot_be_is_refused_by_name(label: str, value: str) -> None:
    with pytest.raises(ProtocolError, match=label):
        parse(page({"engine": "0", **INFO.labels(), label: value}))


@pytest.mark.parametrize("text", ["<html>", 'x{a="b 1', "{{{"])
def test_another_page_is_refused(text: str) -> None:
    with pytest.raises(ProtocolError, match="/metrics"):
        parse(text)

"""The Kubernetes manifests agree with each other and with what the programs accept."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_pd_connector.config import parse_config
from vllm_pd_connector.proxy.serve import add_arguments, options_of

MANIFESTS = Path(__file__).resolve().parents[2] / "examples" / "kubernetes" / "xpyd.yaml"
OBJECTS: list[dict[str, Any]] = list(yaml.safe_load_all(MANIFESTS.read_text()))


def named(kind: str, name: str) -> dict[str, Any]:
    [found] = [one for one in OBJECTS if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found


def container(kind: str, name: str) -> dict[str, Any]:
    [found] = named(kind, name)["spec"]["template"]["spec"]["containers"]
    return found


def test_the_router_is_told_of_every_instance_under_the_name_that_it_gets() -> None:
    router = container("Deployment", "pd-router")
    words = [*router["command"], *router["args"]]
    assert words[:2] == ["vllm-pd", "proxy"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    names = []
    for name in ("pd-prefill", "pd-decode"):
        spec = named("StatefulSet", name)["spec"]
        [port] = named("Service", spec["serviceName"])["spec"]["ports"]
        names += [f"http://{name}-{i}.{spec['serviceName']}:{port['port']}" for i in range(spec["replicas"])]
    assert options_of(parser.parse_args(words[2:])).instances == names


@pytest.mark.parametrize(("name", "role"), [("pd-prefill", "kv_producer"), ("pd-decode", "kv_consumer")])
def test_an_instance_has_its_role_and_advertises_its_pod(name: str, role: str) -> None:
    vllm = container("StatefulSet", name)
    transfer = json.loads(vllm["args"][-1])
    assert vllm["command"][-1] == "--kv-transfer-config" and transfer["kv_role"] == role
    config = parse_config(transfer["kv_connector_extra_config"])
    host, port = config.side_channel(0, {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.2.3"})
    assert (host, port) == ("10.1.2.3", next(p["containerPort"] for p in vllm["ports"] if p["name"] == "side-channel"))
    assert vllm["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


@pytest.mark.parametrize(("kind", "name"), [("StatefulSet", "pd-prefill"), ("StatefulSet", "pd-decode")])
def test_selectors_find_what_they_are_meant_for(kind: str, name: str) -> None:
    spec = named(kind, name)["spec"]
    labels = spec["template"]["metadata"]["labels"]
    assert spec["selector"]["matchLabels"] == labels == named("Service", name)["spec"]["selector"]


def test_the_first_lines_say_how_they_are_used() -> None:
    assert "kubectl apply -f examples/kubernetes/xpyd.yaml" in "".join(MANIFESTS.read_text().splitlines()[:6])

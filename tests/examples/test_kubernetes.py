"""The Kubernetes manifests agree with each other and with what the programs accept."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from vllm_pd_connector.cli import main
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.proxy.serve import add_arguments, options_of
from vllm_pd_connector.sidechannel.net.keys import load_keys

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


def flag(vllm: dict[str, Any], name: str) -> str:
    words: list[str] = vllm["command"]
    return words[words.index(name) + 1]


@pytest.mark.parametrize("name", ["pd-prefill", "pd-decode"])
def test_an_instance_may_end_what_it_has_begun_before_it_is_killed(name: str) -> None:
    vllm = container("StatefulSet", name)
    config = parse_config(json.loads(vllm["args"][-1])["kv_connector_extra_config"])
    drains = int(flag(vllm, "--shutdown-timeout"))
    assert named("StatefulSet", name)["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > drains
    assert drains > config.shutdown_timeout
    if name == "pd-prefill":
        assert config.shutdown_timeout > config.kv_lease_duration


def test_the_router_may_end_what_it_has_begun_before_it_is_killed() -> None:
    router = container("Deployment", "pd-router")
    pause = int(router["lifecycle"]["preStop"]["exec"]["command"][-1])
    grace = named("Deployment", "pd-router")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > pause + int(flag(router, "--shutdown-timeout"))


@pytest.mark.parametrize("name", ["pd-prefill", "pd-decode"])
def test_an_instance_talks_only_to_those_whose_keys_it_has(name: str, tmp_path: Path) -> None:
    """With the keys that the commands in the first lines make, mounted as a Secret is."""
    pod = named("StatefulSet", name)["spec"]["template"]["spec"]
    vllm = container("StatefulSet", name)
    config = parse_config(json.loads(vllm["args"][-1])["kv_connector_extra_config"])
    assert not config.allow_unauthenticated_peers
    [mount] = [one["name"] for one in vllm["volumeMounts"] if one["mountPath"] == config.side_channel_keys]
    [secret] = [one["secret"] for one in pod["volumes"] if one["name"] == mount]
    assert "securityContext" not in pod  # an fsGroup would add rights to the files
    words = [line.removeprefix("#   ").split() for line in MANIFESTS.read_text().splitlines() if line.startswith("#  ")]
    [keygen] = [command for command in words if command[:2] == ["vllm-pd", "keygen"]]
    keys = tmp_path / keygen[2]
    assert ["kubectl", "create", "secret", "generic", secret["secretName"], f"--from-file={keygen[2]}"] in words
    assert main(["keygen", str(keys), *keygen[3:]]) == 0
    for file in keys.iterdir():
        file.chmod(secret["defaultMode"])
    loaded = load_keys(keys)
    assert loaded.peers == {loaded.public}


def test_the_first_lines_say_how_they_are_used() -> None:
    assert "kubectl apply -f examples/kubernetes/xpyd.yaml" in "".join(MANIFESTS.read_text().splitlines()[:8])

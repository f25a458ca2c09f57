"""The Kubernetes manifests agree with each other, with the launcher, and with what the programs accept."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import shutil
import subprocess
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from examples import launch_pd, manifests
from tests.support.kustomize import CUSTOM, Object, main, named, problems, render
from vllm_pd_connector.cli import main as vllm_pd
from vllm_pd_connector.config import Config, parse_config
from vllm_pd_connector.proxy.serve import add_arguments, options_of
from vllm_pd_connector.sidechannel.net.keys import is_private, load_keys

ROOT = Path(__file__).resolve().parents[2]
DIRECTORY = ROOT / "examples" / "kubernetes"
SIDES = {"pd-prefill": "kv_producer", "pd-decode": "kv_consumer"}
FLEETS = ("1p1d", "xpyd", "llm-d")
INSTANCES = [(fleet, name) for fleet in FLEETS for name in SIDES]
ROUTED = ("1p1d", "xpyd")
KUBECTL = shutil.which("kubectl")

objects = cache(lambda fleet: render(DIRECTORY / fleet))


def one(fleet: str, kind: str, name: str) -> Object:
    [found] = [each for each in objects(fleet) if named(each) == (kind, name)]
    return found


def pod(fleet: str, kind: str, name: str) -> dict[str, Any]:
    return one(fleet, kind, name)["spec"]["template"]["spec"]


def container(fleet: str, kind: str, name: str) -> dict[str, Any]:
    [found] = pod(fleet, kind, name)["containers"]
    return found


def words(fleet: str, kind: str, name: str) -> list[str]:
    return [*container(fleet, kind, name)["command"], *container(fleet, kind, name)["args"]]


def flag(found: list[str], name: str) -> str:
    return found[found.index(name) + 1]


def transfer(found: list[str]) -> dict[str, Any]:
    return json.loads(flag(found, "--kv-transfer-config"))


def config(fleet: str, name: str) -> Config:
    return parse_config(transfer(words(fleet, "StatefulSet", name))["kv_connector_extra_config"])


# -- the tools --------------------------------------------------------------------------------------------------------


def test_kubernetes_takes_every_object(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(DIRECTORY) == 0, capsys.readouterr().err


@pytest.mark.parametrize(
    "change",
    [{"replicas": "2"}, {"replica": 2}, {"template": {"spec": {"containers": [{"name": "vllm", "imag": "x"}]}}}],
    ids=str,
)
def test_what_kubernetes_would_not_take_is_found(change: dict[str, Any]) -> None:
    good = one("1p1d", "StatefulSet", "pd-prefill")
    assert not problems(good)
    assert problems({**good, "spec": {**good["spec"], **change}})


def test_only_kinds_that_others_bring_are_not_validated() -> None:
    kinds = {each["kind"] for fleet in (*FLEETS, "monitoring") for each in objects(fleet)}
    assert kinds & CUSTOM == {"PodMonitor", "PrometheusRule"}


def test_replicas_and_patches_are_rendered_by_the_reference(tmp_path: Path) -> None:
    """Entries with names are merged by name, any other list is replaced."""
    one = {"kind": "Deployment", "metadata": {"name": "a"}}
    spec = {"replicas": 1, "args": ["x", "y"], "containers": [{"name": "c", "image": "i", "args": ["z"]}]}
    patch = {"args": ["w"], "containers": [{"name": "c", "args": []}, {"name": "d"}]}
    files = {
        "a.yaml": {**one, "spec": spec},
        "patch.yaml": {**one, "spec": patch},
        "kustomization.yaml": {
            "resources": ["a.yaml"], "patches": [{"path": "patch.yaml"}], "replicas": [{"name": "a", "count": 2}]
        },
    }  # fmt: skip
    for name, said in files.items():
        (tmp_path / name).write_text(yaml.safe_dump(said))
    containers = [{"name": "c", "image": "i", "args": []}, {"name": "d"}]
    assert render(tmp_path) == [{**one, "spec": {"replicas": 2, "args": ["w"], "containers": containers}}]


@pytest.mark.skipif(KUBECTL is None, reason="kubectl is not installed, which renders the manifests a second way")
@pytest.mark.parametrize("fleet", [*FLEETS, "monitoring"])
def test_kubectl_renders_what_is_tested(fleet: str) -> None:
    done = subprocess.run([str(KUBECTL), "kustomize", DIRECTORY / fleet], capture_output=True, text=True, check=True)
    theirs = {named(each): each for each in yaml.safe_load_all(done.stdout)}
    assert theirs == {named(each): each for each in objects(fleet)}


# -- instances --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fleet", "name"), INSTANCES)
def test_an_instance_has_its_role_and_advertises_its_pod(fleet: str, name: str) -> None:
    vllm = container(fleet, "StatefulSet", name)
    assert transfer(words(fleet, "StatefulSet", name))["kv_role"] == SIDES[name]
    host, port = config(fleet, name).side_channel(0, {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.1.2.3"})
    assert (host, port) == ("10.1.2.3", next(p["containerPort"] for p in vllm["ports"] if p["name"] == "side-channel"))
    assert vllm["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"


@pytest.mark.parametrize(("fleet", "name"), INSTANCES)
def test_an_instance_is_started_as_the_launcher_starts_it(fleet: str, name: str) -> None:
    """Both from one table, of which no word is written down again."""
    here, there = words(fleet, "StatefulSet", name), launched(name.removeprefix("pd-") + "-0")
    ours, theirs = transfer(here), transfer(there)
    extra, extra_there = (whole.pop("kv_connector_extra_config") for whole in (ours, theirs))
    assert ours.pop("engine_id") == "$(POD_NAME)"
    assert here[:3] == there[:3] == ["vllm", "serve", "$(MODEL)"] and ours == theirs
    assert all(extra[key] == extra_there[key] for key in ("transport", "mode"))
    assert one(fleet, "ConfigMap", "pd-model")["data"]["MODEL"] == launch_pd.options_of(["--cpu"]).model


def launched(name: str) -> list[str]:
    """The words with which the launcher starts an instance."""
    instances, _ = launch_pd.specs_of(launch_pd.options_of(["--gpus", "0,1", "--model", "$(MODEL)"]))
    [spec] = [spec for spec in instances if spec.name == name]
    return list(spec.command)


def test_the_manifests_are_those_that_the_table_of_roles_gives(capsys: pytest.CaptureFixture[str]) -> None:
    assert manifests.main(["--check"]) == 0, capsys.readouterr().err


def test_a_manifest_that_was_changed_by_hand_is_found_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(DIRECTORY, tmp_path / "kubernetes")
    monkeypatch.setattr(manifests, "DIRECTORY", tmp_path / "kubernetes")
    changed = tmp_path / "kubernetes" / "decode" / "decode.yaml"
    changed.write_text(changed.read_text().replace("kv_consumer", "kv_both"))
    assert manifests.main(["--check"]) == 1 and str(changed) in capsys.readouterr().err
    assert manifests.main([]) == 0
    assert changed.read_text() == (DIRECTORY / "decode" / "decode.yaml").read_text()


def test_an_instance_that_a_change_of_the_table_reaches_is_in_no_file_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A role's words are in the files that are written from the table, and in no other."""
    written = manifests.files()
    for path in DIRECTORY.rglob("*.yaml"):
        if path not in written:
            assert "kv_role" not in path.read_text() and "[vllm" not in path.read_text(), path
    monkeypatch.setattr(manifests, "DECODE", dataclasses.replace(manifests.DECODE, kv_role="kv_both"))
    changed = {path for path, text in manifests.files().items() if text != written[path]}
    assert changed == {DIRECTORY / "decode" / "decode.yaml", DIRECTORY / "llm-d" / "decode.yaml"}


def test_a_decode_instance_of_llm_d_differs_by_what_the_sidecar_needs_alone() -> None:
    ours, theirs = (words(fleet, "StatefulSet", "pd-decode") for fleet in ("1p1d", "llm-d"))
    assert [pair for pair in zip(ours, theirs, strict=True) if pair[0] != pair[1]] == [("8000", "8200")]
    spec = pod("llm-d", "StatefulSet", "pd-decode")
    [sidecar] = spec["initContainers"]
    assert sidecar["restartPolicy"] == "Always" and "--kv-connector=nixlv2" in sidecar["args"]
    assert {**spec, "initContainers": 0, "containers": 0} == {
        **pod("1p1d", "StatefulSet", "pd-decode"),
        "initContainers": 0,
        "containers": 0,
    }
    servers = chart_values()["modelServers"]
    for name in SIDES:
        labels = one("llm-d", "StatefulSet", name)["spec"]["template"]["metadata"]["labels"]
        assert servers["matchLabels"].items() <= labels.items()
        assert labels["llm-d.ai/role"] == name.removeprefix("pd-")
    assert {f"--port={target['number']}" for target in servers["targetPorts"]} <= set(sidecar["args"])


def chart_values() -> dict[str, Any]:
    values: dict[str, Any] = yaml.safe_load((DIRECTORY / "llm-d" / "values.yaml").read_text())["router"]
    return values


def test_the_chart_of_llm_d_takes_the_plugins_and_makes_the_pool() -> None:
    """Its values are these and a file; an object of ours that it makes, too, would be refused."""
    file = chart_values()["epp"]["pluginsConfigFile"]
    command = (ROOT / "docs" / "engines" / "llm-d.md").read_text()
    key = file.replace(".", r"\.")
    assert f"'router.epp.pluginsCustomConfig.{key}=examples/kubernetes/llm-d/{file}'" in command
    plugins = yaml.safe_load((DIRECTORY / "llm-d" / file).read_text())
    known = {plugin.get("name", plugin["type"]) for plugin in plugins["plugins"]}
    for profile in plugins["schedulingProfiles"]:
        assert {plugin["pluginRef"] for plugin in profile["plugins"]} <= known
    assert not {each["kind"] for each in objects("llm-d")} & {"InferencePool", "EndpointPickerConfig"}


@pytest.mark.parametrize(("fleet", "name"), INSTANCES)
def test_selectors_find_what_they_are_meant_for(fleet: str, name: str) -> None:
    spec = one(fleet, "StatefulSet", name)["spec"]
    labels = spec["template"]["metadata"]["labels"]
    selected = spec["selector"]["matchLabels"]
    assert selected == one(fleet, "Service", name)["spec"]["selector"] and selected.items() <= labels.items()
    budget = one(fleet, "PodDisruptionBudget", name)["spec"]
    assert budget["selector"]["matchLabels"] == selected and budget["maxUnavailable"] == 1


@pytest.mark.parametrize(("fleet", "name"), INSTANCES)
def test_an_instance_is_ready_when_it_can_serve(fleet: str, name: str) -> None:
    vllm = container(fleet, "StatefulSet", name)
    port = next(p["containerPort"] for p in vllm["ports"] if p["name"] == "http")
    assert flag(vllm["command"], "--port") == str(port)
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert vllm[probe]["httpGet"] == {"path": "/health", "port": "http"}
        assert vllm[probe]["timeoutSeconds"] >= 10


@pytest.mark.parametrize(("fleet", "name"), INSTANCES)
def test_an_instance_that_is_restarted_has_the_same_engine_id(fleet: str, name: str) -> None:
    [variable] = [each for each in container(fleet, "StatefulSet", name)["env"] if each["name"] == "POD_NAME"]
    assert variable["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert transfer(words(fleet, "StatefulSet", name))["engine_id"] == "$(POD_NAME)"


@pytest.mark.parametrize(("fleet", "name"), INSTANCES)
def test_an_instance_may_end_what_it_has_begun_before_it_is_killed(fleet: str, name: str) -> None:
    drains = int(flag(words(fleet, "StatefulSet", name), "--shutdown-timeout"))
    pause = int(container(fleet, "StatefulSet", name)["lifecycle"]["preStop"]["exec"]["command"][-1])
    own = config(fleet, name)
    grace = pod(fleet, "StatefulSet", name)["terminationGracePeriodSeconds"]
    assert grace > pause + drains
    answers = drains - (own.shutdown_timeout if name == "pd-prefill" else 0)  # vLLM has one time for both
    assert answers >= 90
    if name == "pd-prefill":
        assert own.shutdown_timeout > own.kv_lease_duration


@pytest.mark.parametrize(("fleet", "name"), INSTANCES)
def test_an_instance_that_is_not_root_reads_its_keys_and_talks_to_those_alone(
    fleet: str, name: str, tmp_path: Path
) -> None:
    """With the keys that the commands in the first lines make, mounted as a Secret is for a pod with fsGroup."""
    spec, own = pod(fleet, "StatefulSet", name), config(fleet, name)
    context = spec["securityContext"]
    assert context["runAsNonRoot"] and context["runAsUser"] != 0 and context["fsGroup"] == context["runAsGroup"]
    assert not own.allow_unauthenticated_peers
    [vllm] = spec["containers"]
    assert vllm["securityContext"] == {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    [mount] = [each["name"] for each in vllm["volumeMounts"] if each["mountPath"] == own.side_channel_keys]
    [secret] = [each["secret"] for each in spec["volumes"] if each["name"] == mount]
    comments = (DIRECTORY / "1p1d" / "kustomization.yaml").read_text().splitlines()
    commands = [line.removeprefix("#   ").split() for line in comments if line.startswith("#  ")]
    [keygen] = [command for command in commands if command[:2] == ["vllm-pd", "keygen"]]
    keys = tmp_path / keygen[2]
    assert ["kubectl", "create", "secret", "generic", secret["secretName"], f"--from-file={keygen[2]}"] in commands
    assert vllm_pd(["keygen", str(keys), *keygen[3:]]) == 0
    # The files are root's; the group may read them, because the pod has one of its own.
    mounted = secret["defaultMode"] | 0o040
    assert is_private(mounted, 0)
    for file in keys.iterdir():
        file.chmod(mounted if os.getuid() == 0 else 0o400)
    loaded = load_keys(keys)
    assert loaded.peers == {loaded.public}


@pytest.mark.parametrize(("fleet", "name"), INSTANCES)
def test_what_is_downloaded_and_compiled_is_kept(fleet: str, name: str) -> None:
    vllm = container(fleet, "StatefulSet", name)
    [claim] = one(fleet, "StatefulSet", name)["spec"]["volumeClaimTemplates"]
    [path] = [each["mountPath"] for each in vllm["volumeMounts"] if each["name"] == claim["metadata"]["name"]]
    data = one(fleet, "ConfigMap", "pd-model")["data"]
    assert Path(data["HOME"]).is_relative_to(path) and Path(data["HF_HOME"]).is_relative_to(path)
    [token] = [each for each in vllm["env"] if each["name"] == "HF_TOKEN"]
    assert token["valueFrom"]["secretKeyRef"]["optional"] and {"requests", "limits"} <= vllm["resources"].keys()


# -- the router, the network, the metrics ------------------------------------------------------------------------------


@pytest.mark.parametrize("fleet", ROUTED)
def test_the_router_is_told_of_every_instance_under_the_name_that_it_gets(fleet: str) -> None:
    found = words(fleet, "Deployment", "pd-router")
    assert found[:2] == ["vllm-pd", "proxy"]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    names = []
    for name in SIDES:
        spec = one(fleet, "StatefulSet", name)["spec"]
        [port] = one(fleet, "Service", spec["serviceName"])["spec"]["ports"]
        names += [f"http://{name}-{i}.{spec['serviceName']}:{port['port']}" for i in range(spec["replicas"])]
    assert options_of(parser.parse_args(found[2:])).instances == names
    assert len(names) == {"1p1d": 2, "xpyd": 4}[fleet]


def test_the_router_may_end_what_it_has_begun_before_it_is_killed() -> None:
    router = container("1p1d", "Deployment", "pd-router")
    pause = int(router["lifecycle"]["preStop"]["exec"]["command"][-1])
    grace = pod("1p1d", "Deployment", "pd-router")["terminationGracePeriodSeconds"]
    assert grace > pause + int(flag(router["command"], "--shutdown-timeout"))
    assert router["readinessProbe"]["httpGet"]["path"] == "/health"


def test_the_routers_operators_are_on_loopback() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    router = parser.parse_args(words("1p1d", "Deployment", "pd-router")[2:])
    assert (router.admin_host, router.admin_port) == ("127.0.0.1", 8001)
    assert [port["containerPort"] for port in container("1p1d", "Deployment", "pd-router")["ports"]] == [router.port]
    assert f"port-forward deployment/pd-router {router.admin_port}" in (ROOT / "docs" / "kubernetes.md").read_text()


def test_strangers_reach_no_port_of_an_instance_and_prometheus_its_metrics() -> None:
    policy = one("1p1d", "NetworkPolicy", "pd-instances")["spec"]
    ours, readers = policy["ingress"]
    assert ours == {"from": [{"podSelector": {"matchLabels": {"app": "pd"}}}]}
    assert readers["ports"] == [{"port": "http"}]
    monitor = one("monitoring", "PodMonitor", "pd")
    assert monitor["spec"]["podMetricsEndpoints"][0]["port"] == "http"
    [label] = readers["from"][0]["namespaceSelector"]["matchLabels"].items()
    first_lines = (DIRECTORY / "monitoring" / "kustomization.yaml").read_text()
    assert f"kubectl label namespace monitoring {'='.join(label)}" in first_lines


def test_the_operators_alerts_are_those_of_the_file() -> None:
    rules = yaml.safe_load((ROOT / "deploy" / "prometheus" / "rules.yaml").read_text())
    rule, monitor = (one("monitoring", kind, "pd") for kind in ("PrometheusRule", "PodMonitor"))
    assert rule["spec"] == rules
    assert rule["metadata"]["labels"] == monitor["metadata"]["labels"], "one Prometheus selects both"


def test_alerts_name_pods() -> None:
    [endpoint] = one("monitoring", "PodMonitor", "pd")["spec"]["podMetricsEndpoints"]
    [relabeled] = [each for each in endpoint["relabelings"] if each["targetLabel"] == "instance"]
    assert "__meta_kubernetes_pod_name" in relabeled["sourceLabels"]


def test_who_may_change_weights_has_a_label_of_its_own() -> None:
    readers = one("1p1d", "NetworkPolicy", "pd-instances")["spec"]
    operators = one("1p1d", "NetworkPolicy", "pd-operator")["spec"]
    assert operators["podSelector"] == readers["podSelector"]
    label = {"matchLabels": {"pd-operator": "allowed"}}
    assert operators["ingress"] == [{"from": [{"podSelector": label}, {"namespaceSelector": label}]}]
    assert "pd-operator=allowed" in (ROOT / "docs" / "kubernetes.md").read_text()


# -- images ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["cpu", "cuda"])
def test_an_image_is_made_of_what_is_there_and_runs_as_the_pods_user(name: str) -> None:
    lines = (ROOT / "docker" / f"Dockerfile.{name}").read_text().replace("\\\n", " ").splitlines()
    for line in lines:
        if line.startswith("COPY "):
            assert all((ROOT / source).exists() for source in line.split()[1:-1]), line
    user = pod("1p1d", "StatefulSet", "pd-prefill")["securityContext"]["runAsUser"]
    assert [line for line in lines if line.startswith("USER ")] == [f"USER {user}:{user}"], "the keys are its group's"
    assert re.search(rf"^RUN .*useradd .*--uid {user}\b", "\n".join(lines), re.MULTILINE)
    if name == "cuda":  # vLLM's image has that user
        assert re.search(rf"getent passwd {user} \|\| useradd", "\n".join(lines))


def test_the_image_has_the_extras_that_are_asked_for() -> None:
    dockerfile, page = ((ROOT / name).read_text() for name in ("docker/Dockerfile.cuda", "docs/containers.md"))
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.findall(r"EXTRAS=([\w,-]+)", dockerfile + page)
    assert len(asked) >= 3 and {extra for each in asked for extra in each.split(",")} <= set(known)
    assert '"/src[${EXTRAS}]"' in dockerfile and "\nARG EXTRAS=" in dockerfile.partition("\nFROM ")[2]


def test_the_image_without_a_gpu_has_what_the_tests_set_up() -> None:
    text = (ROOT / "docker" / "Dockerfile.cpu").read_text()
    assert re.search(r"^RUN .*\bpython tools/setup_env.py --plain\b", text, re.MULTILINE)
    from tools.setup_env import SUPPORTED_PYTHONS

    version = re.search(r"^FROM python:(\d+)\.(\d+)-slim", text, re.MULTILINE)
    assert version and SUPPORTED_PYTHONS[0] <= (int(version[1]), int(version[2])) < SUPPORTED_PYTHONS[1]


@pytest.mark.parametrize("fleet", FLEETS)
def test_the_first_lines_say_how_a_fleet_is_started(fleet: str) -> None:
    assert f"kubectl apply -k examples/kubernetes/{fleet}" in (DIRECTORY / fleet / "kustomization.yaml").read_text()

"""`vllm-pd check-config` and `migrate`."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.support import ports
from tests.support.check_config import checked, several, transfer
from vllm_pd_connector.checks import document_problems, early_problems
from vllm_pd_connector.cli import main
from vllm_pd_connector.cli.output import Exit
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.in_tree import CONNECTORS, KEYS, STORES, migrate

ELSEWHERE = "203.0.113.9"


@pytest.fixture(autouse=True)
def free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default port may be another's on this machine."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(ports.free_port()))


@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_a_good_one_is_good(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(transfer(transport=transport, transport_options={}), capsys) == []


@pytest.mark.parametrize("mode", ["pull", "push", "auto"])
def test_a_decode_instance_over_mooncake_may_keep_conversations(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = transfer(transport="mooncake", mode=mode, conversations=True)
    assert checked(document | {"kv_role": "kv_consumer"}, capsys) == []


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (transfer(mode="pulll"), "mode is 'pulll': it must be one of pull, push, auto"),
        (transfer(mod="pull"), "'mod' is not a key; did you mean mode?"),
        (transfer(kv_lease_duration="3"), "kv_lease_duration is '3': Expected `float`, got `str`"),
        (transfer(side_channel_host="203.0.113.9"), "other hosts, and side_channel_keys is not set"),
        (transfer(side_channel_host="203.0.113.9", allow_unauthenticated_peers=True), "is no address of this machine"),
        (transfer(side_channel_port=70000), "is outside 1..65535"),
        (transfer(side_channel_keys="/nowhere"), "side_channel_keys: /nowhere: No such file"),
        (transfer(params_secret="/nowhere"), "No such file"),
        (transfer(trace_dir="/dev/null"), "trace_dir: /dev/null is no directory"),
        (transfer(transport="nixel"), "'nixel' is unknown, choose one of mooncake, nixl"),
        (transfer(transport_options={"ucx": {"NET_DEVICES": "a,b"}}), "of which NIXL would take 'a' alone"),
        (transfer(transport_options={"ucs": {}}), "unknown field `ucs`"),
        (transfer(transport_options={"ucx": {"UCX_NET_DEVICES": "x"}}), "without the prefix, as NET_DEVICES"),
        (transfer(transport_options={"batch_bytes": 0}), "transport_options.batch_bytes is 0: it must be at least 1"),
        (transfer(transport_options={"progress_interval_us": -1}), "progress_interval_us is -1: it must be at least 1"),
        (transfer() | {"engine_id": 5}, "engine_id is 5: it must be a string"),
        (transfer() | {"engine_id": ""}, "engine_id has 0 characters: it must be a string of 1 to 500"),
        (transfer() | {"engine_id": "x" * 501}, "engine_id has 501 characters: it must be a string of 1 to 500"),
        (transfer() | {"engine_id": "$(POD_NAME)"}, "engine_id is '$(POD_NAME)': nothing was put in the place of the"),
        (transfer() | {"engine_id": "p-${HOSTNAME}"}, "engine_id is 'p-${HOSTNAME}': nothing was put in the place of"),
        (transfer(side_channel_host=""), "side_channel_host: '' is no address that others could be told"),
        (transfer() | {"kv_connector_extra_config": None}, "kv_connector_extra_config is None: it must be an object"),
        (several({"kv_connector": "OffloadingConnector"}, transfer()), "PDConnector is number 2; name it first"),
        (several(transfer(), transfer()), "PDConnector is there 2 times"),
        (transfer(transport="mooncake", transport_options={"address": "203.0.113.9"}), "no address of this machine"),
        (transfer(backends=["UCX"]), "backends is a key of NixlConnector"),
        (transfer() | {"kv_role": "producer"}, "kv_role is 'producer': it must be one of kv_producer, kv_consumer"),
        (transfer() | {"kv_rol": "kv_both"}, "'kv_rol' is not a key; did you mean kv_role?"),
        (transfer() | {"mode": "push"}, "mode: it belongs into kv_connector_extra_config"),
        (transfer() | {"kv_port": "x"}, "kv_port is 'x': vLLM takes int; leave it out, it does nothing here"),
        (transfer() | {"kv_connector": "NixlConnector"}, "`vllm-pd migrate` says it in PDConnector's"),
        (transfer() | {"kv_connector": ["x"]}, "kv_connector is ['x']: PDConnector is not there"),
        (several() | {"kv_connector_extra_config": {"connectors": 5}}, "PDConnector is not there"),
        (several(transfer() | {"kv_role": "both"}), "kv_role is 'both': it must be one of kv_producer, kv_consumer"),
        (several({"kv_connector": "PDConnector"}), "kv_role is None: it must be one of"),
        (transfer(params_secret="a\0b"), "params_secret: 'a\\x00b': embedded null byte"),
        (transfer(side_channel_keys="a\0b"), "side_channel_keys: "),
        (transfer(mode="push", side_channel_port=7011, bootstrap_port=7011), "bootstrap_port is 7011: the side"),
        ([], "it must be an object"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line(document: object, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    problems = checked(document, capsys)
    assert [problem for problem in problems if words in problem], problems


@pytest.mark.parametrize("chosen", ["", "lora_resolver", "pd_connector,x"])
@pytest.mark.parametrize("multi", [False, True])
def test_plugins_without_ours_are_a_mistake(chosen: str, multi: bool) -> None:
    own = transfer(side_channel_port=ports.free_port())
    document = several(own) if multi else own
    assert document_problems(document, {}) == []
    found = document_problems(document, {"VLLM_PLUGINS": chosen})
    words = f"VLLM_PLUGINS is {chosen!r}, without pd_connector, which makes PDConnector known to vLLM"
    assert [problem.startswith(words) for problem in found] == [True] * ("pd_connector" not in chosen)


def test_ids_of_requests_as_they_come_are_a_mistake_here_as_for_an_instance() -> None:
    document = transfer(side_channel_port=ports.free_port())
    assert document_problems(document, {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "0"}) == []
    [problem] = document_problems(document, {"VLLM_DISABLE_REQUEST_ID_RANDOMIZATION": "1"})
    assert "requests of one id would be taken for one another" in problem


@pytest.mark.parametrize(
    ("host", "extra", "words"),
    [
        (ELSEWHERE, {}, f" {ELSEWHERE} can be reached from other hosts"),
        (ELSEWHERE, {"allow_unauthenticated_peers": True}, f" {ELSEWHERE!r} is no address of this machine"),
        ("a b", {}, ": 'a b' is no address that others could be told"),
        ("127.0.0.1", {}, " or side_channel_port"),
    ],
)
def test_a_host_of_the_environment_is_told_with_its_variable(host: str, extra: dict[str, Any], words: str) -> None:
    """Launch scripts set it, and the configuration has no such key."""
    name = "VLLM_NIXL_SIDE_CHANNEL_HOST"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        extra = extra | {"side_channel_port": taken.getsockname()[1]}
        [of_environment] = document_problems(transfer(**extra), {name: host})
        [of_key] = document_problems(transfer(side_channel_host=host, **extra), {name: "elsewhere"})
    assert f"side_channel_host ({name}){words}" in of_environment
    assert f"side_channel_host{words}" in of_key


def test_all_mistakes_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    wrong = transfer(params_secret="/nowhere", side_channel_host="203.0.113.9", transport_options={"ucs": {}})
    assert len(checked(wrong, capsys)) == 3


def test_a_taken_port_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        [problem] = checked(transfer(side_channel_port=port), capsys)
        assert f"cannot listen on host '127.0.0.1' port {port}" in problem
        assert checked(transfer(side_channel_port=port) | {"kv_role": "kv_consumer"}, capsys) == []
        [problem] = checked(transfer(mode="push", bootstrap_port=port), capsys)
        assert f"bootstrap_port: cannot listen on 127.0.0.1 port {port}" in problem


def test_one_beside_other_connectors_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    document = several(transfer(mode="x"), {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"})
    [problem] = checked(document, capsys)
    assert problem == "connectors[0].kv_connector_extra_config: mode is 'x': it must be one of pull, push, auto"
    [problem] = checked(several({"kv_connector": "PDConnector"}), capsys)
    assert problem.startswith("connectors[0].kv_role is None"), "not the MultiConnector's own"
    assert early_problems(document)[0].startswith("connectors[0].kv_connector_extra_config: mode is 'x'")


@pytest.mark.parametrize("transport", ["nixl", "mooncake"])
def test_one_beside_other_connectors_has_its_own_role(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    alone = transfer(side_channel_host=ELSEWHERE, transport=transport) | {"kv_role": "kv_consumer"}
    if transport == "mooncake":
        alone["kv_connector_extra_config"]["transport_options"] = {"address": "127.0.0.1"}
    assert checked(alone, capsys) == checked(several(alone), capsys) == []
    assert checked(several(alone | {"kv_role": "kv_both"}), capsys) != []


DYNAMO = {"kv_connector": "NixlConnector", "kv_connector_module_path": "vllm_pd_connector.integrations.dynamo"}


def test_one_under_dynamo_s_name_is_checked_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(transfer() | DYNAMO, capsys) == []
    [problem] = checked(transfer(side_chanel_host="x") | DYNAMO, capsys)
    assert "did you mean side_channel_host?" in problem
    [problem] = early_problems(transfer(side_chanel_host="x") | DYNAMO)
    assert "did you mean side_channel_host?" in problem
    assert main(["migrate", json.dumps(transfer() | DYNAMO)]) == Exit.REFUSED
    assert "this is PDConnector already" in capsys.readouterr().err


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Tests may run as a user who may write anywhere."""
    wanted = transfer(trace_dir=str(tmp_path / "new" / "trace"))
    assert checked(wanted, capsys) == []
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    [problem] = checked(wanted, capsys)
    assert "trace cannot be made" in problem and f"may not write into {tmp_path}" in problem


def test_a_consumer_that_keeps_conversations_listens(capsys: pytest.CaptureFixture[str]) -> None:
    consumer = transfer(side_channel_host=ELSEWHERE, conversations=True) | {"kv_role": "kv_consumer"}
    [problem] = checked(consumer, capsys)
    assert "other hosts, and side_channel_keys is not set" in problem


def test_a_file_is_read_and_what_is_no_json_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "good.json").write_text(json.dumps(transfer()))
    assert main(["check-config", str(tmp_path / "good.json")]) == Exit.OK
    for bad in ("{", str(tmp_path / "absent"), "[" * 100_000):
        assert main(["check-config", bad]) == Exit.UNREADABLE
    assert len(capsys.readouterr().err.splitlines()) == 3


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
@pytest.mark.parametrize("name", CONNECTORS)
def test_what_is_migrated_is_taken(name: str, role: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = {"kv_connector": name, "kv_role": role, "kv_buffer_device": "cpu"}
    assert main(["migrate", json.dumps(given), "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert checked(found["config"], capsys) == []
    assert [one["key"] for one in found["dropped"]] == ["kv_buffer_device"]


GIVEN: dict[str, Any] = {
    "backends": ["LIBFABRIC"], "num_threads": 4, "engine_ttl": 10.0, "enforce_handshake_compat": False,
    "bidirectional_kv_xfer": True, "kv_recompute_threshold": 64, "decoder_kv_blocks_ttl": 480,
    "push_registration_timeout": 60, "mooncake_protocol": "tcp", "device_name": "mlx5_0", "num_workers": 10,
    "bootstrap_server_address": "10.0.0.7:9000",
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_each_of_their_keys_is_carried_over_or_named(key: str) -> None:
    whose, line = KEYS[key]
    found = migrate({"kv_connector": whose, "kv_role": "kv_consumer", "kv_connector_extra_config": {key: GIVEN[key]}})
    extra = found.config["kv_connector_extra_config"]
    parse_config(extra)
    carried = extra != CONNECTORS[whose]
    assert carried != (key in dict(found.dropped))
    assert carried != line.startswith("no counterpart")


@pytest.mark.parametrize("key", ["kv_lease_duration", "push_registration_timeout"])
def test_a_lease_that_is_longer_than_our_limit_moves_that(key: str) -> None:
    given = {"kv_connector": "NixlConnector", "kv_role": "kv_producer", "kv_connector_extra_config": {key: 900.0}}
    extra = migrate(given).config["kv_connector_extra_config"]
    assert extra["kv_lease_duration"] == extra["kv_lease_limit"] == 900.0
    parse_config(extra)


def test_what_a_key_becomes() -> None:
    def extra(name: str, **given: Any) -> dict[str, Any]:
        found = migrate({"kv_connector": name, "kv_role": "kv_producer", "kv_connector_extra_config": given})
        return dict(found.config["kv_connector_extra_config"])

    for times in ({"kv_lease_duration": 30, "push_registration_timeout": 480}, {"push_registration_timeout": 480}):
        for order in (times, dict(reversed(times.items()))):
            assert extra("NixlConnector", **order)["kv_lease_duration"] == 480, "which covers both"
    assert extra("NixlConnector", push_registration_timeout=5)["kv_lease_duration"] == 30, "their own lease is as long"
    for order in ({"kv_lease_duration": 20}, {"push_registration_timeout": 5, "kv_lease_duration": 20}):
        assert extra("NixlConnector", **order)["kv_lease_duration"] == 20
    assert extra("MooncakeConnector", mooncake_protocol="efa")["transport_options"] == {"protocol": "efa"}
    assert extra("NixlConnector", backends=["UCX"], kv_lease_duration=20) == {
        "transport": "nixl", "mode": "pull", "kv_lease_duration": 20
    }  # fmt: skip
    assert extra("MooncakeConnector", mooncake_protocol="tcp", device_name="mlx5_0") == {
        "transport": "mooncake", "mode": "push", "bootstrap_port": 8998,
        "transport_options": {"protocol": "tcp", "device": "mlx5_0"},
    }  # fmt: skip
    assert extra("MooncakeConnector", bootstrap_server_address="[::1]:9000")["bootstrap_port"] == 9000
    theirs = {"kv_connector": "MooncakeConnector", "kv_role": "kv_producer"}
    set_there = migrate(theirs, {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "9000"}).config["kv_connector_extra_config"]
    assert "bootstrap_port" not in set_there, "it would come before the variable"
    notes = migrate(theirs | {"kv_connector_extra_config": {"bootstrap_server_address": "10.0.0.7:9000"}}).notes
    assert [note for note in notes if "its host has no counterpart" in note]
    assert extra("NixlConnector", bidirectional_kv_xfer=True, decoder_kv_blocks_ttl=480) == {
        "transport": "nixl", "mode": "pull", "conversations": True, "conversation_lease": 480
    }  # fmt: skip
    assert "conversations" not in extra("NixlConnector", bidirectional_kv_xfer=False)


def test_of_several_connectors_the_one_of_vllm_s_is_migrated(capsys: pytest.CaptureFixture[str]) -> None:
    store = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": {"n": 1}}
    theirs = {
        "kv_connector": "NixlConnector", "kv_role": "kv_producer", "engine_id": "inner",
        "kv_connector_extra_config": {"num_threads": 4, "kv_lease_duration": 20},
    }  # fmt: skip
    given = several(store, theirs) | {"engine_id": "e", "kv_load_failure_policy": "recompute"}
    assert main(["migrate", json.dumps(given), "--json"]) == Exit.OK
    found = json.loads(capsys.readouterr().out)
    assert checked(found["config"], capsys) == []
    extra = {"transport": "nixl", "mode": "pull", "kv_lease_duration": 20}
    ours = {"kv_connector": "PDConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    assert found["config"] == given | {"kv_connector_extra_config": {"connectors": [ours, store]}}
    assert [one["key"] for one in found["dropped"]] == ["num_threads", "engine_id"]
    assert "NixlConnector was number 2 of the connectors: PDConnector comes first" in found["notes"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"kv_connector": "LMCacheConnectorV1"}, "behind PDConnector in a MultiConnector (docs/multi-connector.md)"),
        ({"kv_connector": "MoRIIOConnector"}, "write PDConnector's configuration anew (docs/quickstart.md)"),
        ({"kv_connector": "P2pNcclConnector"}, "in the place of its proxy"),
        ({"kv_connector": "NoneSuch"}, "one of NixlConnector, NixlPullConnector"),
        (several({"kv_connector": "OffloadingConnector"}), "['OffloadingConnector']: one of them, and no more"),
        (several({"kv_connector": "NixlConnector"}, {"kv_connector": "MooncakeConnector"}), "and no more, must be of"),
        (several({"kv_connector": ["x"]}), "one of them, and no more"),
        (several(5), "connectors is [5]: it must be a list of objects"),
        ({"kv_connector": "MultiConnector"}, "connectors is None: it must be a list of objects"),
    ],
)
def test_what_has_no_counterpart_is_told_what_to_do(
    given: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["migrate", json.dumps(given)]) == Exit.REFUSED
    assert words in capsys.readouterr().err


def test_the_stores_are_vllm_s() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert set(STORES) <= set(KVConnectorFactory._registry)


@pytest.mark.parametrize(
    "given",
    [
        {"kv_connector": "LMCacheMPConnector"},
        {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": ["UCX", "GDS"]}},
        {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": "UCX"}},
        {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"bidirectional_kv_xfer": "yes"}},
        {"kv_connector": "MooncakeConnector", "kv_connector_extra_config": {"mooncake_protocol": "ascend"}},
        {"kv_connector": "MooncakeConnector", "kv_connector_extra_config": {"bootstrap_server_address": "host"}},
    ],
)
def test_what_cannot_be_said_here_is_refused(given: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["migrate", json.dumps(given)]) == Exit.REFUSED
    assert len(capsys.readouterr().err.splitlines()) == 1

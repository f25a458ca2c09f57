"""What `vllm-pd check-config` notes of settings with which an instance starts all the same."""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import pytest

from tests.support import ports
from tests.support.check_config import checked, noted, several, transfer
from vllm_pd_connector.checks import document_notes, early_port_problems
from vllm_pd_connector.cli import main
from vllm_pd_connector.cli.output import Exit


@pytest.fixture(autouse=True)
def free_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """The default port may be another's on this machine, and vLLM need not be here."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(ports.free_port()))
    monkeypatch.setattr("vllm_pd_connector.cli.settings.find_spec", lambda _: object())


def test_a_command_that_is_not_in_vllm_s_environment_is_noted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What it says of libraries and plugins is of its own."""
    assert noted(transfer(), capsys) == []
    monkeypatch.setattr("vllm_pd_connector.cli.settings.find_spec", lambda _: None)
    [note] = noted(transfer(), capsys)
    assert note.startswith(f"vLLM is not installed in {sys.prefix}")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"])
def test_memory_that_moves_is_noted_since_a_flag_may_keep_the_caches_out_of_it(name: str) -> None:
    assert document_notes(transfer(), {name: "backend:native"}) == []
    [note] = document_notes(transfer(), {name: "expandable_segments:True"})
    assert note.startswith(f"{name} has expandable_segments:True") and "--enable-cumem-allocator" in note


def test_a_connector_that_is_found_without_our_plugin_is_noted() -> None:
    document = transfer() | {"kv_connector_module_path": "vllm_pd_connector.connector"}
    assert document_notes(document, {"VLLM_PLUGINS": "other,pd_connector"}) == []
    [note] = document_notes(document, {"VLLM_PLUGINS": "other"})
    assert note.startswith("VLLM_PLUGINS is 'other', without pd_connector: kv_connector_module_path")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("kv_buffer_device", "cpu", "no counterpart: bytes move between the caches where they lie"),
        ("kv_port", 14579, "side_channel_port in kv_connector_extra_config"),
        ("enable_permute_local_kv", True, "no counterpart: unequal layouts are converted"),
    ],
)
def test_a_key_that_vllm_takes_and_that_does_nothing_here_is_noted(
    key: str, value: object, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An instance starts with it."""
    from vllm.config import KVTransferConfig

    document = transfer() | {key: value}
    KVTransferConfig(**document)
    [note] = noted(document, capsys)
    assert note.startswith(f"{key}: {words}")
    assert main(["check-config", json.dumps(document)]) == Exit.OK
    assert f"\nnote: {key}" in capsys.readouterr().out


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_is_everybody_s_own_is_noted(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    document = transfer(side_channel_host=host, allow_unauthenticated_peers=True)
    [note] = noted(document, capsys)
    assert note.startswith(f"side_channel_host: other instances are told {host}, which is their own host")
    [note] = document_notes(transfer(allow_unauthenticated_peers=True), {"VLLM_NIXL_SIDE_CHANNEL_HOST": host})
    assert note.startswith(f"side_channel_host (VLLM_NIXL_SIDE_CHANNEL_HOST): other instances are told {host}")
    assert noted(document | {"kv_role": "kv_consumer"}, capsys) == []
    assert noted(transfer(), capsys) == []


@pytest.mark.parametrize(
    ("role", "mode", "host", "told"),
    [
        ("kv_producer", "pull", None, True),
        ("kv_producer", "pull", "::1", True),
        ("kv_consumer", "push", None, True),
        ("kv_consumer", "pull", None, False),
        ("kv_producer", "pull", "10.0.0.7", False),
    ],
)
def test_an_address_that_this_host_alone_reaches_is_noted_where_others_are_to_come(
    role: str, mode: str, host: str | None, told: bool
) -> None:
    extra = {"mode": mode} | ({} if host is None else {"side_channel_host": host})
    document = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
    assert document_notes(document, {}) == []
    extra["allow_unauthenticated_peers"] = True
    notes = document_notes(document, {})
    words = f"side_channel_host: other instances are told {host or '127.0.0.1'}, where one on another host asks itself"
    assert [note.startswith(words) for note in notes] == [True] * told


@pytest.mark.parametrize(
    ("role", "mode", "told"),
    [("kv_producer", "pull", True), ("kv_consumer", "push", True), ("kv_both", "auto", False)],
)
def test_a_bootstrap_port_at_which_nobody_answers_is_noted(role: str, mode: str, told: bool) -> None:
    document = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": {"mode": mode}}
    assert document_notes(document, {}) == []
    notes = document_notes(document, {"VLLM_MOONCAKE_BOOTSTRAP_PORT": "8998"})
    assert [note.startswith("bootstrap_port: nobody will answer at 8998") for note in notes] == [True] * told


@pytest.mark.parametrize(
    ("role", "extra", "idle"),
    [
        ("kv_consumer", {"shutdown_timeout": 3.0, "push_when": "end", "step_timeout": 9.0}, True),
        ("kv_consumer", {"mode": "push", "shutdown_timeout": 3.0, "push_when": "end"}, True),
        ("kv_consumer", {"conversation_lease": 60.0, "conversation_share": 0.1}, True),
        ("kv_producer", {"conversations": True, "conversation_lease": 60.0}, True),
        ("kv_producer", {"push_when": "end", "step_timeout": 9.0}, True),
        ("kv_producer", {"mode": "auto", "push_when": "end", "shutdown_timeout": 3.0, "step_timeout": 9.0}, False),
        ("kv_both", {"mode": "push", "push_when": "end", "shutdown_timeout": 3.0}, False),
        ("kv_consumer", {"conversations": True, "conversation_lease": 60.0, "conversation_share": 0.1}, False),
    ],
)
def test_a_key_that_does_nothing_in_this_role_and_mode_is_noted(role: str, extra: dict[str, Any], idle: bool) -> None:
    document = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
    keys = [key for key in extra if key not in ("mode", "conversations")]
    notes = document_notes(document, {})
    assert sorted(note.partition(":")[0] for note in notes) == (sorted(keys) if idle else [])
    for note in notes:
        assert f"this is a {role} in mode {extra.get('mode', 'pull')}" in note


@pytest.mark.parametrize(
    ("role", "seconds", "told"),
    [
        ("kv_producer", None, True),
        ("kv_producer", "10", True),
        ("kv_producer", "40", False),
        ("kv_consumer", "1", False),
    ],
)
def test_a_time_for_readers_above_that_of_workers_is_noted(role: str, seconds: str | None, told: bool) -> None:
    extra = {"shutdown_timeout": 35}
    document = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
    name = "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"
    notes = [note for note in document_notes(document, {} if seconds is None else {name: seconds}) if name in note]
    assert [f"shutdown_timeout is 35, and {name} {seconds or 5}" in note for note in notes] == [True] * told


def test_a_note_and_a_taken_port_beside_other_connectors_say_where_the_entry_stands(
    capsys: pytest.CaptureFixture[str],
) -> None:
    [note] = noted(several(transfer(bootstrap_port=8998)), capsys)
    assert note.startswith("connectors[0].bootstrap_port: nobody will answer at 8998")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        document = several(transfer(side_channel_port=taken.getsockname()[1]))
        [problem] = checked(document, capsys)
        assert problem.startswith("connectors[0].side channel: cannot listen") and [problem] == early_port_problems(
            document, [0]
        )

"""kv_connector_extra_config: defaults work, mistakes stop the engine with the key's name."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from vllm_pd_connector.config import own_directory, parse_config
from vllm_pd_connector.errors import Difference, IncompatiblePeer, InvalidConfig
from vllm_pd_connector.protocol.wire.fields import Host


def test_nothing_needs_to_be_set():
    config = parse_config({})
    assert (config.transport, config.mode) == ("nixl", "pull")
    assert config.side_channel(0, {}) == ("127.0.0.1", 5600)


def test_the_environment_of_in_tree_scripts_is_understood_and_configuration_wins():
    environ = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.7", "VLLM_NIXL_SIDE_CHANNEL_PORT": "5700"}
    assert parse_config({}).side_channel(2, environ) == ("10.0.0.7", 5702)
    assert parse_config({"side_channel_host": "fd00::1", "side_channel_port": 9}).side_channel(1, environ) == (
        "fd00::1",
        10,
    )


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"kv_lease_durations": 30}, "kv_lease_durations"),
        ({"kv_lease_duration": "30"}, "kv_lease_duration"),
        ({"kv_lease_duration": 0}, "kv_lease_duration"),
        ({"kv_lease_share": 0}, "kv_lease_share"),
        ({"kv_lease_share": 1.01}, "kv_lease_share"),
        ({"transfer_timeout": 1e9}, "transfer_timeout"),
        ({"transport": "carrier-pigeon"}, "transport"),
        ({"mode": "shove"}, "mode"),
        ({"push_when": "never"}, "push_when"),
        ({"nixl_series": "yes"}, "nixl_series"),
        ({"huge_pages": True}, "huge_pages.*THP_MEM_ALLOC_ENABLE"),
        ({"transport_options": []}, "transport_options"),
    ],
)
def test_a_mistake_is_named(extra, named):
    with pytest.raises(InvalidConfig, match=named):
        parse_config(extra)


@pytest.mark.parametrize(("port", "index"), [(65535, 1), (0, 0)])
def test_a_port_that_does_not_exist_is_refused(port, index):
    with pytest.raises(InvalidConfig, match="65535"):
        parse_config({"side_channel_port": port}).side_channel(index, {})


def test_a_port_that_is_no_number_is_refused():
    with pytest.raises(InvalidConfig, match="VLLM_NIXL_SIDE_CHANNEL_PORT"):
        parse_config({}).side_channel(0, {"VLLM_NIXL_SIDE_CHANNEL_PORT": "many"})


def test_an_incompatibility_prints_every_difference_with_both_values_and_advice():
    error = IncompatiblePeer("no", [Difference("a", "1", "2", "do this"), Difference("b", "3", "4")])
    assert str(error) == "no\n  a: 1 here, 2 there — do this\n  b: 3 here, 4 there"


@pytest.mark.parametrize("package", ["vllm_pd_connector", "vllm_pd_connector.geometry", "vllm_pd_connector.protocol"])
def test_the_pure_packages_import_nothing_heavy(package):
    program = f"""
import importlib, pkgutil, sys
package = importlib.import_module({package!r})
if {package!r} != "vllm_pd_connector":
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
heavy = {{"vllm", "torch", "nixl", "mooncake", "zmq"}} & {{name.split(".")[0] for name in sys.modules}}
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        ({}, {"route_to": "127.0.0.1"}),
        ({"side_channel_host": "10.0.0.7"}, {"route_to": "10.0.0.7"}),
        ({"side_channel_host": "fd00::7"}, {"route_to": "fd00::7"}),
        ({"side_channel_host": "prefill-0.example"}, {}),
        ({"side_channel_host": "localhost"}, {"address": "127.0.0.1"}),
        ({"side_channel_host": "0.0.0.0"}, {}),
        ({"transport_options": {"address": "10.0.0.8"}}, {"address": "10.0.0.8"}),
        ({"transport_options": {"route_to": "10.0.0.9", "in_flight": 8}}, {"route_to": "10.0.0.9", "in_flight": 8}),
        ({"transport": "nixl", "allow_unauthenticated_peers": True}, {}),
        (
            {"side_channel_host": "10.0.0.7", "allow_unauthenticated_peers": True},
            {"route_to": "10.0.0.7", "allow_unauthenticated_peers": True},
        ),
    ],
)
def test_mooncake_is_reached_like_the_side_channel_unless_an_address_is_given(monkeypatch, given, settings):
    monkeypatch.delenv("VLLM_NIXL_SIDE_CHANNEL_HOST", raising=False)
    assert parse_config({"transport": "mooncake", **given}).transport_settings(prefills=True) == settings


def test_an_instance_that_only_decodes_is_at_the_default_route_unless_a_host_is_given():
    """It would be at a loopback address, which no other host can use, and which is of one version of IP."""
    environment = {"VLLM_NIXL_SIDE_CHANNEL_HOST": "10.0.0.6"}
    alone, hosted = (parse_config({"transport": "mooncake", **given}) for given in ({}, {"side_channel_host": "::1"}))
    assert alone.transport_settings(prefills=False, environ={}) == {}
    assert alone.transport_settings(prefills=False, environ=environment) == {"route_to": "10.0.0.6"}
    assert hosted.transport_settings(prefills=False, environ={}) == {"route_to": "::1"}


@pytest.mark.parametrize("mode", ["pull", "auto"])
def test_an_instance_that_keeps_conversations_is_reached_like_its_side_channel(mode):
    """It has one, which prefill instances ask before they read from it."""
    given = {"transport": "mooncake", "mode": mode, "conversations": True}
    settings = parse_config(given).transport_settings(prefills=False, environ={})
    assert settings in ({"route_to": "127.0.0.1"}, {"address": "127.0.0.1"})
    hosted = parse_config({**given, "side_channel_host": "10.0.0.7"})
    assert hosted.transport_settings(prefills=False, environ={}) == {"route_to": "10.0.0.7"}


def test_an_instance_that_only_decodes_and_is_written_into_is_at_loopback_unless_others_may_reach_it():
    def settings(**given):
        return parse_config({"transport": "mooncake", "mode": "push", **given}).transport_settings(
            prefills=False, environ={}
        )

    assert settings() == {"address": "127.0.0.1"}
    assert settings(allow_unauthenticated_peers=True) == {"allow_unauthenticated_peers": True}
    assert settings(transport_options={"route_to": "10.0.0.9"}) == {"route_to": "10.0.0.9"}


@pytest.mark.parametrize(("mode", "decode"), [("pull", False), ("push", True), ("auto", True)])
def test_a_decode_instance_that_only_reads_is_nobodys_target(mode, decode):
    config = parse_config({"mode": mode})
    assert config.is_target(prefills=True, decodes=False)
    assert config.is_target(prefills=True, decodes=True)
    assert config.is_target(prefills=False, decodes=True) is decode


@pytest.mark.parametrize(("mode", "decode"), [("pull", True), ("push", False), ("auto", True)])
def test_prefill_reads_conversations_of_decode_in_every_mode(mode, decode):
    config = parse_config({"mode": mode, "conversations": True})
    assert config.starts_transfers(prefills=True, decodes=False)
    assert config.starts_transfers(prefills=False, decodes=True) is decode
    assert config.is_target(prefills=True, decodes=False) and config.is_target(prefills=False, decodes=True)


@pytest.mark.parametrize(
    ("mode", "prefill", "decode"), [("pull", False, True), ("push", True, False), ("auto", True, True)]
)
def test_the_side_that_starts_transfers_converts(mode, prefill, decode):
    config = parse_config({"mode": mode})
    assert config.starts_transfers(prefills=True, decodes=False) is prefill
    assert config.starts_transfers(prefills=False, decodes=True) is decode
    assert config.starts_transfers(prefills=True, decodes=True)


@pytest.mark.parametrize(
    ("changes", "handoff"),
    [
        ({}, "serial"),
        ({"mode": "auto"}, "serial"),
        ({"mode": "push"}, "concurrent"),
        ({"mode": "push", "side_channel_keys": "keys"}, "serial"),
        ({"mode": "push", "params_secret": "secret"}, "serial"),
    ],
    ids=str,
)
def test_both_legs_are_sent_at_once_only_where_decode_accepts_it(changes: dict[str, str], handoff: str) -> None:
    assert parse_config(changes).handoff == handoff


def test_a_directory_of_others_is_refused(tmp_path: Path) -> None:
    own_directory("trace_dir", f"{tmp_path}/absent")
    own_directory("trace_dir", f"{tmp_path}/made", make=True)
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700
    (tmp_path / "file").touch()
    for make in (False, True):
        with pytest.raises(InvalidConfig, match="is no directory"):
            own_directory("trace_dir", f"{tmp_path}/file", make=make)
    (tmp_path / "made").chmod(0o770)
    with pytest.raises(InvalidConfig, match="mode 770"):
        own_directory("trace_dir", f"{tmp_path}/made")


def test_a_directory_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: os.getuid() + 1)
    with pytest.raises(InvalidConfig, match="a directory of its own"):
        own_directory("trace_dir", str(tmp_path))


def test_a_host_is_one_that_others_can_be_told():
    """In brackets it was listened at, and then every hand-over refused."""
    for given in ("[::1]", "::1"):
        assert parse_config({"side_channel_host": given}).side_channel(0, {})[0] == "::1"
        assert parse_config({}).side_channel(0, {"VLLM_NIXL_SIDE_CHANNEL_HOST": given})[0] == "::1"
    for given in ("*", "a host", "tcp://a"):
        with pytest.raises(InvalidConfig, match=r"side_channel_host: .* is no address that others could be told"):
            parse_config({"side_channel_host": given}).side_channel(0, {})


@pytest.mark.parametrize("host", ["[::1]", "127.0.0.1", "localhost", "prefill-0.example"])
def test_what_is_listened_at_can_be_written_into_parameters(host):
    told = parse_config({"side_channel_host": host}).side_channel(0, {})[0]
    assert msgspec.convert(told, Host) == told

"""Only known keys get in, only known servers are asked, and without keys nobody on another host is talked to."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from vllm_pd_connector.config import Config, parse_config
from vllm_pd_connector.errors import DeadlineExceeded, InvalidConfig, ProtocolError, UnauthenticatedPeer
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef, Pushed, PushInto, PushState
from vllm_pd_connector.sidechannel.client import Outcome, SideChannelClient
from vllm_pd_connector.sidechannel.net import keys as k
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.sidechannel.waiting import wait
from vllm_pd_connector.wake import Wake

SILENCE_S = 1.5
"""How long a client waits that must get no answer; one that gets in is answered in milliseconds."""


def keys_for(directory: Path, name: str, *knows: Path) -> k.Keys:
    """Keys of a new instance that knows the public keys in the files, and its own."""
    k.create_keys(directory / name, name)
    for public in knows:
        shutil.copy(public, directory / name)
    return k.load_keys(directory / name)


@pytest.fixture
def prefill(tmp_path: Path) -> k.Keys:
    return keys_for(tmp_path, "prefill")


@pytest.fixture
def decode(tmp_path: Path, prefill: k.Keys) -> k.Keys:
    keys = keys_for(tmp_path, "decode", prefill.directory / "prefill.key")
    shutil.copy(keys.directory / "decode.key", prefill.directory)
    return keys


@pytest.fixture
def server(prefill: k.Keys, decode: k.Keys) -> Iterator[SideChannelServer]:
    known = k.load_keys(prefill.directory)
    with contextlib.closing(SideChannelServer("127.0.0.1", 0, "p-0", "ab" * 16, keys=known)) as made:
        made.set_manifests([b"manifest"])
        yield made


def ask(
    keys: k.Keys | None, port: int, server_key: str | None, timeout: float, request: m.Request | None = None
) -> Outcome:
    wake = Wake()
    with contextlib.closing(SideChannelClient(keys=keys)) as client, contextlib.closing(wake):
        token = client.send(endpoint("127.0.0.1", port, server_key), request or m.GetManifests("p-0"), timeout)
        while True:
            wait(client, wake, time.monotonic() + PATIENCE_S)
            if (found := dict(client.receive()).get(token)) is not None:
                return found


def test_instances_that_know_each_other_talk(server, prefill, decode):
    assert isinstance(ask(decode, server.port, prefill.public, PATIENCE_S), m.Manifests)


def test_a_client_that_the_server_does_not_know_gets_no_answer(server, prefill, tmp_path):
    stranger = keys_for(tmp_path, "stranger", prefill.directory / "prefill.key")
    assert isinstance(ask(stranger, server.port, prefill.public, SILENCE_S), DeadlineExceeded)
    assert not server.counts()


def test_the_log_says_which_key_is_not_let_in_and_what_to_do_once_a_minute(prefill, decode, tmp_path, caplog):
    now = [0.0]
    admission = k.Admission(k.load_keys(prefill.directory), clock=lambda: now[0])
    strangers = [keys_for(tmp_path, name, decode.directory / "decode.key").public for name in ("one", "two")]
    for now[0], key, told in ((0.0, strangers[0], 1), (59.0, strangers[1], 1), (60.0, strangers[1], 2)):
        assert not admission.callback(k.ZAP_DOMAIN, key.encode())
        assert len(caplog.messages) == told
    assert admission.callback(k.ZAP_DOMAIN, decode.public.encode())
    assert [key in line for key, line in zip(strangers, caplog.messages, strict=True)] == [True, True]
    assert f"its *.key is not in {prefill.directory}" in caplog.text and "start this instance again" in caplog.text


def test_a_client_without_keys_gets_no_answer(server):
    assert isinstance(ask(None, server.port, None, SILENCE_S), DeadlineExceeded)
    assert not server.counts()


def test_a_server_that_has_another_key_than_it_should_is_told_nothing(server, decode):
    outcome = ask(decode, server.port, decode.public, SILENCE_S)
    assert isinstance(outcome, DeadlineExceeded) and "key" in str(outcome)
    assert not server.counts()


def test_without_its_authenticator_a_server_lets_nobody_in(server, prefill, decode):
    server._authenticator.stop()
    for _ in range(2):  # the first may have met its socket, which libzmq closes in a thread of its own
        assert isinstance(ask(decode, server.port, prefill.public, SILENCE_S), DeadlineExceeded)


def test_an_address_with_a_key_is_not_asked_without_keys(prefill):
    with contextlib.closing(SideChannelClient()) as client, pytest.raises(ProtocolError, match="requires keys"):
        client.send(endpoint("127.0.0.1", 9, prefill.public), m.Describe(), 1.0)


def test_an_instance_has_its_own_blocks_written_into_and_no_other_s(server, prefill, decode, tmp_path):
    server.pushes.enable([bytes(16)], 30.0)
    other = keys_for(tmp_path, "other", prefill.directory / "prefill.key")
    asked = []
    for home_key in (other.public, None, decode.public):
        home = InstanceAddress("decode-0", "cd" * 16, "127.0.0.1", 5600, home_key)
        into = PushInto(PrefillRef("name", None), home, 0, 0, 0, 0, 1, bytes(16), (), 0, 1, "0" * 16)
        answered = PATIENCE_S if home_key != decode.public else SILENCE_S
        asked.append(ask(decode, server.port, prefill.public, answered, into))
    for outcome in asked[:2]:
        assert isinstance(outcome, Pushed) and outcome.state is PushState.FAILED and outcome.terminal
        assert f"the key of who asks is {decode.public}" in outcome.reason
    assert isinstance(asked[2], DeadlineExceeded)  # it waits for its prefill


# -- which server may be asked ----------------------------------------------------------------------------------------


def test_without_keys_only_this_host_is_asked():
    for host in ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"):
        k.require_known_server(host, None, None, False)
    for host in ("10.0.0.7", "0.0.0.0", "fe80::1", "prefill.example", "localhost.example", "::1%lo", "::1%a.b"):
        with pytest.raises(UnauthenticatedPeer, match="side_channel_keys"):
            k.require_known_server(host, None, None, False)
        k.require_known_server(host, None, None, True)


@pytest.mark.parametrize("allowed", [False, True])
def test_with_keys_only_known_servers_are_asked_wherever_they_are(prefill, decode, tmp_path, allowed):
    k.require_known_server("10.0.0.7", prefill.public, decode, allowed)
    stranger = keys_for(tmp_path, "stranger")
    for host in ("127.0.0.1", "10.0.0.7"):
        with pytest.raises(UnauthenticatedPeer, match="no side-channel key"):
            k.require_known_server(host, None, decode, allowed)
        with pytest.raises(UnauthenticatedPeer, match="none of the 2 public keys"):
            k.require_known_server(host, stranger.public, decode, allowed)


def test_a_server_with_a_key_is_not_asked_by_an_instance_without(prefill):
    with pytest.raises(UnauthenticatedPeer, match="keygen"):
        k.require_known_server("127.0.0.1", prefill.public, None, True)


def test_a_server_without_keys_listens_on_this_host_only(prefill):
    k.require_private_address("127.0.0.1", None, False)
    for host in ("10.0.0.7", "0.0.0.0", "*", "::"):
        with pytest.raises(InvalidConfig, match=r"side_channel_host .*keygen.*allow_unauthenticated_peers"):
            k.require_private_address(host, None, False)
        k.require_private_address(host, None, True)
        k.require_private_address(host, prefill, False)


# -- files ------------------------------------------------------------------------------------------------------------


def test_secret_keys_are_for_their_owner_only(prefill):
    path = prefill.directory / "prefill.key_secret"
    assert path.stat().st_mode & 0o777 == 0o600
    path.chmod(0o644)
    with pytest.raises(InvalidConfig, match=r"0644 .*chmod 600"):
        k.load_keys(prefill.directory)


ROOT, USER = 0, 1000


@pytest.mark.parametrize("owner", [ROOT, USER])
@pytest.mark.parametrize("mode", [0o400, 0o600])
def test_a_secret_key_may_be_read_by_its_owner(mode, owner):
    assert k.is_private(mode, owner)


@pytest.mark.parametrize("mode", [0o440, 0o640])
def test_a_group_may_read_what_root_gave_it(mode):
    """As Kubernetes gives the files of a Secret to `fsGroup`; a user's own umask may have opened them by mistake."""
    assert k.is_private(mode, ROOT)
    assert not k.is_private(mode, USER)


@pytest.mark.parametrize("mode", [0o604, 0o602, 0o601, 0o660, 0o650, 0o444])
def test_nobody_else_may_do_anything_with_a_secret_key(mode):
    assert not k.is_private(mode, ROOT)
    assert not k.is_private(mode, USER)


def test_the_owner_of_a_secret_key_is_asked_for(prefill, monkeypatch):
    asked = []
    monkeypatch.setattr(k, "is_private", lambda mode, owner: asked.append((mode & 0o777, owner)))
    with pytest.raises(InvalidConfig, match="0600"):
        k.load_keys(prefill.directory)
    assert asked == [(0o600, os.getuid())]


def test_a_directory_must_have_exactly_one_secret_key(tmp_path, prefill):
    with pytest.raises(InvalidConfig, match=r"0 files \*\.key_secret"):
        k.load_keys(tmp_path)
    k.create_keys(prefill.directory, "second")
    with pytest.raises(InvalidConfig, match=r"2 files \*\.key_secret"):
        k.load_keys(prefill.directory)


def test_a_file_without_a_key_is_named(prefill):
    (prefill.directory / "junk.key").write_text("nothing")
    with pytest.raises(InvalidConfig, match=r"junk\.key"):
        k.load_keys(prefill.directory)


def test_keys_are_never_overwritten(prefill):
    with pytest.raises(InvalidConfig, match="already"):
        k.create_keys(prefill.directory, "prefill")


def test_the_secret_is_not_printed(prefill):
    assert prefill.secret not in repr(prefill)


def test_no_keys_are_configured_by_default():
    assert k.keys_of(Config()) is None
    with pytest.raises(InvalidConfig, match="nowhere"):
        k.keys_of(parse_config({"side_channel_keys": "/nowhere"}))


def test_a_secret_for_parameters_is_long_and_for_its_owner_only(tmp_path):
    path = tmp_path / "params.secret"
    k.create_secret(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert len(Config(params_secret=str(path)).secret() or b"") == 64
    with pytest.raises(InvalidConfig, match="exists"):
        k.create_secret(path)
    path.write_text("short")
    with pytest.raises(InvalidConfig, match="5 bytes, at least 32"):
        Config(params_secret=str(path)).secret()
    with pytest.raises(InvalidConfig, match="No such file"):
        Config(params_secret=str(tmp_path / "absent")).secret()


@pytest.mark.parametrize("cut", [1, 40])
def test_a_secret_that_lost_a_letter_is_named_at_once(prefill, cut):
    """A server's socket that could not be secured kept its context, and with it the start, waiting for ever."""
    path = prefill.directory / "prefill.key_secret"
    path.write_text(path.read_text().replace(prefill.secret, prefill.secret[cut:]))
    with pytest.raises(InvalidConfig, match=r"prefill\.key_secret"):
        k.load_keys(prefill.directory)
    damaged = k.Keys(prefill.directory, prefill.public, prefill.secret[cut:], prefill.peers)
    with pytest.raises(InvalidConfig, match="not a CURVE key"):
        SideChannelServer("127.0.0.1", 0, "p-0", "ab" * 16, keys=damaged)


def test_a_secret_and_a_public_key_of_two_pairs_are_refused(prefill, decode):
    path = prefill.directory / "prefill.key_secret"
    path.write_text(path.read_text().replace(prefill.secret, decode.secret))
    with pytest.raises(InvalidConfig, match="are not of one pair"):
        k.load_keys(prefill.directory)


def test_an_instance_s_own_workers_get_in_also_where_its_public_key_lies_elsewhere(prefill, decode):
    (prefill.directory / "prefill.key").unlink()
    known = k.load_keys(prefill.directory)
    assert known.peers == {decode.public}
    with contextlib.closing(SideChannelServer("127.0.0.1", 0, "p-0", "ab" * 16, keys=known)) as made:
        made.set_manifests([b"manifest"])
        outcomes = [ask(keys, made.port, prefill.public, PATIENCE_S) for keys in (known, decode)]
    assert outcomes[0] == outcomes[1] and not isinstance(outcomes[0], ProtocolError)


def test_a_directory_that_cannot_be_read_is_not_said_to_be_empty(prefill, tmp_path, monkeypatch):
    """As of keys that root has made for an instance of another user; root itself may read all."""
    for directory in (tmp_path / "nowhere", prefill.directory / "prefill.key"):
        with pytest.raises(InvalidConfig, match=r"(No such file|Not a directory).* \(uid \d+\)"):
            k.load_keys(directory)

    def denied(_directory):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(k.os, "listdir", denied)
    with pytest.raises(InvalidConfig, match="Permission denied"):
        k.load_keys(prefill.directory)

"""Two releases of this package read each other, or refuse each other naming both versions; whatever vLLM each is on.

The other release is a copy of this one with other numbers in it, in a process of its own. `docs/design/protocol.md` has
the rules, and `tests/e2e/matrix/test_tokens.py` pairs of two releases of vLLM.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

import vllm_pd_connector
from tests.contract import wire_values
from tests.contract.describe_wire import HERE, describe, differences, record_of
from tests.support.geometry.world import Model, Side, instance
from tests.support.patience import PATIENCE_S
from tests.support.sidechannel.ends import ENGINE, INCARNATION, collect
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.manifest import CONFIGURATION, Manifest
from vllm_pd_connector.geometry.topology import check_pd_topology
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.worker.peers.link import decode

RELEASED = {2: "8e7d74e719e7bb4b53ac133a4b58d1ce98936ab8428a89af6926df6f1d7b6654"}
"""SHA-256 of the records of versions that a release speaks."""
MESSAGES = Path("protocol") / "wire" / "messages.py"
SERVES = f"""
import signal, sys
from vllm_pd_connector.sidechannel.server import SideChannelServer
server = SideChannelServer("127.0.0.1", 0, {ENGINE!r}, {INCARNATION!r})
server.set_manifests([sys.stdin.buffer.read()])
print(server.port, flush=True)
signal.pause()
"""


def manifest(software: str) -> Manifest:
    [worker] = instance(Model(layers=2, heads=4), Side())
    return msgspec.structs.replace(worker.manifest, software=software)


@contextmanager
def other_release(into: Path, numbers: Mapping[str, int], served: Manifest) -> Iterator[str]:
    """Where the side channel of another release listens; `numbers` are what its messages' module says instead."""
    package = into / "vllm_pd_connector"
    shutil.copytree(Path(vllm_pd_connector.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / MESSAGES).read_text()
    for name, number in numbers.items():
        line = f"{name}: Final = {getattr(m, name)}\n"
        assert line in text
        text = text.replace(line, f"{name}: Final = {number}\n")
    (package / MESSAGES).write_text(text)
    process = subprocess.Popen(
        [sys.executable, "-c", SERVES],
        env=os.environ | {"PYTHONPATH": str(into)},
        cwd=into,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(msgspec.msgpack.encode(served))
        process.stdin.close()
        yield endpoint("127.0.0.1", int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def answer_of(where: str) -> Any:
    client = SideChannelClient()
    try:
        token = client.send(where, m.GetManifests(ENGINE), PATIENCE_S)
        return collect(client, 1)[token]
    finally:
        client.close()


def test_a_release_with_the_same_protocol_is_read_whatever_it_and_its_vllm_are_called(tmp_path: Path) -> None:
    served = manifest("vllm 0.33.0+cpu, vllm_pd_connector 9.9.9")
    with other_release(tmp_path, {}, served) as where:
        answer = answer_of(where)
    assert isinstance(answer, m.Manifests), answer
    [found] = map(decode, answer.manifests)
    assert found == served
    assert check_pd_topology(manifest("vllm 0.32.0+cpu, vllm_pd_connector 0.1.0"), [found]).allowed


def test_weights_that_another_configuration_computes_with_are_refused() -> None:
    """Nothing is known of files that one side does not tell: 0.1.0rc1 tells none."""
    one, same, other, more, silent = (
        [manifest(f"vllm 0.{release}.0, vllm_pd_connector 0.1.0{told}")]
        for release, told in (
            (32, CONFIGURATION + "config=0a processor_config.json=01"),
            (33, CONFIGURATION + "config=0a processor_config.json=01"),
            (32, CONFIGURATION + "config=0b processor_config.json=01"),
            (32, CONFIGURATION + "config=0a video_preprocessor_config.json=02"),
            (32, ""),
        )
    )
    assert check_pd_topology(one, same).allowed and check_pd_topology(one, more).allowed
    [difference] = check_pd_topology(one, other).differences
    assert (difference.field, difference.local, difference.remote) == ("configuration", "config 0a", "config 0b")
    assert "config.json" in difference.advice
    assert check_pd_topology(one, silent).allowed and check_pd_topology(silent, other).allowed


NEXT = m.PROTOCOL_VERSION + 1


@pytest.mark.parametrize("oldest", [m.MIN_VERSION, NEXT], ids=["that knows ours", "that does not"])
def test_a_release_with_another_protocol_is_refused_with_both_versions(tmp_path: Path, oldest: int) -> None:
    """Also one that could read us: it answers in words of its own."""
    with other_release(tmp_path, {"PROTOCOL_VERSION": NEXT, "MIN_VERSION": oldest}, manifest("another")) as where:
        answer = answer_of(where)
    assert isinstance(answer, ProtocolError)
    assert f"version: {NEXT} there, {m.MIN_VERSION} to {m.PROTOCOL_VERSION} here" in str(answer)


def test_the_wire_is_the_one_that_its_version_names() -> None:
    record = record_of(m.PROTOCOL_VERSION)
    advice = "raise PROTOCOL_VERSION if a release had this version, then run python -m tests.contract.describe_wire"
    assert record.is_file(), advice
    found = differences(msgspec.json.decode(record.read_bytes()), describe())
    assert not found, "\n".join([advice, *found])


def test_the_wire_of_a_version_that_was_released_is_not_recorded_anew() -> None:
    found = {version: hashlib.sha256(record_of(version).read_bytes()).hexdigest() for version in RELEASED}
    assert found == RELEASED, "raise PROTOCOL_VERSION: a release speaks the wire of this number (2: 0.1.0rc1)"


def test_what_is_computed_for_a_peer_is_what_the_version_names() -> None:
    """Formulas and texts that the other release compares with its own, or reads; no struct says them."""
    recorded = msgspec.json.decode((HERE / f"values-{m.PROTOCOL_VERSION}.json").read_bytes())
    assert wire_values.values() == recorded


def test_what_is_new_gone_or_bounded_otherwise_is_named() -> None:
    wire = describe()
    changed = wire | {"renew": wire["renew"] | {"urgent": "{}"}, "released": {}}
    changed["get_manifests"] = {name: text.replace("512", "64") for name, text in wire["get_manifests"].items()}
    found = differences(wire, changed)
    assert [line.partition(":")[0] for line in found] == ["get_manifests.engine_id", "released.type", "renew.urgent"]

"""Transports of other distributions: found by their entry points, refused by name where they cannot be used."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.distributions import ROOT, write_distribution
from tests.support.transport.ends import End, pattern, whole
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.errors import InvalidConfig, TransferError
from vllm_pd_connector.transport import registry
from vllm_pd_connector.transport.base import Use

SIZE = 4096
PIGEON = """
from vllm_pd_connector.transport.loopback import LoopbackTransport

class Pigeon(LoopbackTransport):
    name = "pigeon"

def create(options, use):
    pigeon = Pigeon(serves=use.serves)
    pigeon.told = options, use
    return pigeon

def named_otherwise(options, use):
    return LoopbackTransport()

def of_another_version(options):
    raise AssertionError

def without_its_library(options, use):
    import pigeonhole_driver

def grounded(options, use):
    from vllm_pd_connector.errors import TransferError
    raise TransferError("no wind")
"""


@pytest.fixture
def distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Puts distributions on the path that bring transports: by its name, name and value of their entries."""
    (tmp_path / "pigeon_transport.py").write_text(PIGEON)
    monkeypatch.syspath_prepend(tmp_path)

    def make(name: str, **entries: str) -> None:
        write_distribution(tmp_path, name, {registry.GROUP: entries})
        registry.entries.cache_clear()

    yield make
    sys.modules.pop("pigeon_transport", None)
    registry.entries.cache_clear()


def test_our_own_are_entries_like_others() -> None:
    assert registry.names() == ("loopback", "mooncake", "nixl")


def test_a_transport_of_another_distribution_is_found_and_moves_bytes(distribution: Callable[..., None]) -> None:
    distribution("carrier-pigeons", pigeon="pigeon_transport:create")
    assert parse_config({"transport": "pigeon"}).transport == "pigeon"
    here, there = End("pigeon", {"height": 3}, SIZE, serves=False), End("pigeon", {}, SIZE)
    assert here.transport.told == ({"height": 3}, Use(serves=False))
    there.fill(1)
    peer = here.connect(there.endpoint, there.segments)
    here.finish(here.transport.read(peer, whole(there.address, here.address, SIZE)))
    assert here.content(0, SIZE) == pattern(1, SIZE)
    for end in (here, there):
        end.transport.close()


def test_an_unknown_name_is_refused_with_those_that_are_known(distribution: Callable[..., None]) -> None:
    distribution("carrier-pigeons", pigeon="pigeon_transport:create")
    with pytest.raises(InvalidConfig, match="'owl' is unknown, choose one of mooncake, nixl, pigeon"):
        parse_config({"transport": "owl"})


def test_metadata_without_transports_is_said_to_be_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "entries", tuple)
    with pytest.raises(InvalidConfig, match="install this package again"):
        registry.create("nixl")


def test_a_name_that_two_distributions_bring_is_refused_with_both(distribution: Callable[..., None]) -> None:
    distribution("carrier-pigeons", pigeon="pigeon_transport:create")
    distribution("other-pigeons", pigeon="pigeon_transport:grounded", nixl="pigeon_transport:create")
    for name, first in (("pigeon", "carrier-pigeons 1.0 "), ("nixl", "vllm-pd-connector ")):
        with pytest.raises(InvalidConfig) as refusal:
            registry.create(name)
        assert first in str(refusal.value) and "other-pigeons 1.0 (pigeon_transport:" in str(refusal.value)
    registry.create("loopback").close()


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("no_such_module:create", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("pigeon_transport:no_such_name", "AttributeError"),
        ("pigeon_transport:of_another_version", "TypeError"),
        ("pigeon_transport:without_its_library", "No module named 'pigeonhole_driver'"),
        ("pigeon_transport:named_otherwise", "it calls itself 'loopback'"),
    ],
)
def test_a_broken_one_is_named_with_its_distribution(
    distribution: Callable[..., None], value: str, reason: str
) -> None:
    distribution("carrier-pigeons", pigeon=value)
    with pytest.raises(InvalidConfig) as refusal:
        registry.create("pigeon")
    assert f"'pigeon' of carrier-pigeons 1.0 ({value})" in str(refusal.value) and reason in str(refusal.value)


def test_what_it_says_itself_stays_as_it_is(distribution: Callable[..., None]) -> None:
    distribution("carrier-pigeons", pigeon="pigeon_transport:grounded")
    with pytest.raises(TransferError, match=r"^no wind$"):
        registry.create("pigeon")


@pytest.mark.libraries
def test_another_distribution_runs_the_conformance_suite(tmp_path: Path) -> None:
    """As docs/design/transports.md says, over a transport that only has a name of its own."""
    (tmp_path / "pigeon_transport.py").write_text(
        "from vllm_pd_connector.transport.nixl.transport import NixlTransport\n"
        "class Pigeon(NixlTransport):\n"
        '    name = "pigeon"\n'
        "def create(options, use):\n"
        '    assert options == {"height": 3}\n'
        "    return Pigeon(use=use)\n"
    )
    write_distribution(tmp_path, "carrier-pigeons", {registry.GROUP: {"pigeon": "pigeon_transport:create"}})
    command = f"{sys.executable} -m pytest -q -n 0 -p no:cacheprovider tests/transport/test_conformance.py".split()
    command += ["--transport", "pigeon", "--transport-options", '{"height": 3}']
    command += ["-k", "write_copies_every_byte or killed_peer"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, sys.path)])}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "4 passed" in done.stdout, done.stdout + done.stderr

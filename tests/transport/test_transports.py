"""What belongs to one transport or to none: creation, options, endpoints, errors, faults."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.transport.ends import End, InProcessPeer, whole
from vllm_pd_connector.errors import InvalidConfig, TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.transport.endpoint import seal, unseal
from vllm_pd_connector.transport.nixl import bindings
from vllm_pd_connector.transport.nixl.agents import Agent, Library, ours
from vllm_pd_connector.transport.nixl.bindings import NixlOptions, backend_parameters, described
from vllm_pd_connector.transport.ranges import Ranges
from vllm_pd_connector.transport.registry import create, names

SIZE = 1 << 16


@pytest.mark.libraries
def test_every_known_name_can_be_created() -> None:
    for name in names():
        transport = create(name, {"address": "127.0.0.1"} if name == "mooncake" else {})
        assert transport.name == name
        transport.close()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("carrier-pigeon", {}, "'carrier-pigeon' is unknown, choose one of mooncake, nixl"),
        ("nixl", {"tls": "tcp"}, "known options: backend"),
        ("nixl", {"batch_bytes": "many"}, "batch_bytes"),
        pytest.param("nixl", {"batch_bytes": 0}, "at least 1", marks=pytest.mark.libraries),
        pytest.param("nixl", {"progress_interval_us": 0}, "at least 1", marks=pytest.mark.libraries),
        pytest.param(
            "nixl", {"backend": "POSIX", "ucx": {"TLS": "tcp"}}, "use backend_options", marks=pytest.mark.libraries
        ),
        ("loopback", {"speed": 1}, "known options: none"),
    ],
)
def test_wrong_configuration_names_the_field(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        create(name, options)


def test_a_missing_library_is_a_configuration_error_with_an_install_hint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nixl", None)
    with pytest.raises(InvalidConfig, match="pip install nixl"):
        create("nixl")


@pytest.mark.libraries
def test_nothing_of_nixl_is_replaced_for_its_other_users() -> None:
    nixl = importlib.import_module("nixl")
    before = dict(vars(nixl._bindings)), dict(vars(nixl._api))
    transport = create("nixl")
    assert (dict(vars(nixl._bindings)), dict(vars(nixl._api))) == before
    transport.close()


@pytest.mark.libraries
@pytest.mark.parametrize(("set_before", "then"), [(None, "1024"), ("inf", "inf")])
def test_the_cache_of_registrations_is_bounded_unless_the_environment_says_how(
    monkeypatch: pytest.MonkeyPatch, set_before: str | None, then: str
) -> None:
    monkeypatch.delenv("UCX_RCACHE_MAX_UNRELEASED", raising=False)
    if set_before is not None:
        monkeypatch.setenv("UCX_RCACHE_MAX_UNRELEASED", set_before)
    bindings.bindings()
    assert os.environ["UCX_RCACHE_MAX_UNRELEASED"] == then


@pytest.mark.parametrize(
    ("installed", "amd", "chosen"),
    [
        (("nixl",), False, "nixl"),
        (("nixl",), True, "nixl"),
        (("nixl_rocm",), False, "nixl_rocm"),
        (("nixl", "nixl_rocm"), False, "nixl"),
        (("nixl", "nixl_rocm"), True, "nixl_rocm"),
        ((), True, "nixl"),
    ],
)
def test_the_module_of_nixl_is_that_for_the_machine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, installed: tuple[str, ...], amd: bool, chosen: str
) -> None:
    monkeypatch.setattr(bindings.importlib.util, "find_spec", lambda name: object() if name in installed else None)
    driver = tmp_path / "kfd"
    if amd:
        driver.touch()
    assert bindings.module_name(driver) == chosen


@pytest.mark.parametrize(("asked", "posting"), [(False, False), (True, True)])
def test_agents_that_post_have_a_progress_thread_where_it_is_asked_for(asked: bool, posting: bool) -> None:
    made: list[bool] = []

    class Config:
        useProgThread, syncMode, pthrDelay = False, None, 0

    class Agent:
        def __init__(self, name: str, config: Config) -> None:
            made.append(config.useProgThread)

        def createBackend(self, *_: object) -> None:
            return

    library = Library.__new__(Library)
    library.options, library.errors = NixlOptions(progress_thread=asked), ()
    library.nixl = SimpleNamespace(nixlAgentConfig=Config, nixlAgent=Agent, NIXL_THREAD_SYNC_STRICT=0)
    for threaded in (True, False):
        library.start(threaded=threaded)
    assert made == [True, posting]


class BackendError(Exception):
    """NIXL's."""


class Unmet:
    """NIXL that takes no peer, and any memory."""

    DRAM_SEG, VRAM_SEG = 0, 1

    def __init__(self) -> None:
        self.nixlBackendError = BackendError

    def nixlRegDList(self, kind: int, described: list[tuple[int, int, int, bytes]]) -> object:
        return described

    def registerMem(self, *_: object) -> None:
        return

    def invalidateRemoteMD(self, name: str) -> None:
        return

    def loadRemoteMD(self, metadata: bytes) -> bytes:
        raise BackendError("NIXL_ERR_BACKEND")


def library_of(monkeypatch: pytest.MonkeyPatch, options: NixlOptions) -> Library:
    monkeypatch.setattr("vllm_pd_connector.transport.nixl.agents.bindings", Unmet)
    return Library(options)


@pytest.mark.parametrize(
    ("options", "environment", "named"),
    [
        ({}, None, True),
        ({"ucx": {"TLS": "tcp"}}, None, True),
        ({}, "eth0", False),
        ({"ucx": {"NET_DEVICES": "eth0"}}, None, False),
        ({"backend_options": {"engine_config": "TLS=tcp,NET_DEVICES=eth0"}}, None, False),
        ({"backend": "LIBFABRIC"}, None, False),
    ],
)
def test_a_peer_that_is_not_taken_names_the_interfaces_where_nobody_chose_them(
    monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], environment: str | None, named: bool
) -> None:
    """Hosts with a live docker0 have its address twice, and UCX may choose it."""
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    if environment:
        monkeypatch.setenv("UCX_NET_DEVICES", environment)
    library = library_of(monkeypatch, msgspec.convert(options, NixlOptions))
    with pytest.raises(TransferError, match="adding agent pd-1: NIXL_ERR_BACKEND") as refusal:
        library.join(Agent("pd-0", library.nixl), "pd-1", b"pd-1")
    assert ("UCX_NET_DEVICES is not set" in str(refusal.value)) == named


@pytest.mark.parametrize(
    ("options", "device", "warned"),
    [
        ({"progress_thread": True}, "cuda", 1),
        ({"progress_thread": True}, "cpu", 0),
        ({}, "cuda", 0),
        ({"progress_thread": True, "backend": "LIBFABRIC"}, "cuda", 0),
    ],
)
def test_a_progress_thread_of_ucx_beside_a_gpu_s_memory_is_told_once(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    options: dict[str, Any],
    device: str,
    warned: int,
) -> None:
    library = library_of(monkeypatch, msgspec.convert(options, NixlOptions))
    ranges = Ranges.of([Segment(address=1 << 30, length=SIZE, device=device, device_id=0)], "this worker")
    for _ in range(2):
        library.register(Agent("pd-0", library.nixl), ranges)
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == warned and all("transport_options.progress_thread" in one for one in told)


def test_an_error_of_nixl_holds_no_frame_and_so_no_agent() -> None:
    """Agents must end when they are told to, not whenever Python collects what failed."""
    try:
        raise RuntimeError("no way")
    except RuntimeError as error:
        made = ours(error, "reading")
    assert str(made) == "reading: no way"
    assert made.__cause__ is not None and made.__cause__.__traceback__ is None


def test_tcp_segments_are_large_unless_someone_chose_otherwise() -> None:
    def engine(options: NixlOptions, environment: dict[str, str]) -> str:
        return backend_parameters(options, environment).get("engine_config", "")

    assert engine(NixlOptions(), {}) == "TCP_TX_SEG_SIZE=256k,TCP_RX_SEG_SIZE=256k"
    assert engine(NixlOptions(), {"UCX_TCP_TX_SEG_SIZE": "8k"}) == "TCP_RX_SEG_SIZE=256k"
    assert engine(NixlOptions(tcp_segment_size=""), {}) == ""
    assert engine(NixlOptions(ucx={"TCP_TX_SEG_SIZE": "1m", "TLS": "tcp"}), {}) == (
        "TCP_TX_SEG_SIZE=1m,TLS=tcp,TCP_RX_SEG_SIZE=256k"
    )
    assert backend_parameters(NixlOptions(backend_options={"num_threads": "4"}, tcp_segment_size=""), {}) == {
        "num_threads": "4"
    }


def test_a_segment_size_that_would_have_no_effect_is_refused() -> None:
    given = {"engine_config": "TLS=tcp"}
    assert backend_parameters(NixlOptions(backend_options=given), {}) == given, "it takes the place of the default"
    with pytest.raises(InvalidConfig, match="tcp_segment_size is '64k', and would have no effect"):
        backend_parameters(NixlOptions(backend_options=given, tcp_segment_size="64k"), {})


def test_a_list_of_which_nixl_would_take_the_first_member_is_refused() -> None:
    with pytest.raises(InvalidConfig, match="UCX_NET_DEVICES in the environment"):
        backend_parameters(NixlOptions(ucx={"NET_DEVICES": "mlx5_0:1,mlx5_1:1"}), {})


@settings(deadline=None)
@given(st.binary(max_size=200), st.integers(0, 10_000), st.integers(1, 255))
def test_an_endpoint_with_any_wrong_byte_or_length_is_refused(metadata: bytes, place: int, flip: int) -> None:
    sealed = seal("nixl", "pd-1", metadata)
    assert unseal("nixl", sealed).metadata == metadata
    place %= len(sealed)
    for damaged in (sealed[:place], sealed[:place] + bytes([sealed[place] ^ flip]) + sealed[place + 1 :]):
        with pytest.raises(TransferError):
            unseal("nixl", damaged)


def test_an_endpoint_of_another_transport_is_refused_with_both_names() -> None:
    with pytest.raises(TransferError, match="transport: nixl here, loopback there"):
        unseal("nixl", seal("loopback", "pd-1", b""))


def test_an_oversized_endpoint_is_refused_unread() -> None:
    with pytest.raises(TransferError, match="at most"):
        unseal("nixl", bytes(17 << 20))


def test_loopback_failures_and_holds_are_switched_by_the_test() -> None:
    end, peer = End("loopback", {}, SIZE), InProcessPeer("loopback", {}, SIZE)
    peer.call("fill", 1)
    connection = end.transport.connect(peer.endpoint, peer.segments)
    everything = whole(peer.address, end.address, SIZE)

    end.transport.faults.held = True
    held = end.transport.read(connection, everything)
    assert end.transport.poll(held) is TransferStatus.RUNNING
    assert end.content(0, SIZE) == bytes(SIZE)

    end.transport.faults.failures.append(TransferError("half of it", terminal=False))
    failing = end.transport.read(connection, everything)
    with pytest.raises(TransferError, match="half of it") as failure:
        end.transport.poll(failing)
    assert not failure.value.terminal

    end.transport.faults.held = False
    assert end.transport.poll(held) is TransferStatus.DONE
    assert end.content(0, SIZE) == peer.call("content", 0, SIZE)
    end.transport.close()
    peer.stop()


def test_loopback_refuses_device_memory() -> None:
    transport = create("loopback")
    with pytest.raises(TransferError, match="CPU memory only"):
        transport.register([Segment(address=1 << 40, length=4096, device="cuda", device_id=0)])
    transport.close()


def test_what_nixl_was_told_of_ways_and_devices_is_said_as_it_is_used() -> None:
    options = NixlOptions(ucx={"TLS": "rc"})
    assert described(NixlOptions(), {}) == "nixl UCX"
    assert described(options, {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "mlx5_0:1"}) == (
        "nixl UCX UCX_TLS=rc UCX_NET_DEVICES=mlx5_0:1"
    )

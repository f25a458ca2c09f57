"""An instance that ends in an orderly way: its readers finish within a bound, its peers are told, leases come back."""

from __future__ import annotations

import contextlib
import secrets
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_port
from tests.support.worker.decode_instance import Prefill, until
from vllm_pd_connector.protocol.lease import End, Freed
from vllm_pd_connector.sidechannel.net.keys import create_keys, load_keys
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.worker.drain import wait_for_readers

NONCE = secrets.token_bytes(16)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_pd_connector.worker.drain._REPLY_S", 30.0)


@pytest.fixture
def server() -> Iterator[SideChannelServer]:
    with contextlib.closing(SideChannelServer("127.0.0.1", 0, "p-0", "ab" * 16)) as made:
        yield made


def test_without_readers_a_worker_ends_at_once(server):
    began = time.monotonic()
    assert wait_for_readers(endpoint("127.0.0.1", server.port), None, 30.0)
    assert time.monotonic() - began < 10.0


def test_a_worker_waits_for_its_readers(server):
    server.hold("a", NONCE, 60.0)
    began = time.monotonic()
    threading.Timer(2.0, server.drop, ["a"]).start()
    assert wait_for_readers(endpoint("127.0.0.1", server.port), None, 30.0)
    assert 2.0 <= time.monotonic() - began < 10.0


def test_a_worker_waits_for_readers_only_for_so_long(server):
    server.hold("a", NONCE, 60.0)
    began = time.monotonic()
    assert not wait_for_readers(endpoint("127.0.0.1", server.port), None, 0.4)
    assert 0.35 < time.monotonic() - began < 10.0


def test_a_worker_waits_for_readers_of_a_side_channel_that_stands_still(server, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.worker.drain._REPLY_S", 0.1)
    server.hold("a", NONCE, 60.0)

    def stand_still() -> None:
        with server._lock:
            time.sleep(0.6)
        server.drop("a")

    still = threading.Thread(target=stand_still)
    still.start()
    assert wait_for_readers(endpoint("127.0.0.1", server.port), None, 30.0)
    still.join()


def test_a_worker_whose_side_channel_is_gone_does_not_wait(server):
    server.close()
    began = time.monotonic()
    assert not wait_for_readers(endpoint("127.0.0.1", server.port), None, 30.0)
    assert time.monotonic() - began < 10.0


def test_a_worker_of_an_instance_with_keys_asks_with_them(tmp_path: Path):
    create_keys(tmp_path, "own")
    keys = load_keys(tmp_path)
    with contextlib.closing(SideChannelServer("127.0.0.1", 0, "p-0", "ab" * 16, keys=keys)) as server:
        assert wait_for_readers(endpoint("127.0.0.1", server.port, keys.public), keys, 30.0)


def test_leases_that_are_held_at_the_end_are_dropped(server):
    server.hold("a", NONCE, 60.0)
    server.close()
    assert server.take_freed() == [Freed("a", End.DROPPED)]


def test_a_peer_that_leaves_is_let_go_of_at_once_and_may_come_back(decode):
    with contextlib.closing(Prefill(port=free_port())) as prefill:
        assert decode.received(prefill.request("a")) == [True]
        [link] = decode.loop._receives._links._links.values()
        assert link.ranks
        prefill.server.close()
        until(lambda: not link.ranks, "the connection to end")
        # The same instance listens again: nothing had proved that it was gone.
        port, again = prefill.server.port, None
        again = SideChannelServer("127.0.0.1", port, prefill.engine_id, prefill.incarnation)
        again.set_manifests(prefill.manifests)
        prefill.server = again
        assert decode.received(prefill.request("b")) == [True]


def test_requests_that_read_from_a_peer_that_leaves_end_at_once(decode):
    with contextlib.closing(Prefill()) as prefill:
        prefill.transports[0].faults.frozen = True
        decode.loop.submit([prefill.request("a")], [])
        until(lambda: decode.reads("a"), "the reads to begin")
        prefill.server.close()
        assert decode.wait_for("a") == [False]
        assert decode.failures == {"peer_unreachable": 1} and decode.quarantined == {"a"}
        prefill.transports[0].faults.frozen = False
        decode.until(lambda: decode.drained == {"a"}, "the quarantine to end")


def test_a_decode_worker_that_ends_gives_its_leases_back(decode):
    with contextlib.closing(Prefill()) as prefill:
        prefill.transports[0].faults.frozen = True
        decode.loop.submit([prefill.request("a")], [])
        until(lambda: decode.reads("a"), "the reads to begin")
        decode.loop.close()
        until(lambda: prefill.server.take_freed() == [Freed("p-a", End.RELEASED)], "the lease to come back")
        prefill.transports[0].faults.frozen = False

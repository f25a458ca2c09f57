"""NIXL agents that only read: nobody's target, so without a progress thread (see `transport.nixl`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from transport_ends import End, runs, until, whole
from transport_variants import MIB, SIZE, VARIANTS, AnyPeer, Variant, scattered

from vllm_pd_connector.errors import PeerLost

LONG = 96 * MIB  # more than one call copies


@pytest.fixture(params=["nixl", "nixl-tcp"])
def variant(request: pytest.FixtureRequest) -> Variant:
    return VARIANTS[request.param]


@pytest.fixture
def peer(variant: Variant) -> Iterator[AnyPeer]:
    made = variant.peer(variant.transport, variant.options, LONG)
    yield made
    made.stop()


def threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.fixture
def reader(variant: Variant) -> Iterator[End]:
    made = End(variant.transport, variant.options, LONG, serves=False)
    yield made
    made.transport.close()


def test_no_thread_moves_things_for_others(variant: Variant) -> None:
    def added(serves: bool) -> int:
        before = threads()
        with contextlib.closing(End(variant.transport, variant.options, SIZE, serves=serves).transport):
            return threads() - before

    assert added(serves=False) == added(serves=True) - 1


def test_what_is_polled_arrives(reader: End, peer: AnyPeer) -> None:
    peer.call("fill", 3)
    target = reader.connect(peer.endpoint, peer.segments)
    for count, length in ((1, 64), (100, 1024), (30, 65536)):
        rows = scattered(count, length, peer.address, reader.address, SIZE)
        reader.finish(reader.transport.read(target, runs(rows)))
        for source, destination, size in rows:
            begin = destination - reader.address
            assert reader.content(begin, size) == peer.call("content", source - peer.address, size)
    reader.finish(reader.transport.read(target, whole(peer.address, reader.address, LONG)))
    assert reader.digest() == peer.call("digest")


def test_a_peer_that_died_is_noticed(reader: End, peer: AnyPeer) -> None:
    target = reader.connect(peer.endpoint, peer.segments)
    reader.finish(reader.transport.read(target, whole(peer.address, reader.address, SIZE)))
    peer.kill()

    def lost() -> bool:
        with pytest.raises(PeerLost):
            reader.finish(reader.transport.read(target, whole(peer.address, reader.address, SIZE)))
        return True

    assert until(lost, "the loss")

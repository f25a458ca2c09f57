"""NIXL agents that only read: nobody's target, so without a progress thread (see `transport.nixl.transport`)."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.transport.ends import End, runs, until, whole
from tests.support.transport.variants import MIB, SIZE, VARIANTS, AnyPeer, Variant, marked, scattered
from vllm_pd_connector.errors import PeerLost, TransferError

LONG = 96 * MIB  # more than one call copies


@pytest.fixture(params=marked(["nixl", "nixl-tcp"]))
def variant(request: pytest.FixtureRequest) -> Variant:
    return VARIANTS[request.param]


@pytest.fixture
def peer(variant: Variant) -> Iterator[AnyPeer]:
    made = variant.peer(variant.transport, variant.options, LONG)
    yield made
    made.stop()


def threads() -> set[str]:
    """Those that there are; of earlier tests some may still be ending."""
    return set(os.listdir("/proc/self/task"))


@pytest.fixture
def reader(variant: Variant) -> Iterator[End]:
    made = End(variant.transport, variant.options, LONG, serves=False)
    yield made
    made.transport.close()


def replace(end: End, target: Any) -> None:
    """Another agent, when it has been made."""

    def made() -> bool:
        try:
            end.transport.replace_endpoint(target)
        except TransferError as error:
            if not error.retryable:
                raise
            return False
        return True

    until(made, "another agent")


def test_no_thread_moves_things_for_others(variant: Variant) -> None:
    def added(serves: bool) -> int:
        before = threads()
        with contextlib.closing(End(variant.transport, variant.options, SIZE, serves=serves).transport):
            return len(threads() - before)

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


def test_another_agent_connects_while_the_first_one_ends_what_it_runs(
    reader: End, peer: AnyPeer, variant: Variant
) -> None:
    half = LONG // 2
    peer.call("fill", 5)
    target = reader.connect(peer.endpoint, peer.segments)
    reader.finish(reader.transport.read(target, whole(peer.address, reader.address, SIZE)))
    reader.zero()
    old = reader.transport.read(target, whole(peer.address, reader.address, LONG))
    before = threads()
    replace(reader, target)
    reader.transport.replace_endpoint(target)  # has another agent already
    assert len(threads() - before) <= 2
    reader.disconnect(target)
    again = reader.connect(peer.endpoint, peer.segments)
    assert len(reader.transport._older) == 1
    reader.finish(reader.transport.read(again, whole(peer.address + half, reader.address + half, half)))
    with contextlib.suppress(TransferError):  # of a peer that is left no more is posted
        reader.finish(old)
    assert not reader.transport._older, "the agent that has nothing to do was kept"
    reader.finish(reader.transport.read(again, whole(peer.address, reader.address, LONG)))
    assert reader.digest() == peer.call("digest")


def test_a_target_stays_what_it_is_when_what_posts_is_replaced(variant: Variant, peer: AnyPeer) -> None:
    end = End(variant.transport, variant.options, SIZE)
    with contextlib.closing(end.transport):
        before = threads()
        target = end.connect(peer.endpoint, peer.segments)
        assert len(threads() - before) <= 1, "what posts has a progress thread"
        end.finish(end.transport.read(target, whole(peer.address, end.address, SIZE)))
        replace(end, target)
        assert end.transport.describe() == end.endpoint
        end.disconnect(target)
        again = end.connect(peer.endpoint, peer.segments)
        end.fill(9)
        end.finish(end.transport.write(again, whole(end.address, peer.address, SIZE)))
        assert peer.call("content", 0, SIZE) == end.content(0, SIZE)
        end.zero()
        peer.call("fill", 4)
        peer.call("write_all", *end.hello())
        assert end.content(0, SIZE) == peer.call("content", 0, SIZE), "it is not the target any more"


def test_replaced_agents_are_few(reader: End, peer: AnyPeer) -> None:
    for _ in range(3):
        replace(reader, reader.connect(peer.endpoint, peer.segments))
    target = reader.connect(peer.endpoint, peer.segments)
    with pytest.raises(TransferError, match="no other starts"):
        reader.transport.replace_endpoint(target)
    reader.finish(reader.transport.read(target, whole(peer.address, reader.address, SIZE)))


def test_a_peer_that_died_is_noticed(reader: End, peer: AnyPeer) -> None:
    target = reader.connect(peer.endpoint, peer.segments)
    reader.finish(reader.transport.read(target, whole(peer.address, reader.address, SIZE)))
    peer.kill()

    def lost() -> bool:
        with pytest.raises(PeerLost):
            reader.finish(reader.transport.read(target, whole(peer.address, reader.address, SIZE)))
        return True

    assert until(lost, "the loss")

"""NIXL between the CUDA memory of two processes, and between CUDA and CPU memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.transport.ends import End, GpuEnd, ProcessPeer, pattern, runs, whole

SIZE = 20 << 20
KINDS = {"cpu": End, "cuda": GpuEnd}

pytestmark = pytest.mark.gpu


@pytest.fixture(params=[("cuda", "cuda"), ("cuda", "cpu"), ("cpu", "cuda")], ids="-".join)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, Any]]:
    here, there = (KINDS[device] for device in request.param)
    peer, end = ProcessPeer("nixl", {}, SIZE, there), here("nixl", {}, SIZE)
    yield end, peer
    end.transport.close()
    peer.stop()


def test_read_copies_every_byte(pair: tuple[Any, Any]) -> None:
    end, peer = pair
    peer.call("fill", 1)
    connection = end.transport.connect(peer.endpoint, peer.segments)
    end.finish(end.transport.read(connection, whole(peer.address, end.address, SIZE)))
    assert end.digest() == peer.call("digest")


def test_scattered_read_puts_each_run_where_it_belongs(pair: tuple[Any, Any]) -> None:
    end, peer = pair
    peer.call("fill", 2)
    connection = end.transport.connect(peer.endpoint, peer.segments)
    piece, count = 16384, 1000
    end.finish(
        end.transport.read(
            connection,
            runs([(peer.address + i * piece, end.address + (count - 1 - i) * piece, piece) for i in range(count)]),
        )
    )
    there = pattern(2, SIZE)
    expected = b"".join(there[i * piece : (i + 1) * piece] for i in reversed(range(count)))
    assert end.content(0, piece * count) == expected
    assert end.content(piece * count, SIZE - piece * count) == bytes(SIZE - piece * count)


def test_the_bytes_of_a_write_are_there_when_it_is_done(pair: tuple[Any, Any]) -> None:
    end, peer = pair
    end.fill(3)
    connection = end.transport.connect(peer.endpoint, peer.segments)
    end.finish(end.transport.write(connection, whole(end.address, peer.address, SIZE)))
    assert peer.call("digest") == end.digest()

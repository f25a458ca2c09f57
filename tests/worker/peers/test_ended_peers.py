"""Who has ended is let go of at once, though nobody asks for it; who has only lost a connection is kept."""

from __future__ import annotations

import contextlib
import math
import socket
from collections.abc import Iterator

import pytest

from tests.support.worker.decode_instance import Decode, Prefill, in_its_thread, request_of, until, until_in
from tests.support.worker.library_processes import VARIANTS, Instance, instances
from tests.support.worker.prefill_instance import serve
from tests.support.worker.writer import Target, Writer, freed, hold_writes, pushed
from vllm_pd_connector.config import Config
from vllm_pd_connector.protocol.peer import PeerState
from vllm_pd_connector.transport.mooncake.transport import MooncakeTransport
from vllm_pd_connector.transport.nixl.transport import NixlTransport
from vllm_pd_connector.transport.registry import create
from vllm_pd_connector.worker.peers import process_watch
from vllm_pd_connector.worker.peers.pool import Links
from vllm_pd_connector.worker.receive.read_link import ReadLink
from vllm_pd_connector.worker.transfer_loop import TransferLoop


def link_of(decode: Decode, engine_id: str = "p-0") -> ReadLink:
    [link] = [link for link in decode.loop._receives._links._links.values() if link.engine_id == engine_id]
    return link


def linked(decode: Decode, prefill: Prefill) -> ReadLink:
    """Have a request read, so that there is a link, and see its workers."""
    assert decode.received(prefill.request("warm")) == [True]
    decode.see_workers()
    return link_of(decode)


def until_none(loop: TransferLoop, *pools: Links) -> None:
    until_in(loop, lambda: not any(pool._links for pool in pools), "the link to be gone")


def lines_are_lost(decode: Decode, prefill: Prefill) -> None:
    """Every line to the workers is lost as by a reset, and the loop has seen that."""
    seen = decode.loop._processes.losses
    for watch in link_of(decode).watches.values():
        watch._link.give_up("Connection reset by peer")
    until_in(decode.loop, lambda: decode.loop._receives._links._losses == seen + len(prefill.lives), "the loss")


def test_a_peer_that_is_killed_is_let_go_of_without_a_request(prefill, decode):
    link = linked(decode, prefill)
    ranks = list(link.ranks.values())
    assert len(ranks) == 2
    prefill.end_workers()
    until_none(decode.loop, decode.loop._receives._links)
    assert not any(peer.connected for peer in ranks)
    assert not link.ranks and link.plan is None and not link.edges and not link.manifests
    assert prefill.server.counts()["GetManifests"] == 1 and not decode.quarantined


def test_a_peer_that_leaves_when_the_side_channel_to_it_was_closed_is_let_go_of(prefill, decode, monkeypatch):
    """Its word goes to whom it knows."""
    link = linked(decode, prefill)
    client, said = decode.loop._calls._client, []
    monkeypatch.setattr(decode.loop._receives, "departed", lambda endpoint, now: said.append(endpoint))
    in_its_thread(decode.loop, lambda now: setattr(client, "_idle_s", 0.0))
    until_in(decode.loop, lambda: not client._links, "the socket to be closed")
    prefill.close()
    until_none(decode.loop, decode.loop._receives._links)
    assert not link.ranks and not said


@pytest.fixture
def reader(variant: str) -> Iterator[Decode]:
    name, options = VARIANTS[variant]
    made = Decode(Config(transport="loopback", staging_bytes=0), lambda: create(name, options))
    yield made
    made.loop.close()


def test_nothing_is_left_of_a_killed_process_in_a_library(variant: str, reader: Decode) -> None:
    def known() -> int:
        transport = reader.loop._transport
        if isinstance(transport, NixlTransport):
            return len(transport._poster.peers)
        assert isinstance(transport, MooncakeTransport)
        return len(transport._peers)

    with instances(serve, variant) as start:
        first, other = start("p-0"), start("p-1")
        for name, one in (("a", first), ("b", other)):
            assert reader.received(request_of(name, one.ask(name))) == [True]
        reader.see_workers()
        assert in_its_thread(reader.loop, lambda _: known()) == 4
        first.kill()
        until_in(reader.loop, lambda: known() == 2, "the ranks of the killed process to be gone")
        [link] = reader.loop._receives._links._links.values()
        assert link.engine_id == "p-1"
        again: Instance = start("p-0")
        assert reader.received(request_of("c", again.ask("c")), request_of("d", other.ask("d"))) == [True, True]


def test_a_read_of_a_peer_that_ended_fails_and_its_blocks_wait_for_the_end(prefill, decode, monkeypatch):
    linked(decode, prefill)
    monkeypatch.setattr(process_watch, "SETTLE_S", math.inf)
    decode.transport.faults.held = True
    decode.loop.submit([prefill.request("a")], [])
    until(lambda: decode.reads("a"), "it to read")
    decode.see_workers()
    link = link_of(decode)
    prefill.end_workers()
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"peer_unreachable": 1} and decode.quarantined == {"a"}
    until_in(decode.loop, lambda: not link.ranks and link.plan is None, "the peer to be let go of")
    dialled = [watch._dialled_at for watch in link.watches.values()]
    until_in(
        decode.loop,
        lambda: all(w._dialled_at > at for w, at in zip(link.watches.values(), dialled, strict=True)),
        "more dials",
    )
    decode.collect()
    assert not decode.drained, "a line that was closed is no proof yet"
    monkeypatch.setattr(process_watch, "SETTLE_S", 0.1)
    decode.until(lambda: decode.drained == {"a"}, "the quarantine to end")


def test_a_peer_whose_lines_were_reset_is_kept_and_watched_again(prefill, decode, monkeypatch):
    monkeypatch.setattr(process_watch, "AGAIN_S", 0.0)
    link = linked(decode, prefill)
    connection = link.connection
    lines_are_lost(decode, prefill)
    assert link_of(decode) is link and link.machine.state is PeerState.READY and link.connection is connection
    assert decode.received(prefill.request("b")) == [True]
    assert link.connection is connection and prefill.server.counts()["GetManifests"] == 1
    decode.see_workers()
    prefill.end_workers()
    until_none(decode.loop, decode.loop._receives._links)


def test_a_peer_that_lives_though_its_lines_were_closed_is_linked_anew(prefill, other, decode, monkeypatch):
    monkeypatch.setattr(process_watch, "AGAIN_S", 0.0)
    first = linked(decode, prefill)
    for life in prefill.lives:
        for line in list(life._hub._arriving):
            line.shutdown(socket.SHUT_RDWR)
    until_none(decode.loop, decode.loop._receives._links)
    assert decode.received(prefill.request("b"), other.request("c", remote_engine_id="p-1")) == [True, True]
    link = link_of(decode)
    assert link is not first and prefill.server.counts()["GetManifests"] == 2
    decode.see_workers()
    connection = link.connection
    other.end_workers()
    until_in(decode.loop, lambda: len(decode.loop._receives._links._links) == 1, "the other link to be gone")
    assert link_of(decode) is link and link.connection is connection, "what was closed before it was linked counts"


def test_who_writes_and_who_is_written_into_let_go_of_one_that_ended(config: Config) -> None:
    with contextlib.closing(Writer(config)) as writer, contextlib.closing(Target(config)) as target:
        assert pushed(writer, target)
        freed(writer, "a")
        for loop in (target.loop, *writer.loops):
            watches = loop._processes._watches
            until_in(loop, lambda watches=watches: all(w.here for w in watches.values()), "lines")  # type: ignore[misc]
        in_its_thread(target.loop, lambda _: target.loop._processes.close())
        for loop in writer.loops:
            assert loop._pushes is not None
            until_none(loop, loop._pushes._links)
    with contextlib.closing(Target(config)) as target:
        with contextlib.closing(Writer(config)) as writer:
            assert pushed(writer, target)
            target.see_workers()
            [link] = target.loop._receives._asked._links.values()
        until_none(target.loop, target.loop._receives._asked)
        assert link.plan is None


def test_a_write_into_one_that_ended_fails(writer: Writer, target: Target) -> None:
    hold_writes(writer, target)
    for loop in writer.loops:
        watches = loop._processes._watches
        until_in(loop, lambda watches=watches: all(w.here for w in watches.values()), "lines")  # type: ignore[misc]
    in_its_thread(target.loop, lambda _: target.loop._processes.close())
    freed(writer, "a")
    until(lambda: not any(writer.pushes()), "the pushes to end with it")

"""What becomes of links and of what was asked for on them when a peer does not answer, ends or is replaced."""

from __future__ import annotations

import contextlib
import struct
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.ports import free_port
from tests.support.worker.decode_instance import Decode, Prefill, in_its_thread, until_in
from tests.support.worker.writer import CONFIG, Writer, freed, pushed
from vllm_pd_connector.bounded import Pieces
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.protocol.peer import REFUSAL_S, PeerKey, PeerState
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker.peers.event_queue import EventQueue
from vllm_pd_connector.worker.peers.pool import IDLE_LINK_S, Links
from vllm_pd_connector.worker.receive.read_link import ReadLink


def leave_a_read_that_may_still_write(decode: Decode, prefill: Prefill) -> None:
    decode.transport.faults.failures.append(TransferError("unclear", terminal=False))
    assert decode.received(prefill.request("a")) == [False]
    assert decode.quarantined == {"a"} and not decode.drained
    flight = decode.active("a").in_flight
    until_in(decode.loop, lambda: not flight.transfers, "the read from the other rank to end")
    decode.see_workers()


def test_another_life_at_its_address_says_nothing_of_the_workers_of_the_last(prefill, decode):
    leave_a_read_that_may_still_write(decode, prefill)
    port = prefill.server.port
    decode.hear_the_end_of(SimpleNamespace(close=prefill.server.close))
    with contextlib.closing(Prefill(port=port)) as again:
        assert decode.received(again.request("b")) == [True]
        active = decode.active("a")
        assert active.in_flight.watches[0].here
        in_its_thread(decode.loop, lambda now: decode.loop._receives._look(active, now, now, []))
        decode.collect()
        assert not decode.drained, "nothing proved that the worker ended"
        prefill.end_workers()
        decode.until(lambda: decode.drained == {"a"}, "the quarantine to end")


def test_a_lost_connection_says_nothing_of_what_another_worker_writes(prefill, decode):
    leave_a_read_that_may_still_write(decode, prefill)
    decode.transport.faults.failures.append(PeerLost("connection reset"))
    assert decode.received(prefill.request("b")) == [False]
    decode.collect()
    assert "a" not in decode.drained
    prefill.end_workers()
    decode.until(lambda: "a" in decode.drained, "the quarantine to end")


def test_a_refusal_of_whoever_is_there_is_asked_again_after_a_while(target, monkeypatch):
    now = [0.0]
    links = target.loop._receives._asked
    get = links.get
    monkeypatch.setattr(links, "get", lambda key, engine_id, at: get(key, engine_id, at + now[0]))
    with contextlib.closing(Writer(CONFIG, free_port())) as writer:
        port = writer.server.port
        writer.server.set_manifests([b"junk"] * len(writer.workers))
        assert target.received(target.request(writer, "a")) == [False]
        [link] = links._links.values()
        assert link.machine.state is PeerState.REFUSED
        assert target.received(target.request(writer, "b")) == [False]
        assert writer.server.counts()["GetManifests"] == 1, "the refusal was forgotten"
        target.hear_the_end_of(SimpleNamespace(close=writer.server.close))
    with contextlib.closing(Writer(CONFIG, port)) as second:
        now[0] = REFUSAL_S
        assert pushed(second, target, "d", "c")
        freed(second, "c")


def test_who_answers_in_another_version_of_the_protocol_is_refused_at_once(writer, target, monkeypatch):
    encode, later = m.encode, struct.pack("!H", m.PROTOCOL_VERSION + 1)

    def encode_later(seq: int, message: Any) -> bytes:
        frame = encode(seq, message)
        return frame[:4] + later + frame[6:] if isinstance(message, m.Manifests) else frame

    monkeypatch.setattr(m, "encode", encode_later)
    assert target.received(target.request(writer, "a")) == [False]
    [link] = target.loop._receives._asked._links.values()
    assert link.machine.state is PeerState.REFUSED
    assert writer.server.counts()["GetManifests"] == 1


def test_a_link_in_use_is_not_idle_however_long_nobody_asked_for_it():
    used = {"held": True}
    user = SimpleNamespace(uses=lambda link: used["held"], lost=lambda *_: None)
    nothing: Any = SimpleNamespace()
    processes: Any = SimpleNamespace(losses=0)
    shared: Any = Config(), nothing, nothing, 0, nothing, processes, EventQueue(), user
    links = Links(*shared, lambda *_: None, ReadLink)
    key = PeerKey("127.0.0.1", 5600, "a" * 32)
    link = links.get(key, "p-0", 0.0)
    late = IDLE_LINK_S + 1
    links.tick(late)
    assert links.get(key, "p-0", 0.0) is link
    link.used_at = 0.0
    links.tick(late)
    deadline = links.next_deadline()
    assert deadline is not None and deadline > late, "a thread that sleeps until then never sleeps"
    used["held"] = False
    links.tick(deadline)
    assert links.next_deadline() is None


def test_an_order_that_cannot_begin_costs_no_other(prefill, decode, monkeypatch):
    get = Links.get

    def broken(self: Links, key: PeerKey, engine_id: str, now: float, **rest: Any) -> Any:
        if engine_id == "broken":
            raise RuntimeError("a defect")
        return get(self, key, engine_id, now, **rest)

    monkeypatch.setattr(Links, "get", broken)
    requests = [prefill.request("before"), prefill.request("a", remote_engine_id="broken"), prefill.request("after")]
    turn = replace(prefill.request("turn", remote_engine_id="broken"), spare=True)
    decode.loop.submit([*requests, turn], [])
    assert decode.wait_for("before", "a", "after") == [True, False, True]
    decode.until(lambda: decode.spared == {"turn"}, "the turn to be computed")
    assert decode.failures == {"internal": 2}


@pytest.mark.parametrize("decode", [{"handshake_timeout": 5.0}], indirect=True)
def test_a_peer_that_meets_a_defect_when_it_is_linked_costs_no_other(prefill, decode, monkeypatch):
    connect = ReadLink.connecting

    def broken(link: ReadLink, *args: Any) -> Pieces[str]:
        verdict = yield from connect(link, *args)
        if link.engine_id == "p-1":
            raise RuntimeError("a defect")
        return verdict

    monkeypatch.setattr(ReadLink, "connecting", broken)
    with contextlib.closing(Prefill("p-1")) as other:
        assert decode.received(other.request("a", remote_engine_id="p-1"), prefill.request("b")) == [False, True]
        assert decode.failures == {"peer_unreachable": 1}
        [link] = [link for link in decode.loop._receives._links._links.values() if link.engine_id == "p-1"]
        assert not link.ranks, "a rank stays connected"


def test_a_peer_whose_transport_cannot_let_go_of_it_is_linked_again(prefill, decode, monkeypatch):
    """The transport's defect must not be in the way of the link's next state, nor of an idle link's end."""
    connect, once = ReadLink.connecting, iter([True])

    def broken(link: ReadLink, *args: Any) -> Pieces[str]:
        verdict = yield from connect(link, *args)
        if next(once, False):
            raise RuntimeError("a defect")
        return verdict

    monkeypatch.setattr(ReadLink, "connecting", broken)
    monkeypatch.setattr(LoopbackTransport, "disconnect", lambda *_: 1 // 0)
    assert decode.received(prefill.request("a"), prefill.request("b")) == [True, True]
    links = decode.loop._receives._links
    in_its_thread(decode.loop, lambda _: links._drop_idle(time.monotonic() + 2 * IDLE_LINK_S))
    assert not links._links
    assert decode.received(prefill.request("c")) == [True]


def test_an_order_to_push_that_cannot_be_obeyed_costs_no_other(writer, target, monkeypatch):
    get, failed = Links.get, []

    def broken(self: Links, key: PeerKey, engine_id: str, now: float) -> Any:
        if engine_id == "decode-1" and not failed:
            failed.append(engine_id)
            raise RuntimeError("a defect")
        return get(self, key, engine_id, now)

    monkeypatch.setattr(Links, "get", broken)
    assert not pushed(writer, target)
    freed(writer, "a")
    assert pushed(writer, target, "e", "b")
    freed(writer, "b")


def test_a_link_of_which_the_weights_were_compared_serves_also_requests_that_have_compared_others(prefill, decode):
    """Weights that are changed in place link nobody anew."""
    assert decode.received(prefill.request("a")) == [True]
    assert decode.received(replace(prefill.request("b"), same_weights=True)) == [True]
    assert prefill.server.counts()["GetManifests"] == 1

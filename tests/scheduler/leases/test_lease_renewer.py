"""The lease keeper on its own: how often it renews. Its clock is the test's, its client sends nothing."""

from __future__ import annotations

import socket
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.descriptors import no_descriptor_left
from tests.support.scheduler.halves import hand_over, make_half, make_request, serving_half, until
from vllm_pd_connector.errors import Busy
from vllm_pd_connector.protocol.params.parse import parse_remote_prefill
from vllm_pd_connector.protocol.wire.fields import MAX_LEASES, Reading
from vllm_pd_connector.protocol.wire.messages import Release, Released, Renew
from vllm_pd_connector.protocol.wire.push_messages import DeclinePush, PrefillRef
from vllm_pd_connector.scheduler.leases import lease_renewer


@pytest.mark.parametrize(("lease_seconds", "renewals"), [(1e-9, 20), (0.3, 10), (0.6, 5)])
def test_a_lease_that_its_parameters_call_tiny_is_not_renewed_without_a_pause(monkeypatch, lease_seconds, renewals):
    producer, _ = serving_half("kv_producer")
    params = hand_over(producer)
    producer.shutdown()
    remote = parse_remote_prefill(params)
    sent: list[Any] = []
    now = [0.0]
    monkeypatch.setattr(lease_renewer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tried = lease_renewer.LeaseRenewer(None, 30.0)
    tried._client = SimpleNamespace(send=lambda _, request, __: sent.append(request), receive=lambda: [])
    reading = Reading(remote.lease.request_id, remote.lease.nonce, bytes(16))
    tried._add("tcp://a", reading, lease_seconds)
    for turn in range(1, 1051):  # 1.05 s
        now[0] = turn / 1000
        tried._turn()
    assert all(isinstance(request, Renew) for request in sent)
    assert len(sent) == pytest.approx(renewals, abs=1)


def test_prefills_that_are_waited_for_are_kept_in_few_messages_to_those_who_have_them(monkeypatch):
    now, sent = [0.0], []
    monkeypatch.setattr(lease_renewer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tried = lease_renewer.LeaseRenewer(None, 30.0)
    tried._client = SimpleNamespace(send=lambda address, request, _: sent.append((address, request)), receive=list)
    refs = [PrefillRef(f"t-{i}", None) for i in range(MAX_LEASES + 3)]
    for i, ref in enumerate(refs):
        tried._add_prefill(f"d-{i}", lambda i=i: (None, "tcp://a", "tcp://b")[min(i, 2)], ref)
    for now[0] in (9.9, 10.0, 10.1):
        tried._turn()
    assert [(address, len(request.prefills)) for address, request in sent] == [
        ("tcp://a", 1), ("tcp://b", MAX_LEASES), ("tcp://b", 1),
    ]  # fmt: skip
    assert [ref for _, request in sent for ref in request.prefills] == refs[1:], "where the first is, nobody knows"
    tried._prefills.clear()
    now[0] = 20.0
    tried._turn()
    assert len(sent) == 3 and tried._prefills_due == float("inf")


@pytest.mark.parametrize(("own", "every"), [(120.0, 10.0), (30.0, 10.0), (6.0, 2.0)])
def test_a_prefill_is_kept_for_a_side_that_gives_shorter_leases_than_this_one(monkeypatch, own, every):
    """What lease it will get is not known; it was lost after 30 s where decode alone was told 120."""
    now, sent = [0.0], []
    monkeypatch.setattr(lease_renewer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tried = lease_renewer.LeaseRenewer(None, own)
    tried._client = SimpleNamespace(send=lambda address, request, _: sent.append(now[0]), receive=list)
    tried._add_prefill("d-1", lambda: "tcp://a", PrefillRef("t-1", None))
    for second in range(1, 61):
        now[0] = float(second)
        tried._turn()
    assert sent == [every * i for i in range(1, int(60 / every) + 1)]


@pytest.mark.parametrize("kind", [Release, DeclinePush])
def test_what_is_given_back_finds_room_later(monkeypatch, kind):
    """As with too many servers that owe answers. Its lease would end by time alone."""
    now, sent, full = [10.0], [], [True]
    monkeypatch.setattr(lease_renewer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tried = lease_renewer.LeaseRenewer(None, 30.0)
    tried._thread = threading.current_thread()

    def send(address: str, request: Any, _: float) -> int:
        if full:
            raise Busy("512 other servers owe answers")
        sent.append(request)
        return 1

    answers: list[Any] = []
    tried._client = SimpleNamespace(send=send, receive=lambda: [answers.pop()] if answers else [])
    if kind is Release:
        tried.drop("tcp://a", Reading("p-1", bytes(16), bytes(16)), release=True)
    else:
        tried.decline("tcp://a", PrefillRef("t-1", None), 9.0)
    tried._turn()
    assert not sent and tried._errands.next_deadline() == 10.5
    full.clear()
    now[0] = 10.5
    tried._turn()
    [message] = sent
    assert isinstance(message, kind) and getattr(message, "waited_s", 1.5) == 1.5, "it tells its age, of now"
    answers.append((1, Released()))
    tried._turn()
    assert len(sent) == 1 and tried._errands.next_deadline() is None and not tried._asked


def test_an_instance_that_ends_declines_the_prefills_that_it_kept():
    sent: list[Any] = []
    tried = lease_renewer.LeaseRenewer(None, 30.0)
    tried._client = SimpleNamespace(send=lambda address, request, _: sent.append((address, request)))
    tried._add_prefill("d-1", lambda: "tcp://a", PrefillRef("t-1", None))
    tried._add_prefill("d-2", lambda: None, PrefillRef("t-2", None))
    tried._end()
    [(address, declined)] = sent
    assert (address, declined.prefill) == ("tcp://a", PrefillRef("t-1", None)), "where the other is, nobody knows"


def test_addresses_that_never_answer_stop_no_renewal_at_those_that_do(monkeypatch):
    """Parameters that nobody has signed name as many as an unauthenticated peer likes."""
    monkeypatch.setattr("vllm_pd_connector.sidechannel.client.MAX_SERVERS", 4)
    producer, _ = serving_half("kv_producer", kv_lease_duration=6.0)
    half, _ = make_half("kv_consumer")
    other = hand_over(serving_half("kv_producer")[0])
    with socket.create_server(("", 0)) as silent:
        often = other["pd_connector"] | {"lease_seconds": 0.2}
        dead = {"remote_port": silent.getsockname()[1], "pd_connector": often}
        for host in range(2, 9):
            half.on_new_request(make_request(f"dead-{host}", other | dead | {"remote_host": f"127.0.0.{host}"}))
        asking = half.consumer._renewer

        def owed() -> int:  # its thread makes and forgets links meanwhile
            return sum(len(link.pending) for link in list(asking._client._links.values()))

        until(lambda: hasattr(asking, "_client") and owed() >= 4, "all servers to owe answers")
        half.on_new_request(make_request("d-1", hand_over(producer)))
        until(lambda: producer.producer._server.counts().get("Renew", 0) >= 6, "renewals over two lease durations")
        assert not producer.producer.drain()


@pytest.mark.parametrize("used", [False, True])
def test_an_instance_that_ends_keeps_no_descriptor_of_its_renewals(used):
    """An engine in the process of its caller is followed by others."""
    tried = lease_renewer.LeaseRenewer(None, 30.0)
    if used:
        tried.drop_prefill("d-1")
    tried.close()
    tried.drop_prefill("d-2")
    assert tried._wake._closed


def test_renewal_that_finds_no_descriptor_begins_when_there_is_one(caplog):
    """By itself: a request may wait for the answer to the very command, and none other come."""
    tried = lease_renewer.LeaseRenewer(None, 30.0)
    begun = threading.Event()
    with no_descriptor_left():
        tried._submit(begun.set)
        until(lambda: "lease renewal cannot begin" in caplog.text, "it to be tried")
    assert begun.wait(20.0)
    tried.close()


def test_an_instance_that_ends_does_not_wait_for_renewals_that_cannot_begin():
    tried = lease_renewer.LeaseRenewer(None, 30.0)
    with no_descriptor_left():
        tried.drop_prefill("d-1")
        tried.close()
        assert not tried._thread.is_alive() and tried._wake._closed


def test_what_is_given_back_as_an_instance_ends_is_told_though_its_thread_begins_late(monkeypatch):
    """As a request that came to an engine which ends: the first for which anything is told."""
    producer, _ = serving_half("kv_producer", kv_lease_duration=600.0)  # so that only a release ends the lease
    half, _ = make_half("kv_consumer")
    renewer = half.consumer._renewer
    begun = renewer._begun
    monkeypatch.setattr(renewer, "_begun", lambda: until(lambda: renewer._closed, "it to be closed") or begun())
    request = make_request("d-1", hand_over(producer))
    half.on_new_request(request)
    half.request_finished(request, ([],))
    half.shutdown()
    until(producer.producer.drain, "the lease to end")


def test_renewal_for_which_no_thread_is_left_begins_with_the_next_command(caplog, monkeypatch):
    """A scheduler asks for it, whose engine is not to end with it."""

    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    tried, begun = lease_renewer.LeaseRenewer(None, 30.0), threading.Event()
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none)
        tried._submit(begun.set)
    assert "lease renewal cannot begin" in caplog.text
    tried.drop_prefill("d-1")
    assert begun.wait(20.0)
    tried.close()


def broken(*_: object) -> Any:
    raise OSError("a defect")


def test_what_goes_wrong_for_one_request_is_nobody_elses(caplog):
    """Commands and answers that come together: one of them fails, the others are carried out in the same turn."""
    tried, done = lease_renewer.LeaseRenewer(None, 30.0), []
    numbers, tried._thread = iter((1, 2)), threading.current_thread()
    tried._client = SimpleNamespace(send=lambda *_: next(numbers), receive=lambda: [(1, "one"), (2, "two")])
    tried._commands.append(broken)
    for answered in (broken, done.append):
        tried.find("tcp://a", "conversation", answered)
    tried._turn()
    assert done == ["two"] and not tried._commands and "a defect" in caplog.text


def test_who_asks_is_answered_whatever_goes_wrong():
    tried, done = lease_renewer.LeaseRenewer(None, 30.0), []
    tried._client = SimpleNamespace(send=broken, receive=list)
    tried._ask("a", Renew(()), done.append)
    assert isinstance(done[0], OSError)


def test_an_end_that_meets_a_defect_is_an_end():
    """Else an engine waits for five seconds, and the thread stays."""
    tried, begun = lease_renewer.LeaseRenewer(None, 30.0), threading.Event()
    tried.keep_prefill("d-1", broken, PrefillRef("t-1", None))
    tried._submit(begun.set)
    assert begun.wait(20.0)
    tried.close()
    assert not tried._thread.is_alive()


def test_renewal_goes_on_when_it_could_not_wait(caplog, monkeypatch):
    """The same thread with the same client: who has asked by it waits for the answer."""
    waits, failed = lease_renewer.wait, []

    def no_memory(*all_of_it: Any) -> None:
        if not failed:
            failed.append(True)
            raise MemoryError
        waits(*all_of_it)

    monkeypatch.setattr(lease_renewer, "AGAIN_S", 0.01)
    monkeypatch.setattr(lease_renewer, "wait", no_memory)
    tried, begun = lease_renewer.LeaseRenewer(None, 30.0), threading.Event()
    tried._submit(begun.set)
    assert begun.wait(20.0) and failed
    assert tried._thread is not None and tried._thread.is_alive() and "could not wait" in caplog.text
    tried.close()


def test_a_lease_whose_age_is_not_known_is_renewed_soon_and_then_as_often_as_needed(monkeypatch):
    """A decode leg may come when two thirds of it are over, and queue."""
    sent: list[float] = []
    now = [0.0]
    monkeypatch.setattr(lease_renewer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tried = lease_renewer.LeaseRenewer(None, 30.0)
    tried._client = SimpleNamespace(send=lambda *_: sent.append(now[0]), receive=lambda: [])
    tried._add("tcp://a", Reading("p-1", bytes(16), bytes(16)), 30.0)
    for turn in range(250):
        now[0] = turn / 10
        tried._turn()
    assert sent == pytest.approx([2.0, 12.0, 22.0], abs=0.11)


def test_a_new_lease_has_no_other_renewed(monkeypatch):
    sent: list[Renew] = []
    now = [0.0]
    monkeypatch.setattr(lease_renewer, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tried = lease_renewer.LeaseRenewer(None, 30.0)
    tried._client = SimpleNamespace(send=lambda _, request, __: sent.append(request), receive=lambda: [])
    for second in range(30):
        tried._add("tcp://a", Reading(f"p-{second}", bytes(16), bytes(16)), 30.0)
        for turn in range(10):
            now[0] = second + turn / 10
            tried._turn()
    renewals = [reading.request_id for request in sent for reading in request.leases]
    assert 3 <= renewals.count("p-0") <= 4 and renewals.count("p-25") == 1

"""Bootstrap over HTTP: one answer to every question, and questions that end."""

from __future__ import annotations

import contextlib
import http.client
import socket
import socketserver
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.descriptors import no_descriptor_left
from tests.support.ports import free_port
from tests.support.transport.ends import until
from vllm_pd_connector.errors import InvalidConfig, ProtocolError
from vllm_pd_connector.protocol.params.bootstrap import MAX_REGISTRATION_BYTES, EngineRegistry, HostPort, encode_answer
from vllm_pd_connector.sidechannel import bootstrap_http
from vllm_pd_connector.sidechannel.bootstrap_http import (
    BootstrapServer,
    EngineDirectory,
    EngineRegistration,
    query,
    register_engine,
)

HOST = "127.0.0.1"
ANSWER = encode_answer(0, "e-0", HostPort(HOST, 5600), 1, 1)


@pytest.fixture(params=[HOST, "::1"])
def server(request: pytest.FixtureRequest) -> Iterator[HostPort]:
    host: str = request.param
    made = BootstrapServer(host, free_port(host), EngineRegistry(ANSWER))
    yield HostPort(host, made.port)
    made.close()


def status_of(place: HostPort, method: str, path: str) -> int:
    connection = http.client.HTTPConnection(place.host, place.port, timeout=10)
    connection.request(method, path)
    status = connection.getresponse().status
    connection.close()
    return status


def test_a_question_is_answered_and_nothing_else_is(server: HostPort) -> None:
    assert query(server) == {"e-0": HostPort(HOST, 5600)}
    assert [status_of(server, "GET", path) for path in ("/query", "/", "/register", "/query/x")] == [200, 404, 404, 404]
    assert [status_of(server, "POST", path) for path in ("/register", "/query")] == [409, 404]
    assert status_of(server, "PUT", "/register") == 501


def test_no_name_is_looked_up_when_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getfqdn", lambda *_: pytest.fail("a slow name server would hold up the engine"))
    BootstrapServer(HOST, free_port(), EngineRegistry(ANSWER)).close()


OTHER = encode_answer(1, "e-1", HostPort(HOST, 5601), 1, 1)


def test_other_engines_of_a_server_register_and_are_told_of(server: HostPort) -> None:
    register_engine(server, OTHER)
    register_engine(server, OTHER)
    assert query(server) == {"e-0": HostPort(HOST, 5600), "e-1": HostPort(HOST, 5601)}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (
            encode_answer(0, "e-9", HostPort(HOST, 5601), 1, 1),
            "rank 0 with engine_id 'e-9' there, rank 0 with 'e-0' here",
        ),
        (
            encode_answer(1, "e-0", HostPort(HOST, 5601), 1, 1),
            "rank 1 with engine_id 'e-0' there, rank 0 with 'e-0' here",
        ),
        (b"{}", "registration of 0 engines"),
        (b"not json", "not in the form"),
        (b" " * (MAX_REGISTRATION_BYTES + 1), "413"),
    ],
    ids=["taken rank", "taken engine", "nobody", "junk", "too long"],
)
def test_what_is_no_registration_changes_nothing(server: HostPort, data: bytes, reason: str) -> None:
    with pytest.raises(ProtocolError, match=reason):
        register_engine(server, data)
    assert query(server) == {"e-0": HostPort(HOST, 5600)}


def test_engines_of_other_hosts_register_only_where_strangers_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    def from_elsewhere(self: Any) -> tuple[socket.socket, Any]:
        connection, (_, port) = ask(self)
        return connection, ("203.0.113.5", port)

    ask = bootstrap_http._Server.get_request
    monkeypatch.setattr(bootstrap_http._Server, "get_request", from_elsewhere)
    for unauthenticated in (False, True):
        server = BootstrapServer(HOST, free_port(), EngineRegistry(ANSWER), unauthenticated=unauthenticated)
        place = HostPort(HOST, server.port)
        if unauthenticated:
            register_engine(place, OTHER)
        else:
            with pytest.raises(ProtocolError, match="403"):
                register_engine(place, OTHER)
        assert ("e-1" in query(place)) is unauthenticated
        server.close()


def test_an_engine_registers_when_the_first_one_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_http, "RETRY_REGISTRATION_S", 0.05)
    place, asked = HostPort(HOST, free_port()), list[HostPort]()

    def counted(leader: HostPort, own: bytes) -> None:
        asked.append(leader)
        register_engine(leader, own)

    monkeypatch.setattr(bootstrap_http, "register_engine", counted)
    joining = EngineRegistration([HostPort(HOST, free_port()), place], OTHER)
    until(lambda: asked.count(place) >= 2, "two rounds without an answer")
    server = BootstrapServer(*place, EngineRegistry(ANSWER))
    until(lambda: "e-1" in query(place), "the registration")
    joining.close()
    server.close()


def test_a_registration_that_nobody_takes_ends_when_it_is_closed() -> None:
    joining = EngineRegistration([HostPort(HOST, free_port())], OTHER)
    joining.close()
    assert not joining._thread.is_alive()


def test_one_who_asks_nothing_delays_nobody(server: HostPort) -> None:
    with socket.create_connection(server), socket.create_connection(server) as slow:
        slow.sendall(b"GET /que")
        assert query(server) == {"e-0": HostPort(HOST, 5600)}


def dripping(place: HostPort, part: bytes) -> bytes:
    """What is answered to one who sends a question in small parts and never ends it."""
    with socket.create_connection(place) as slow:
        slow.settimeout(0.02)
        limit = time.monotonic() + 20
        while time.monotonic() < limit:
            try:
                slow.sendall(part)
                return slow.recv(100)
            except TimeoutError:
                continue
            except OSError:
                return b""
    raise AssertionError("the question goes on")


def test_a_question_that_goes_on_in_small_parts_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_http, "QUESTION_S", 0.3)
    server = BootstrapServer(HOST, free_port(), EngineRegistry(ANSWER))
    assert dripping(HostPort(HOST, server.port), b"x") == b""
    server.close()


def test_those_who_ask_nothing_are_bounded_and_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_http, "MAX_QUESTIONS", 2)
    others = set(threading.enumerate())

    def wait_for_questions(count: int) -> None:
        limit = time.monotonic() + 20
        while sum("process_request" in thread.name for thread in set(threading.enumerate()) - others) != count:
            assert time.monotonic() < limit, f"{count} questions are open"
            time.sleep(0.002)

    busy = BootstrapServer(HOST, free_port(), EngineRegistry(ANSWER))
    place = HostPort(HOST, busy.port)
    with socket.create_connection(place), socket.create_connection(place):
        wait_for_questions(2)
        with pytest.raises(ProtocolError, match="does not answer"):
            query(place)
    wait_for_questions(0)
    assert query(place) == {"e-0": HostPort(HOST, 5600)}
    busy.close()


def test_without_descriptors_questions_wait_and_no_core_burns(monkeypatch: pytest.MonkeyPatch) -> None:
    accept, attempts, tried = socketserver.TCPServer.get_request, [], threading.Event()

    def counted(server: socketserver.TCPServer) -> tuple[socket.socket, Any]:
        attempts.append(server)
        tried.set()
        return accept(server)

    monkeypatch.setattr(socketserver.TCPServer, "get_request", counted)
    server = BootstrapServer(HOST, free_port(), EngineRegistry(ANSWER))
    with socket.socket() as asker:
        asker.settimeout(30)
        with no_descriptor_left():
            asker.connect((HOST, server.port))
            assert tried.wait(20)
            time.sleep(0.5)
            assert len(attempts) < 5
        asker.sendall(b"GET /query HTTP/1.0\r\n\r\n")
        assert asker.recv(100).startswith(b"HTTP/1.0 200 OK")
    server.close()


def test_a_taken_port_is_a_configuration_error() -> None:
    with socket.create_server((HOST, 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidConfig, match=f"bootstrap_port: cannot listen on {HOST} port {port}"):
            BootstrapServer(HOST, port, EngineRegistry(ANSWER))


def test_an_engine_is_found_and_the_answer_is_kept_for_a_while(
    server: HostPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = EngineDirectory(10.0)
    found = directory.find(server, "e-0")
    assert found.result(10) == HostPort(HOST, 5600)
    assert directory.find(server, "e-0") is found
    monkeypatch.setattr(bootstrap_http, "KNOWN_S", 0.0)
    again = directory.find(server, "e-0")
    assert again is not found and again.result(10) == HostPort(HOST, 5600)


def refusal(answer: Future[HostPort]) -> str:
    with pytest.raises(ProtocolError) as refused:
        answer.result(20)
    return str(refused.value)


def test_an_engine_that_is_not_there_is_refused_with_those_that_are(server: HostPort) -> None:
    directory = EngineDirectory(10.0)
    first = directory.find(server, "e-old")
    assert "'e-old' is not at bootstrap" in refusal(first) and "has e-0" in refusal(first)
    assert directory.find(server, "e-old") is not first


def test_an_instance_that_still_starts_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    port, refused = free_port(), threading.Event()

    def asking(*arguments: Any) -> dict[str, HostPort]:
        try:
            return query(*arguments)
        except ProtocolError:
            refused.set()
            raise

    monkeypatch.setattr(bootstrap_http, "query", asking)
    found = EngineDirectory(20.0).find(HostPort(HOST, port), "e-0")
    assert refused.wait(20)
    server = BootstrapServer(HOST, port, EngineRegistry(ANSWER))
    assert found.result(20) == HostPort(HOST, 5600)
    server.close()


def test_nobody_there_is_an_error_within_the_patience() -> None:
    began = time.monotonic()
    assert "does not answer" in refusal(EngineDirectory(0.3).find(HostPort(HOST, free_port()), "e-0"))
    assert time.monotonic() - began < 5


def test_one_who_never_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_http, "QUESTION_S", 0.2)
    with socket.create_server((HOST, 0)) as silent:
        assert "does not answer" in refusal(EngineDirectory(0.3).find(HostPort(HOST, silent.getsockname()[1]), "e-0"))


def test_one_who_answers_in_small_parts_is_given_up_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_http, "QUESTION_S", 0.3)

    def drip() -> None:
        connection, _ = slow.accept()
        with connection, contextlib.suppress(OSError):
            connection.sendall(b"HTTP/1.1 200 OK\r\nX-Long: ")
            while not over.wait(0.02):
                connection.sendall(b"x")

    over = threading.Event()
    with socket.create_server((HOST, 0)) as slow:
        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        assert "timed out" in refusal(EngineDirectory(0.3).find(HostPort(HOST, slow.getsockname()[1]), "e-0"))
    over.set()
    thread.join()


def test_another_service_is_no_prefill_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bootstrap_http, "RETRY_S", 20.0)  # one attempt, which has so long
    page = BootstrapServer(HOST, free_port(), SimpleNamespace(answer=b"<html>"))
    assert "not in the form" in refusal(EngineDirectory(0.1).find(HostPort(HOST, page.port), "e-0"))
    page.close()


def test_what_goes_wrong_unforeseen_ends_the_question_too(server: HostPort, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(where: HostPort, seconds: float) -> dict[str, HostPort]:
        raise RuntimeError("a defect")

    monkeypatch.setattr(bootstrap_http, "query", broken)
    assert "a defect" in refusal(EngineDirectory(10.0).find(server, "e-0"))


def test_a_question_for_which_no_thread_is_left_fails_its_request_alone(
    server: HostPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    directory = EngineDirectory(10.0)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", none)
        assert "new thread" in refusal(directory.find(server, "e-0"))
    assert directory.find(server, "e-0").result(10.0), "it is asked anew"


def test_parameters_that_name_ever_other_engines_do_not_start_ever_more_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(bootstrap_http, "MAX_QUESTIONS", 2)
    directory = EngineDirectory(3600.0)
    nobody = HostPort(HOST, free_port())
    open_ones = [directory.find(nobody, f"e-{n}") for n in range(2)]
    assert "2 others do not answer" in refusal(directory.find(nobody, "e-2"))
    assert directory.find(nobody, "e-0") is open_ones[0], "who asks what is asked already gets that answer"
    directory.close()
    for answer in open_ones:
        assert "does not answer" in refusal(answer)


def test_a_closed_directory_asks_nobody_any_more() -> None:
    others = set(threading.enumerate())
    directory = EngineDirectory(3600.0)
    found = directory.find(HostPort(HOST, free_port()), "e-0")
    directory.close()
    assert "does not answer" in refusal(found)
    deadline = time.monotonic() + 20
    while any(thread.name == "pd-bootstrap-query" for thread in set(threading.enumerate()) - others):
        assert time.monotonic() < deadline, "a question goes on"
        time.sleep(0.01)

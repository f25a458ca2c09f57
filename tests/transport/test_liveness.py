"""Links between workers: identity, the ends of both sides, and bytes that no dialler of ours would send."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.descriptors import no_descriptor_left
from tests.support.forked import Child
from tests.support.processor_time import seconds_of
from tests.support.transport.ends import until
from tests.support.transport.line_proxy import Proxy
from vllm_pd_connector.errors import ProtocolError, TransferError
from vllm_pd_connector.transport import liveness
from vllm_pd_connector.transport.greeting import answered, framed
from vllm_pd_connector.transport.liveness import SAYS, LivenessHub
from vllm_pd_connector.transport.liveness_link import LivenessLink, LivenessState

HOST = "127.0.0.1"


@pytest.fixture
def exchange() -> Iterator[Callable[[str], LivenessHub]]:
    made: list[LivenessHub] = []

    def make(name: str, host: str = HOST) -> LivenessHub:
        made.append(LivenessHub(host, name))
        return made[-1]

    yield make
    for one in made:
        one.close()


def opened(here: LivenessHub, there: LivenessHub, name: str, host: str = HOST) -> LivenessLink:
    line = here.dial(host, there.port, name, 10.0)
    until(lambda: line.state is not LivenessState.DIALLING, "an answer")
    assert line.state is LivenessState.OPEN, line.reason
    return line


def lost(line: LivenessLink) -> str:
    until(lambda: line.state is LivenessState.LOST, "the loss of a line")
    return line.reason


@pytest.mark.parametrize(("own", "peer"), [("::1", "::1"), (HOST, "::1"), ("::1", HOST)])
def test_a_line_speaks_the_peer_s_version_of_ip(exchange: Callable[..., LivenessHub], own: str, peer: str) -> None:
    opened(exchange("here", own), exchange("there", peer), "there", peer)


@pytest.mark.parametrize("host", [HOST, "::1"])
def test_who_asks_is_told_from_where_it_is_seen(exchange: Callable[..., LivenessHub], host: str) -> None:
    here, there, older = exchange("here", host), exchange(f"{SAYS}there", host), exchange("there", host)
    assert opened(here, there, f"{SAYS}there", host).direct is True
    assert opened(here, older, "there", host).direct is None


def test_what_a_proxy_closes_is_no_end_of_the_process(exchange: Callable[..., LivenessHub]) -> None:
    here, there = exchange("here"), exchange(f"{SAYS}there")
    with contextlib.closing(Proxy(there.port)) as proxy:
        line = here.dial(HOST, proxy.port, f"{SAYS}there", 10.0)
        proxy.carry()
        until(lambda: line.state is LivenessState.OPEN, "an answer")
    assert "proxy" in lost(line) and not line.ended
    line = opened(here, there, f"{SAYS}there")
    there.close()
    assert "proxy" not in lost(line) and line.ended


@pytest.mark.parametrize("asks", [False, True])
def test_an_answer_is_read_in_any_pieces_and_no_byte_beyond_it(asks: bool) -> None:
    whole = framed(b"there") + (framed(b"127.0.0.1 7") if asks else b"")
    for cut in range(len(whole)):
        assert answered(whole[:cut], b"there", asks) is None
    assert answered(whole, b"there", asks) == (b"127.0.0.1 7" if asks else b"")
    wrong = [whole + b"x", framed(b"their"), b"\xff", *([framed(b"there") + b"\0\0\1\1"] if asks else [])]
    for answer in wrong:
        with pytest.raises(ProtocolError):
            answered(answer, b"there", asks)


def test_another_incarnation_at_the_same_place_is_not_the_peer(exchange: Callable[..., LivenessHub]) -> None:
    here, there = exchange("here"), exchange("second life")
    for name in ("first life", "second lif", "second life of it"):
        assert "another process listens in its place" in lost(here.dial(HOST, there.port, name, 10.0))


def test_nobody_there_is_known_when_dial_returns(exchange: Callable[..., LivenessHub]) -> None:
    here, there = exchange("here"), exchange("there")
    port = there.port
    there.close()
    line = here.dial(HOST, port, "there", 10.0, wait_ms=10_000)
    assert line.state is LivenessState.LOST and "cannot be reached" in line.reason


def test_a_listener_that_never_says_its_name_is_given_up(exchange: Callable[..., LivenessHub]) -> None:
    with socket.create_server((HOST, 0)) as silent:
        line = exchange("here").dial(HOST, silent.getsockname()[1], "there", 0.2)
        assert "did not answer in time" in lost(line)


def test_a_listener_of_another_protocol_is_not_the_peer(exchange: Callable[..., LivenessHub]) -> None:
    with socket.create_server((HOST, 0)) as web:
        line = exchange("here").dial(HOST, web.getsockname()[1], "there", 10.0)
        answer, _ = web.accept()
        with answer:
            answer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            assert "another process listens in its place" in lost(line)


def test_the_end_of_the_peer_is_noticed_at_once(exchange: Callable[..., LivenessHub]) -> None:
    here, there = exchange("here"), exchange("there")
    line = opened(here, there, "there")
    there.close()
    assert "its process ended or its transport was closed" in lost(line) and line.ended


def test_a_line_that_is_given_up_is_ended_on_both_sides(exchange: Callable[..., LivenessHub]) -> None:
    here, there = exchange("here"), exchange("there")
    line = opened(here, there, "there")
    assert len(there._arriving) == 1
    line.give_up("it is of no use")
    assert line.state is LivenessState.LOST and line.reason == "it is of no use"
    until(lambda: line.socket.fileno() < 0, "the end of its socket here")
    until(lambda: not there._arriving, "its end there")


def test_an_address_that_is_none_here_is_an_error_of_the_transport(
    exchange: Callable[..., LivenessHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = exchange("here", "::1")
    made: list[socket.socket] = []
    monkeypatch.setattr(liveness, "_notice_silence", lambda one, *_: made.append(one))
    with pytest.raises(TransferError, match="cannot be dialled at"):
        here.dial("fe80::1%nosuch", 5700, "there", 5.0)
    assert made[0].fileno() < 0


def test_who_dials_after_the_end_is_told_so_and_leaves_no_socket(
    exchange: Callable[..., LivenessHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = exchange("here"), exchange("there")
    here.close()
    made: list[socket.socket] = []
    monkeypatch.setattr(
        liveness, "_notice_silence", lambda one, seconds: made.append(one)
    )  # which the other end calls, too, for what arrived
    with pytest.raises(TransferError, match="this worker's links have ended"):
        here.dial(HOST, there.port, "there", 5.0)
    assert made[0].fileno() < 0


def readable(connection: socket.socket, seconds: float) -> bool:
    with selectors.DefaultSelector() as selector:  # takes descriptors of any number
        selector.register(connection, selectors.EVENT_READ)
        return bool(selector.select(seconds))


def test_a_hub_that_fails_loses_its_peers_and_does_not_say_that_its_process_ended(
    exchange: Callable[..., LivenessHub], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = exchange("here"), exchange("there")
    line, back = opened(here, there, "there"), opened(there, here, "here")

    def broken(now: float) -> None:
        raise OSError(errno.ENOMEM, "no memory")

    monkeypatch.setattr(here, "_look_after_unauthenticated", broken)
    here._wake.set()
    assert lost(line) == "this worker's links have ended" and not line.ended
    assert "liveness links have failed" in caplog.text and "no memory" in caplog.text
    with pytest.raises(TransferError, match="links have ended"):
        here.dial(HOST, there.port, "there", 5.0)
    assert not readable(back.socket, 0.2), "its process goes on, and may still write"
    here.close()
    assert "its process ended" in lost(back)


def test_programs_that_the_process_starts_inherit_no_descriptor(exchange: Callable[..., LivenessHub]) -> None:
    here, there = exchange("here"), exchange("there")
    line = opened(here, there, "there")
    [arrived] = there._arriving
    for one in (line.socket, arrived, here._listener, here._wake, here._selector):
        assert not os.get_inheritable(one.fileno())


@pytest.mark.parametrize(
    ("error", "ended"),
    [(errno.ECONNREFUSED, True), (errno.ECONNRESET, False), (errno.ETIMEDOUT, False), (errno.EHOSTUNREACH, False)],
)
def test_a_line_knows_whether_its_peer_ended_or_fell_silent(error: int, ended: bool) -> None:
    """A packet filter that came into being resets connections of peers that live and take what was written."""

    def recv(size: int) -> bytes:
        raise OSError(error, os.strerror(error))

    broken: Any = SimpleNamespace(recv=recv)
    line = LivenessLink("peer", 0.0, lambda: None, broken, LivenessState.OPEN)
    line.readable()
    assert line.state is LivenessState.LOST and line.ended is ended and os.strerror(error) in line.reason


def test_a_reset_right_behind_the_answer_is_a_loss() -> None:
    """What was queued is read before the reset shows, and a socket that was reset has no peer any more."""

    def none() -> None:
        raise OSError(errno.ENOTCONN, "not connected")

    reset: Any = SimpleNamespace(recv=lambda size: framed(b"peer"), getsockname=lambda: (HOST, 1), getpeername=none)
    line = LivenessLink("peer", 0.0, lambda: None, reset)
    line.readable()
    assert line.state is LivenessState.LOST and "not connected" in line.reason


def test_a_link_that_is_hung_up_ends_on_both_sides(exchange: Callable[..., LivenessHub]) -> None:
    here, there = exchange("here"), exchange("there")
    opened(here, there, "there").hang_up()
    until(lambda: not there._arriving, "its end there")
    until(lambda: not here._lines, "its end here")


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def until_hung_up_on(stranger: socket.socket) -> bytes:
    """What the exchange said before it hung up."""
    stranger.settimeout(30)
    said = b""
    try:
        while received := stranger.recv(100):
            said += received
    except ConnectionResetError:
        pass
    return said


@pytest.mark.parametrize(
    "greeting",
    [b"\xff\xff\xff\xff", frame(b""), frame(b"message"), frame(b"ther"), frame(b"there!"), frame(b"x" * 300)],
)
def test_who_does_not_know_the_name_is_hung_up_on_unanswered(
    exchange: Callable[..., LivenessHub], greeting: bytes
) -> None:
    there = exchange("there")
    with socket.create_connection((HOST, there.port)) as stranger:
        stranger.sendall(greeting + frame(b"forged"))
        assert until_hung_up_on(stranger) == b""
    opened(exchange("here"), there, "there")


@pytest.mark.parametrize("more", [b"\xff", b"\xff\xff\xff\xff", frame(b"hello")])
@pytest.mark.parametrize("apart", [False, True])
def test_who_sends_more_than_the_name_is_hung_up_on_and_others_stay(
    exchange: Callable[..., LivenessHub], more: bytes, apart: bool, caplog: pytest.LogCaptureFixture
) -> None:
    here, there = exchange("here"), exchange("there")
    line = opened(here, there, "there")
    with socket.create_connection((HOST, there.port)) as stranger:
        stranger.sendall(frame(b"there"))
        if apart:
            stranger.settimeout(30)
            assert stranger.recv(100) == frame(b"there")
        stranger.sendall(more)
        assert until_hung_up_on(stranger) in (b"", frame(b"there"))
    assert "more than a name" in caplog.text  # not that it was late, nor a defect that it caused here
    assert line.state is LivenessState.OPEN and len(there._arriving) == 1


def test_who_says_nothing_is_hung_up_on_and_who_greeted_is_not(
    exchange: Callable[..., LivenessHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = exchange("here"), exchange("there")
    line = opened(here, there, "there")
    monkeypatch.setattr(liveness, "GREETING_S", 0.2)
    for said in (b"", b"\x00\x00\x00\x05th"):
        with socket.create_connection((HOST, there.port)) as stranger:
            stranger.sendall(said)
            assert until_hung_up_on(stranger) == b""
    assert line.state is LivenessState.OPEN and len(there._arriving) == 1


def test_of_too_many_strangers_the_oldest_is_hung_up_on(
    exchange: Callable[..., LivenessHub], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liveness, "GREETING_S", 3600.0)
    monkeypatch.setattr(liveness, "MAX_UNAUTHENTICATED", 3)
    there = exchange("there")
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(socket.create_connection((HOST, there.port))) for _ in range(5)]
        for stranger in strangers[:2]:
            assert until_hung_up_on(stranger) == b""
        for stranger in strangers[2:]:
            stranger.sendall(frame(b"there"))
            stranger.settimeout(30)
            assert stranger.recv(100) == frame(b"there")
        opened(exchange("here"), there, "there")


def test_without_descriptors_diallers_wait_and_no_core_burns(
    exchange: Callable[..., LivenessHub], caplog: pytest.LogCaptureFixture
) -> None:
    here, there = exchange("here"), exchange("there")
    with socket.socket() as dialler:
        dialler.settimeout(30)
        with no_descriptor_left():
            dialler.connect((HOST, there.port))
            with pytest.raises(TransferError, match="no connection to there can be made") as failure:
                here.dial(HOST, there.port, "there", 10.0)
            assert failure.value.retryable
            until(lambda: "nobody is taken" in caplog.text, "the failure to accept")
            begin, cpu = time.monotonic(), seconds_of(there._thread)
            time.sleep(0.5)
            assert (seconds_of(there._thread) - cpu) / (time.monotonic() - begin) < 0.1
        dialler.sendall(frame(b"there"))
        assert dialler.recv(100) == frame(b"there")


def test_a_process_with_many_descriptors_dials(exchange: Callable[..., LivenessHub]) -> None:
    here, there = exchange("here"), exchange("there")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard) if hard > 0 else 4096, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        while (descriptor := os.dup(0)) < 1024:
            stack.callback(os.close, descriptor)
        stack.callback(os.close, descriptor)
        line = opened(here, there, "there")
        assert line.socket.fileno() > 1024


def test_the_kernel_is_told_to_notice_a_silent_machine(exchange: Callable[..., LivenessHub]) -> None:
    """A half-open connection cannot be made on one machine without a firewall; that it ends is the kernel's promise."""
    here, there = exchange("here"), exchange("there")
    line = opened(here, there, "there")
    arrived = next(iter(there._arriving))
    for connection in (line.socket, arrived):
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        idle = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE)
        interval = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL)
        count = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT)
        assert idle + interval * count <= liveness.SILENCE_S
        assert connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == liveness.SILENCE_S * 1000


def listen(pipe: Connection) -> None:
    hub = LivenessHub(HOST, "there")
    pipe.send(hub.port)
    pipe.recv()


def test_a_stopped_process_keeps_its_links_beyond_the_silence_that_ends_them() -> None:
    process = Child(60.0, listen)
    with contextlib.closing(LivenessHub(HOST, "here", silence_s=3)) as here:
        line = here.dial(HOST, process.answer(), "there", 10.0)
        until(lambda: line.state is LivenessState.OPEN, "an answer")
        process.freeze()
        stopped = time.monotonic()
        until(lambda: line.state is LivenessState.LOST or time.monotonic() > stopped + 7, "twice that silence")
        assert line.state is LivenessState.OPEN, line.reason
        process.kill()
        assert "closed the connection" in lost(line) or line.ended


def test_an_idle_exchange_burns_no_cpu(exchange: Callable[..., LivenessHub]) -> None:
    here, there = exchange("here"), exchange("there")
    opened(here, there, "there")
    threads = here._thread, there._thread
    begin, cpu = time.monotonic(), seconds_of(*threads)
    time.sleep(1.0)
    assert (seconds_of(*threads) - cpu) / (time.monotonic() - begin) < 0.02


def test_nothing_listens_at_an_address_of_another_machine() -> None:
    with pytest.raises(TransferError, match=r"cannot listen at 198\.51\.100\.7"):
        LivenessHub("198.51.100.7", "nowhere")


def test_a_connection_to_itself_is_not_the_peer() -> None:
    """The kernel makes one when a port on which nobody listens is dialled from that port."""
    with socket.socket() as itself:
        itself.bind((HOST, 0))
        itself.connect(itself.getsockname())
        itself.setblocking(False)
        line = LivenessLink("peer", 0.0, lambda: None, itself)
        line.writable()
        until(lambda: line.readable() or line.state is LivenessState.LOST, "the answer")
        assert "leads to this process itself" in line.reason

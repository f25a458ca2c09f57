"""The supervisor: ports that are taken, and servers that end."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from examples import launch
from examples.launch import PortError, Servers, Spec, StartError, refuse_taken_port
from tests.support.ports import free_port

SERVE = "import http.server as h, sys; h.test(h.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    with Servers(tmp_path) as running:
        yield running


def spec(name: str, code: str = SERVE, *, also: tuple[int, ...] = (), port: int | None = None) -> Spec:
    port = port or free_port()
    return Spec(name, (sys.executable, "-c", code, str(port)), port, health="/", also_listens=also)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Somebody who shares the port, as vLLM's servers do."""
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        yield taken


def test_a_port_of_somebody_who_would_share_it_is_refused(listener: socket.socket) -> None:
    port = listener.getsockname()[1]
    for host in ("127.0.0.1", "0.0.0.0", "localhost"):
        with pytest.raises(PortError, match=f"somebody listens on {host}:{port} already"):
            refuse_taken_port(host, port)


def test_a_port_of_connections_that_ended_is_free() -> None:
    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        address = listening.getsockname()
        with socket.create_connection(address):
            accepted, _ = listening.accept()
            accepted.close()  # first, so the port's side waits for what may be under way
    refuse_taken_port(*address)


def test_a_name_that_is_nobody_s_is_refused() -> None:
    with pytest.raises(PortError, match=r"nobody can listen on no\.\.host:80"):
        refuse_taken_port("no..host", 80)


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(PortError, match=r"192\.0\.2\.1 is no address of this machine"):
        refuse_taken_port("192.0.2.1", free_port())


def test_nothing_starts_where_one_port_is_taken(servers: Servers, listener: socket.socket) -> None:
    taken = listener.getsockname()[1]
    with pytest.raises(PortError, match=f":{taken} already"):
        servers.start(spec("a"), spec("b", also=(taken,)))
    assert not list(servers.logs.iterdir())


def test_a_server_elsewhere_is_not_looked_at(servers: Servers, listener: socket.socket) -> None:
    servers.refuse_ports([Spec("far", ("true",), listener.getsockname()[1], elsewhere=True)])
    servers.refuse_ports([Spec("far", ("true",), 5600, host="192.0.2.1", elsewhere=True)])


def test_a_port_that_what_was_ended_here_still_holds_is_waited_for(servers: Servers, listener: socket.socket) -> None:
    [server] = servers.start(spec("a"))
    servers.stop(server)
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", server.spec.port))
        held.listen()
        later = threading.Timer(0.5, held.close)
        later.start()
        [again] = servers.start(server.spec)
        later.join()
    assert again.process.poll() is None
    assert again.log.name == "a-2.log"


def test_one_that_ends_while_another_is_waited_for_is_told_at_once(servers: Servers) -> None:
    never = spec("never", "import time; time.sleep(600)")
    with pytest.raises(StartError, match=r"(?s)broken ended with status 1; its log .*\nno memory"):
        servers.start(never, spec("broken", "raise SystemExit('no memory')"), timeout=500.0)


def test_the_first_to_end_is_found(servers: Servers) -> None:
    lives, ends = servers.start(spec("lives"), spec("ends"))
    ends.process.terminate()
    assert servers.first_to_end() is ends and lives.process.poll() is None


ENDS_LATE = """
import http.server, signal, subprocess, sys, time
from pathlib import Path
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
def told(*_):
    time.sleep(float(sys.argv[3]))
    print("its worker", "ended" if worker.poll() is not None else "lives", flush=True)
    worker.kill()
    raise SystemExit
signal.signal(signal.SIGTERM, told)
http.server.test(http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')
"""


def draining(takes: float, within: str) -> Spec:
    port = free_port()
    command = (sys.executable, "-c", ENDS_LATE, str(port), "m", str(takes), "--shutdown-timeout", within)
    return Spec("drains", command, port, health="/")


@pytest.mark.parametrize(("within", "seen"), [("60", True), ("1", False), ("0", False)])
def test_one_that_lets_requests_end_is_waited_for_and_told_alone(
    within: str, seen: bool, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's workers end at once where they are told themselves, and with them what runs there."""
    monkeypatch.setattr(launch, "STOP_TIMEOUT", 0.1)
    [server] = servers.start(draining(2.0 if seen else 600.0, within))
    servers.stop(server)
    assert ("its worker lives" in server.log.read_text()) == seen
    assert (server.process.returncode == 0) == seen


def test_one_that_did_not_come_up_has_nothing_to_let_end(servers: Servers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "STOP_TIMEOUT", 0.1)
    began = time.monotonic()
    with pytest.raises(StartError, match="did not answer /nowhere"):
        servers.start(replace(draining(600.0, "600"), health="/nowhere"), timeout=2.0)
    assert time.monotonic() < began + 300


def test_what_is_waited_for_may_be_hurried(servers: Servers) -> None:
    [server] = servers.start(draining(600.0, "600"))
    later = threading.Timer(0.5, setattr, (servers, "hurried", True))
    later.start()
    servers.stop(server)
    later.join()
    assert server.process.returncode == -signal.SIGKILL


def test_the_log_of_a_former_run_is_kept(tmp_path: Path) -> None:
    for run in range(3):
        with Servers(tmp_path) as running:
            running.start(spec("a", f"print('run {run}', flush=True); {SERVE}"))
    assert "run 2" in (tmp_path / "a.log").read_text() and "run 1" in (tmp_path / "a.log.1").read_text()

"""The supervisor: starts vLLM instances and routers on this machine, waits until they serve, and always ends them.

Used by the launcher, the demo, the end-to-end tests and the benchmarks. Each server is a process group of its own with
one log file. Groups are ended when the `Servers` context ends, when the interpreter exits, and by the kernel (a signal
at the parent's death) when the interpreter is killed, so that no run leaves gigabytes behind.

Nothing starts where somebody listens already: vLLM's servers would share the port without a word (SO_REUSEPORT), and
each would get some of the requests.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples import roles
from examples.ports import free_port
from examples.stages import Progress

# Whoever starts servers on a CPU takes these from here.
CPU_ENVIRONMENT = roles.CPU_ENVIRONMENT | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
CPU_FLAGS = (*roles.CPU_FLAGS, "--max-model-len", "2048")
CACHE_BYTES = roles.CACHE_BYTES

START_TIMEOUT = 420.0
STOP_TIMEOUT = 20.0
"""Seconds until a server that was told to end is killed, beside those of its `--shutdown-timeout`."""
RELEASE_TIMEOUT = 5.0
"""Seconds for which a port may be held by what is left of a server that was ended here."""
_PR_SET_PDEATHSIG = 1


class StartError(Exception):
    """A server that did not come up; the text ends with the last lines of its log."""


class PortError(StartError):
    """A port that a server cannot have. Nothing was started."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start: a command line that takes a port, where its log goes, and the path that answers once it serves."""

    name: str
    command: tuple[str, ...]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    health: str = "/health"
    also_listens: tuple[int, ...] = ()
    """Further ports of `host` that it needs."""
    what: str = ""
    """What decides how long it takes to start; empty where that is no time to speak of."""
    elsewhere: bool = False
    """In another network namespace, whose ports nobody here can look at."""

    @property
    def url(self) -> str:
        return f"http://{bracketed(self.host)}:{self.port}"

    @property
    def drains_for(self) -> float:
        """Seconds for which it lets what it has begun end, once it is told to: the last `--shutdown-timeout`, or 0."""
        given = roles.last_value(self.command, "--shutdown-timeout")
        return float(given) if given is not None and given.isdecimal() else 0.0


def bracketed(host: str) -> str:
    """An address as URLs have it."""
    return f"[{host}]" if ":" in host else host


@dataclass(slots=True)
class Server:
    """A running process group."""

    spec: Spec
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return self.spec.url

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def tell_to_end(self, *, drains: bool) -> None:
        """With SIGTERM; one that drains does so itself, and its workers would end at once if they were told."""
        if not drains:
            _signal_group(self.process, signal.SIGTERM)
        elif self.status() is None:
            os.kill(self.process.pid, signal.SIGTERM)

    def kill(self) -> None:
        """Members may outlive the leader, so the group is killed whether or not the leader ended."""
        _signal_group(self.process, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT)
        self.process.poll()

    def status(self) -> int | None:
        """The leader's exit status, negative for a signal; None while it runs. `Popen.poll` keeps a lock for good where
        a signal's handler raises within it (Ctrl-C); from then on it says None, and `Popen.wait` never returns."""
        if self.process.returncode is not None:
            return self.process.returncode
        try:
            found = os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:  # somebody has waited for it
            return self.process.poll()
        if found is None:
            return None
        return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def refuse_ports_twice(specs: Sequence[Spec]) -> None:
    """Raises PortError if two of these are to listen at one port."""
    users: dict[tuple[str, int], str] = {}
    for spec in specs:
        for port in (spec.port, *spec.also_listens):
            if other := users.get((spec.host, port)):
                raise PortError(f"port {port} is to be used twice, by {other} and by {spec.name}; give them others")
            users[spec.host, port] = spec.name


def refuse_taken_port(host: str, port: int) -> None:
    """Raises PortError if somebody listens there, or if nobody here can."""
    try:
        [(family, kind, protocol, _, address), *_] = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise PortError(f"nobody can listen on {host}:{port}: {error}") from error
    with socket.socket(family, kind, protocol) as probe:
        # Without SO_REUSEPORT, so that a listener that has it is met; with this, so that ended connections are not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            why = {
                errno.EADDRINUSE: f"somebody listens on {host}:{port} already; end it, or choose another port",
                errno.EADDRNOTAVAIL: f"{host} is no address of this machine; give one that it has",
            }
            raise PortError(why.get(error.errno or 0, f"nobody can listen on {host}:{port}: {error}")) from error


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Servers:
    """Context in which servers run; leaving it ends them all."""

    def __init__(self, logs: Path):
        self.logs = logs
        self._running: list[Server] = []
        self._started: Counter[str] = Counter()
        self._ended: set[int] = set()
        """Ports of servers that were ended here."""
        self.hurried = False
        """Whether what ends is killed now, also while it is waited for."""
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Servers:
        atexit.register(self.stop)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        atexit.unregister(self.stop)

    def stop(self, *servers: Server, drain: bool = True) -> None:
        """End these servers, or all: politely, within their `--shutdown-timeout` if they may `drain`; then by force."""
        ending = list(servers) or list(self._running)
        began = time.monotonic()
        for server in ending:
            server.tell_to_end(drains=drain and server.spec.drains_for > 0)
        for server in ending:
            drained = began + (server.spec.drains_for if drain else 0.0)
            until = max(drained, time.monotonic()) + STOP_TIMEOUT
            while server.status() is None and time.monotonic() < until and not self.hurried:
                time.sleep(0.02)
            server.kill()
            self._ended |= {server.spec.port, *server.spec.also_listens}
            self._running.remove(server)

    def start(self, *specs: Spec, timeout: float = START_TIMEOUT, progress: Progress | None = None) -> list[Server]:
        """Start all at once and wait until each answers, at `/health` unless its spec says otherwise.

        Raises:
            PortError: a port is taken, or is to be used twice; nothing was started.
            StartError: one ended or did not answer in `timeout` seconds; those of this call are ended.
        """
        self.refuse_ports(specs)
        servers = [self._spawn(spec) for spec in specs]
        try:
            _wait_until_healthy(servers, timeout, progress)
        except BaseException:
            self.stop(*servers, drain=False)
            raise
        return servers

    def first_to_end(self) -> Server:
        """Wait until one of those that run ends by itself; which."""
        while True:
            for server in self._running:
                if server.status() is not None:
                    return server
            time.sleep(0.5)

    def refuse_ports(self, specs: Sequence[Spec]) -> None:
        refuse_ports_twice(specs)
        for spec in specs:
            for port in () if spec.elsewhere else (spec.port, *spec.also_listens):
                until = time.monotonic() + (RELEASE_TIMEOUT if port in self._ended else 0.0)
                while True:
                    try:
                        refuse_taken_port(spec.host, port)
                        break
                    except PortError:
                        # A worker that was killed lets go of it when the kernel has taken it down.
                        if time.monotonic() >= until:
                            raise
                        time.sleep(0.05)

    def _spawn(self, spec: Spec) -> Server:
        # A server that is started again, as after a failed test, leaves the log of its former run.
        self._started[spec.name] += 1
        again = f"-{self._started[spec.name]}" if self._started[spec.name] > 1 else ""
        log = self.logs / f"{spec.name}{again}.log"
        if log.exists():  # a former run's
            log.replace(log.with_name(f"{log.name}.1"))
        with log.open("wb") as output:
            process = subprocess.Popen(
                spec.command,
                env={**os.environ, **spec.environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )
        server = Server(spec, process, log)
        self._running.append(server)
        return server


def _wait_until_healthy(servers: Sequence[Server], timeout: float, progress: Progress | None) -> None:
    began = time.monotonic()
    waiting = list(servers)
    while waiting:
        now = time.monotonic() - began  # one for all of a round: of those that are late, the first is named
        for server in list(waiting):
            spec = server.spec
            if (status := server.status()) is not None:
                raise _start_error(server, f"ended with status {status}")
            if _answers(server):
                waiting.remove(server)
                if progress is not None:
                    progress.serves(spec.name, spec.what, now, spec.url)
            elif now > timeout:
                raise _start_error(server, f"did not answer {spec.health} in {timeout:.0f} s")
            elif progress is not None and spec.what:
                progress.starting(spec.name, spec.what, now, server.log.read_text(errors="replace"))
        if waiting:
            time.sleep(0.2)


def _answers(server: Server) -> bool:
    try:
        with opened(f"{server.url}{server.spec.health}", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


# A proxy of the environment's does not reach what runs here.
opened = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


def _start_error(server: Server, what: str) -> StartError:
    return StartError(f"{server.spec.name} {what}; its log {server.log} ends with:\n{server.log_tail()}")


def vllm_spec(
    name: str,
    model: Path,
    *,
    flags: Sequence[str] = (),
    tp_size: int = 1,
    transfer: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] | None = None,
    cache_bytes: int = CACHE_BYTES,
    host: str = "127.0.0.1",
    prefix: Sequence[str] = (),
    on_cpu: bool = True,
) -> Spec:
    """A `vllm serve`, on the CPU with what that needs; `transfer` is its KVTransferConfig (None: no connector).

    It serves HTTP on `host`; `prefix` are words before the command (`ip netns exec …`). The side channel gets a port of
    its own, by both ways in which connectors of vLLM take one.
    """
    port, side_port = free_port(), free_port()
    own = [*(CPU_FLAGS if on_cpu else ()), *roles.cache_flags(cache_bytes), "-tp", str(tp_size), *flags]
    env = {**CPU_ENVIRONMENT} if on_cpu else {}
    if transfer is not None:
        side = {"side_channel_host": "127.0.0.1", "side_channel_port": side_port}
        extra = {**side, **transfer.get("kv_connector_extra_config", {})}
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
        transfer = {**transfer, "kv_connector_extra_config": extra}
    _, *words = roles.serve_words(str(model), host, port, transfer, ["--served-model-name", model.name, *own])
    command = (*prefix, *_vllm(), *words)
    what = " ".join([name, str(model), *own])
    return Spec(name, command, port, {**env, **(environment or {})}, host, what=what, elsewhere=bool(prefix))


def _vllm() -> list[str]:
    """vLLM's command; without its script, where this interpreter only sees another's packages."""
    script = Path(sys.executable).with_name("vllm")
    return [str(script)] if script.exists() else [sys.executable, "-m", "vllm.entrypoints.cli.main"]


def router_spec(name: str, prefill: Sequence[str], decode: Sequence[str]) -> Spec:
    """This project's router over instances that run already."""
    port = free_port()
    command = [sys.executable, "-m", "vllm_pd_connector.proxy", "--port", str(port)]
    for url in prefill:
        command += ["--prefill", url]
    for url in decode:
        command += ["--decode", url]
    return Spec(name, tuple(command), port)


def post(url: str, body: Mapping[str, Any], *, headers: Mapping[str, str] | None = None, timeout: float = 300.0) -> Any:
    """POST JSON and return the decoded answer; raises `urllib.error.HTTPError` for other statuses than 200."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json", **(headers or {})}
    )
    with opened(request, timeout=timeout) as answer:
        return json.load(answer)

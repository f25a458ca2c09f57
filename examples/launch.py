"""Start vLLM instances and the router on this machine, wait until they serve, and always end them.

Used by the demo, the end-to-end tests and the benchmarks. Each server is a process group of its own with one log file.
Groups are ended when the `Servers` context ends, when the interpreter exits, and by the kernel (a signal at the
parent's death) when the interpreter is killed, so that no run leaves gigabytes behind.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CPU_ENVIRONMENT = {
    # vLLM binds OpenMP threads to cores of its own choice, the same ones in every instance.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Even with --enforce-eager the sampler is compiled at the first request, which takes seconds and a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
CPU_FLAGS = ("--enforce-eager", "--max-model-len", "2048", "--dtype", "float32")
"""float32: greedy tokens of a random model differ between two instances in bfloat16, where near-ties flip."""

CACHE_BYTES = 384 * 1024 * 1024
START_TIMEOUT = 420.0
STOP_TIMEOUT = 20.0
_PR_SET_PDEATHSIG = 1


class StartError(Exception):
    """A server that did not come up; the text ends with the last lines of its log."""


@dataclass(frozen=True, slots=True)
class Spec:
    """What to start: a command line that takes a port, where its log goes, and the path that answers once it serves."""

    name: str
    command: tuple[str, ...]
    port: int
    environment: Mapping[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    health: str = "/health"


@dataclass(slots=True)
class Server:
    """A running process group."""

    spec: Spec
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://{self.spec.host}:{self.spec.port}"

    def log_tail(self, lines: int = 40) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self) -> None:
        """End the group: politely, then with SIGKILL. Safe to call twice."""
        _signal_group(self.process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_TIMEOUT)
        # Members may outlive the leader, so the group is killed whether or not the leader ended.
        _signal_group(self.process, signal.SIGKILL)
        self.process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


_given: deque[int] = deque(maxlen=4096)


def free_port() -> int:
    """A port on which nobody listens, below the range from which the kernel picks ports for outgoing connections, and
    none that was picked lately: a server listens long after its ports were picked."""
    while True:
        port = random.SystemRandom().randrange(18000, 32000)
        if port in _given:
            continue
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        _given.append(port)
        return port


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


class Servers:
    """Context in which servers run; leaving it ends them all."""

    def __init__(self, logs: Path):
        self._logs = logs
        self._running: list[Server] = []
        self._started: Counter[str] = Counter()
        logs.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Servers:
        atexit.register(self.stop)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        atexit.unregister(self.stop)

    def stop(self, *servers: Server) -> None:
        """End these servers, or all."""
        ending = list(servers) or list(self._running)
        for server in ending:
            _signal_group(server.process, signal.SIGTERM)
        for server in ending:
            server.stop()
            self._running.remove(server)

    def start(self, *specs: Spec, timeout: float = START_TIMEOUT) -> list[Server]:
        """Start all at once and wait until each answers, at `/health` unless its spec says otherwise.

        Raises:
            StartError: one ended or did not answer in `timeout` seconds; those of this call are ended.
        """
        servers = [self._spawn(spec) for spec in specs]
        try:
            for server in servers:
                _wait_until_healthy(server, time.monotonic() + timeout)
        except BaseException:
            self.stop(*servers)
            raise
        return servers

    def _spawn(self, spec: Spec) -> Server:
        # A server that is started again, as after a failed test, leaves the log of its former run.
        self._started[spec.name] += 1
        again = f"-{self._started[spec.name]}" if self._started[spec.name] > 1 else ""
        log = self._logs / f"{spec.name}{again}.log"
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


def _wait_until_healthy(server: Server, deadline: float) -> None:
    while True:
        if server.process.poll() is not None:
            what = f"ended with status {server.process.returncode}"
        elif time.monotonic() > deadline:
            what = f"did not answer {server.spec.health} in time"
        else:
            try:
                with urllib.request.urlopen(f"{server.url}{server.spec.health}", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.2)
                continue
        raise StartError(f"{server.spec.name} {what}; its log {server.log} ends with:\n{server.log_tail()}")


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
    command = [*_vllm(), "serve", str(model), "--port", str(port)]
    command += ["--host", host, "--served-model-name", model.name]
    command += ["--kv-cache-memory-bytes", str(cache_bytes), "-tp", str(tp_size)]
    command += [*(CPU_FLAGS if on_cpu else ()), *flags]
    env = {**CPU_ENVIRONMENT} if on_cpu else {}
    if transfer is not None:
        side = {"side_channel_host": "127.0.0.1", "side_channel_port": side_port}
        extra = {**side, **transfer.get("kv_connector_extra_config", {})}
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1", "VLLM_NIXL_SIDE_CHANNEL_PORT": str(side_port)}
        command += ["--kv-transfer-config", json.dumps({**transfer, "kv_connector_extra_config": extra})]
    return Spec(name, (*prefix, *command), port, {**env, **(environment or {})}, host)


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
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.load(answer)

"""Instances that join and leave while requests run: 1P1D, 2P3D, 1P2D, behind this project's router and behind vLLM's.

Who leaves by `vllm-pd drain`, or by a signal with time to end, takes nothing along: every answer is the plain run's.
Of an instance that is killed only what was there may fail, and only where this project's router says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from examples.launch import Server, Servers, Spec, post, router_spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.ports import free_port
from tests.support.servers.cluster import PATIENCE, Baselines, until
from tests.support.servers.excuses import Down, legs_of, unexcused
from tests.support.servers.load import Load
from tests.support.servers.pairs import ROOT, Pairs
from tests.support.servers.workload import prompts

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

FAMILY = "gqa"
ASKED = {"elastic": prompts("elastic", [20, 47, 64, 90, 131, 160, 200, 256, 300, 77, 33, 150])}
AT_ONCE = 6
SHARE = 15
"""Requests that an instance must have served after it joined."""
LEASE_S, ENDS_S = 20.0, 60
"""`kv_lease_duration`, and how long a server that is told to end may take for what it has begun."""
BIN = Path(sys.executable).parent


def instance_spec(name: str, role: str) -> Spec:
    model = MODELS[FAMILY]
    extra = {**PATIENCE, "kv_lease_duration": LEASE_S, "shutdown_timeout": LEASE_S + 5}
    flags = [*model.flags, "--block-size", str(model.block_size), "--no-enable-prefix-caching"]
    return vllm_spec(
        f"elastic-{name}",
        make(model),
        flags=[*flags, "--shutdown-timeout", str(ENDS_S)],
        transfer={"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra},
        environment={"PD_TEST_POLITE": "1", **model.environment},
        cache_bytes=64 << 20,
    )


@dataclass(slots=True)
class Ours:
    """This project's router with its operators' interface."""

    admin_port: int = field(default_factory=free_port)

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.admin_port}"

    def spec(self, prefill: Server, decode: Server) -> Spec:
        """A router is healthy when it has one of each."""
        made = router_spec("elastic-router", [prefill.url], [decode.url])
        return replace(made, command=(*made.command, "--admin-port", str(self.admin_port), "--log-level", "debug"))

    def join(self, server: Server) -> None:
        post(f"{self.admin}/instances", {"url": server.url})

    def drain(self, server: Server) -> int:
        return drain(server.url, "--router", self.admin)

    def close(self) -> None:
        """Nothing of its own runs."""


@dataclass(slots=True)
class OfVllm:
    """vLLM's router, unmodified: it hears of instances by `vllm-pd announce`, one for each here."""

    discovery_port: int = field(default_factory=free_port)
    announcers: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def spec(self, *first: Server) -> Spec:
        for server in first:
            self.join(server)
        port = free_port()
        command = [str(BIN / "vllm-router"), "--vllm-pd-disaggregation", "--kv-connector", "nixl", "--policy",
                   "round_robin", "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port()),
                   "--vllm-discovery-address", f"127.0.0.1:{self.discovery_port}"]  # fmt: skip
        return Spec("elastic-vllm-router", tuple(command), port)

    def join(self, server: Server) -> None:
        command = [str(BIN / "vllm-pd"), "announce", f"127.0.0.1:{self.discovery_port}", server.url]
        self.announcers[server.url] = subprocess.Popen(command, stderr=subprocess.DEVNULL)

    def drain(self, server: Server) -> int:
        self._silence(server.url)
        return drain(server.url, "--settle", "4")

    def _silence(self, url: str) -> None:
        announcer = self.announcers.pop(url)
        announcer.terminate()  # not SIGINT, which is ignored where the tests run in the background
        announcer.wait(20)

    def close(self) -> None:
        for url in list(self.announcers):
            self._silence(url)


def drain(url: str, *words: str) -> int:
    return subprocess.run([str(BIN / "vllm-pd"), "drain", url, "--timeout", "90", *words]).returncode


@contextmanager
def asking(load: Load) -> Any:
    """Clients that ask as long as the context lasts."""
    stop = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        clients: Future[None] = pool.submit(load.run, stop.is_set)
        try:
            yield clients
        finally:
            stop.set()
        clients.result()


def served(server: Server) -> float:
    """Requests that an instance has answered."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    return sum(float(row.split()[-1]) for row in page.splitlines() if row.startswith("vllm:request_success_total{"))


@pytest.mark.parametrize("make_router", [Ours, OfVllm], ids=["ours", "vllm's"])
def test_instances_join_and_leave_under_load_and_no_answer_is_lost_or_wrong(
    pairs: Pairs, make_router: Callable[[], Ours | OfVllm]
) -> None:
    pairs.end()
    servers, router = pairs.servers, make_router()
    baselines = Baselines(servers, ROOT / ".cache" / "baselines", ASKED)
    baselines.of(FAMILY)
    p0, d0 = servers.start(instance_spec("p0", "kv_producer"), instance_spec("d0", "kv_consumer"))
    there = [p0, d0]
    down: list[Down] = []
    front: Server | None = None
    try:
        [front] = servers.start(router.spec(p0, d0))
        until(lambda: _serves(front, baselines), "the router has both", 60.0)
        load = Load(front.url, FAMILY, baselines, ASKED["elastic"], AT_ONCE)
        with asking(load) as clients:
            joined = servers.start(
                instance_spec("p1", "kv_producer"),
                instance_spec("d1", "kv_consumer"),
                instance_spec("d2", "kv_consumer"),
            )
            there += joined
            for server in joined:
                router.join(server)
            for server in joined:
                until(
                    lambda server=server: clients.done() or served(server) >= SHARE, f"{server.spec.name} serves", 90.0
                )
            assert router.drain(p0) == 0
            _end(servers, there, p0)
            before = len(load.sent)
            if isinstance(router, Ours):
                down.append(_kill(servers, there, joined[1]))
            else:
                assert router.drain(joined[1]) == 0
                _end(servers, there, joined[1])
            until(lambda: clients.done() or len(load.sent) >= before + 5 * SHARE, "1P2D serve", 90.0)
            if isinstance(router, Ours):  # removed, then told to end: it ends what it has begun
                remove(router, d0)
                _end(servers, there, d0)
                before = len(load.sent)
                until(lambda: clients.done() or len(load.sent) >= before + 2 * SHARE, "1P1D serve", 90.0)
        assert [one for one in load.answered if not one.right] == []
        lost = [one for one in load.sent if one.status != 200]
        legs = legs_of(front.log.read_text(errors="replace"))
        assert unexcused(lost, legs, down) == [], f"of {len(load.sent)}; down: {down}"
        print(f"{len(load.sent)} requests, {len(lost)} lost with an instance that was killed")
    finally:
        router.close()
        servers.stop(*([front] if front is not None else []), *there)


def remove(router: Ours, server: Server) -> None:
    """What an operator does without `vllm-pd drain`."""
    where = f"{router.admin}/instances?url={urllib.parse.quote(server.url, safe='')}"
    with urllib.request.urlopen(urllib.request.Request(where, method="DELETE"), timeout=30):
        pass


def _serves(front: Server, baselines: Baselines) -> bool:
    one = Load(front.url, FAMILY, baselines, ASKED["elastic"], 1)
    one.run(lambda: len(one.sent) >= 1)
    return one.sent[0].right


def _end(servers: Servers, there: list[Server], server: Server) -> None:
    """SIGTERM, and time to end."""
    there.remove(server)
    server.process.send_signal(signal.SIGTERM)
    server.process.wait(ENDS_S + LEASE_S)
    servers.stop(server)


def _kill(servers: Servers, there: list[Server], server: Server) -> Down:
    there.remove(server)
    began = time.monotonic()
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()
    servers.stop(server)
    return Down(server.url, began, time.monotonic())

"""Two prefill and two decode instances under load, behind this project's router and behind vLLM's.

Every answer must be the plain run's, all instances must share the work, and with this project's router an instance may
be restarted in the middle: only requests that were under way there while it went down may fail, and only with 5xx.
"""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest

from examples.launch import Server, Servers, Spec, router_spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.servers.cluster import HOLDINGS, PATIENCE, Baselines, until
from tests.support.servers.excuses import Down, legs_of, unexcused
from tests.support.servers.load import Load, vllm_router_spec
from tests.support.servers.matrix import HYBRID_BLOCKS, HYBRIDS
from tests.support.servers.pairs import ROOT, Pairs
from tests.support.servers.workload import ask, completion, prompts

FAMILIES = ("gqa", "kimi")
"""Plain attention, and recurrent states beside attention."""
REQUESTS, AT_ONCE = 500, 8
PAUSE_S = 1.0
RESTART_AFTER = (60, 200)
"""Requests answered before the restart of a prefill and of a decode instance."""
LEASE_S = 15.0
ASKED = {"xpyd": prompts("xpyd", [random.Random(number).randrange(20, 300) for number in range(48)])}

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]


class Fleet:
    """Two prefill and two decode instances of one family."""

    def __init__(self, family: str, servers: Servers, baselines: Baselines):
        self.family = family
        self.servers = servers
        self.baselines = baselines
        baselines.of(family)
        roles = {"prefill": "kv_producer", "decode": "kv_consumer"}
        names = [f"{side}-{number}" for side in roles for number in range(2)]
        self.instances = servers.start(*(self._spec(name, roles[name.partition("-")[0]]) for name in names))
        self._at_start = [self._holdings(server) for server in self.instances]

    @property
    def prefills(self) -> list[Server]:
        return self.instances[:2]

    @property
    def decodes(self) -> list[Server]:
        return self.instances[2:]

    def _spec(self, name: str, role: str) -> Spec:
        model = MODELS[self.family]
        extra = {"kv_lease_duration": LEASE_S, **PATIENCE}
        # Each request moves its cache: prompts come again, and a decode instance that knows one would not ask for it.
        flags = [*model.flags, "--block-size", str(model.block_size), "--no-enable-prefix-caching"]
        flags += ["--num-gpu-blocks-override", str(HYBRID_BLOCKS)] if self.family in HYBRIDS else []
        return vllm_spec(
            f"xpyd-{self.family}-{name}",
            make(model),
            flags=flags,
            transfer={"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra},
            environment={"PD_TEST_POLITE": "1", **model.environment},
        )

    def restart(self, index: int) -> Down:
        """End an instance and start it again; when it went down."""
        server = self.instances[index]
        began = time.monotonic()
        self.servers.stop(server)
        ended = time.monotonic()
        [self.instances[index]] = self.servers.start(server.spec)
        return Down(server.url, began, ended)

    def counts(self, series: str) -> list[float]:
        """A counter of each instance, summed over its labels."""
        return [sum(values(page(server), series)) for server in self.instances]

    def settle(self) -> None:
        """Wait until no instance holds anything that it did not hold when it started."""
        for server, at_start in zip(self.instances, self._at_start, strict=True):
            until(partial(self._is_settled, server, at_start), f"every block of {server.spec.name} is free")

    def _is_settled(self, server: Server, at_start: dict[str, float]) -> bool:
        return all(value == at_start.get(name, 0.0) for name, value in self._holdings(server).items())

    def _holdings(self, server: Server) -> dict[str, float]:
        ask(server.url, completion(self.family, (0,), max_tokens=1))  # metrics are refreshed by engine steps
        return {name: float(value) for name, value in HOLDINGS.findall(page(server))}


def page(server: Server) -> str:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        return answer.read().decode()


def values(text: str, series: str, labels: str = "") -> list[float]:
    return [float(value) for value in re.findall(rf"^{series}\{{[^}}]*{labels}[^}}]*\}} (\S+)$", text, re.MULTILINE)]


@pytest.fixture(scope="module", params=FAMILIES)
def fleet(request: pytest.FixtureRequest, pairs: Pairs) -> Iterator[Fleet]:
    pairs.end()
    fleet = Fleet(request.param, pairs.servers, Baselines(pairs.servers, ROOT / ".cache" / "baselines", ASKED))
    yield fleet
    fleet.servers.stop(*fleet.instances)


def test_instances_have_met_before_the_first_request(fleet: Fleet) -> None:
    def handshakes() -> list[float]:
        for server in fleet.decodes:
            ask(server.url, completion(fleet.family, (0,), max_tokens=1))  # metrics are refreshed by engine steps
        return [
            sum(values(page(server), "vllm:pd_phase_seconds_count", 'phase="handshake"')) for server in fleet.decodes
        ]

    assert handshakes() == [0, 0], "the test must be the first of its fleet"
    spec = router_spec("xpyd-introduces", [s.url for s in fleet.prefills], [s.url for s in fleet.decodes])
    [router] = fleet.servers.start(replace(spec, command=(*spec.command, "--introduce", "on")))
    load = Load(router.url, fleet.family, fleet.baselines, ASKED["xpyd"], at_once=2)
    try:
        assert handshakes() == [2, 2]
        load.run(lambda: len(load.sent) >= 16)
        assert handshakes() == [2, 2]
    finally:
        fleet.servers.stop(router)
    assert [one for one in load.sent if not one.right] == []
    command = [sys.executable, "-m", "vllm_pd_connector.cli", "introduce", *(s.url for s in fleet.instances), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [pair["failure"] for pair in json.loads(done.stdout)["pairs"]] == [""] * 4
    fleet.settle()


def test_vllm_router_spreads_the_work_and_every_answer_is_right(fleet: Fleet) -> None:
    [router] = fleet.servers.start(vllm_router_spec("xpyd-vllm-router", fleet.prefills, fleet.decodes))
    before = fleet.counts("vllm:request_success_total"), fleet.counts("vllm:pd_receives_total")
    load = Load(router.url, fleet.family, fleet.baselines, ASKED["xpyd"], AT_ONCE)
    try:
        load.run(lambda: len(load.sent) >= REQUESTS)
    finally:
        fleet.servers.stop(router)
    assert [one for one in load.sent if not one.right] == []
    fleet.settle()
    done, received = (
        [after - at_first for after, at_first in zip(fleet.counts(series), first, strict=True)]
        for series, first in zip(("vllm:request_success_total", "vllm:pd_receives_total"), before, strict=True)
    )
    assert min(done) >= REQUESTS / 4, f"requests by instance: {done}"
    assert sum(received) >= len(load.sent), f"receives by instance: {received}"


def test_one_of_each_is_restarted_and_only_what_was_under_way_there_fails(fleet: Fleet) -> None:
    spec = router_spec("xpyd-router", [s.url for s in fleet.prefills], [s.url for s in fleet.decodes])
    [router] = fleet.servers.start(replace(spec, command=(*spec.command, "--log-level", "debug")))
    load = Load(router.url, fleet.family, fleet.baselines, ASKED["xpyd"], AT_ONCE, PAUSE_S)
    down: list[Down] = []
    restarted = threading.Event()
    # Instances are started by this thread, for one that ends would take them with it (launch.py).
    with ThreadPoolExecutor(1) as pool:
        clients = pool.submit(load.run, lambda: restarted.is_set() and len(load.sent) >= REQUESTS)
        try:
            for index, after in zip((0, 2), RESTART_AFTER, strict=True):
                until(lambda after=after: len(load.sent) >= after or clients.done(), f"{after} requests were sent")
                down.append(fleet.restart(index))
        finally:
            restarted.set()
        clients.result()
    counted = page(router)
    fleet.servers.stop(router)
    assert [one for one in load.answered if not one.right] == []
    lost = [one for one in load.sent if one.status != 200]
    assert [one for one in lost if one.status < 500] == []
    legs = legs_of(router.log.read_text(errors="replace"))
    assert {one.request_id for one in load.answered} <= set(legs), "requests that are not in the router's log"
    alone = unexcused(lost, legs, down)
    assert alone == [], f"failed although no instance that they were at went down meanwhile; down: {down}"
    assert len(lost) <= 2 * AT_ONCE * len(down)
    shares = {
        s.spec.name: sum(values(counted, "vllm_pd_proxy_legs_total", f'instance="{s.url}"')) for s in fleet.instances
    }
    assert min(shares.values()) >= REQUESTS / 10, f"requests by instance: {shares}"
    fleet.settle()

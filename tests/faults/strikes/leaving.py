"""An instance that leaves under load, and comes back: whatever it had begun ends well, and nothing is lost.

It leaves by `vllm-pd drain` before it is told to end, or is taken from the router and told to end at once, with time to
finish. Requests go by the router all the while; each must be answered right, so one that is not counts as wrong.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import threading
import urllib.parse
import urllib.request
from functools import partial
from pathlib import Path

from tests.faults.asked import End, Outcome, Struck, begin, settled
from tests.faults.instances import LEASE_S, Instance
from tests.faults.plan import Fault
from tests.faults.world import World

CLIENTS = 4
ENDS_S = 40
FLAGS = ("--shutdown-timeout", str(ENDS_S), "--no-enable-prefix-caching")
"""Every request moves its cache."""
LEAVES = {"shutdown_timeout": LEASE_S + 4.0}
"""Of the connector: longer than an unread lease lives."""


def drained(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """Take an instance out of service while clients ask, end it, start it again and let it join."""
    victim = p if fault.where == "prefill" else d
    stop = threading.Event()
    rng = random.Random(fault.salt)
    asked: list[Outcome] = []

    def client(salt: float) -> Outcome:
        assert world.router is not None
        own = random.Random(salt)
        last = Outcome(End.RIGHT)
        while not stop.is_set():
            last = world.ask(world.router, own.choice(world.prompts), None, held_s=ENDS_S)
            asked.append(last)
        return last

    clients = [begin(partial(client, rng.random())) for _ in range(CLIENTS)]
    failed = []
    if fault.phase == "by the command":
        command = [str(Path(sys.executable).with_name("vllm-pd")), "drain", victim.url, "--router", world.admin]
        if code := subprocess.run([*command, "--timeout", str(ENDS_S)], stdout=subprocess.DEVNULL).returncode:
            failed.append(Outcome(End.STUCK, f"vllm-pd drain {victim.name}: exit code {code}"))
    else:
        _operate(world, "DELETE", victim.url)
    victim.server.process.send_signal(signal.SIGTERM)
    victim.server.process.wait(2 * ENDS_S)
    world.restart(victim)
    _operate(world, "POST", victim.url)
    stop.set()
    settled(clients)
    lost = [Outcome(End.WRONG, f"lost: {one.detail}", asked=one.asked) for one in asked if one.end is not End.RIGHT]
    return Struck([*failed, *lost, *(one for one in asked if one.end is End.RIGHT)], len(asked))


def _operate(world: World, method: str, url: str) -> None:
    """What an operator tells the router."""
    if method == "DELETE":
        request = urllib.request.Request(
            f"{world.admin}/instances?url={urllib.parse.quote(url, safe='')}", method=method
        )
    else:
        content = json.dumps({"url": url}).encode()
        request = urllib.request.Request(f"{world.admin}/instances", content, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30):
        pass

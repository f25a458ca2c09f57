"""Junk on every port on which a world listens, whoever listens there: bytes, half greetings, silence, crowds."""

from __future__ import annotations

import contextlib
import random
import socket

from tests.faults.asked import Struck
from tests.faults.instances import Instance
from tests.faults.plan import Fault
from tests.faults.system import processes
from tests.faults.world import World

GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 48
"""Of ZMTP 3."""

HOST = "127.0.0.1"
Place = tuple[str, int]


def places(world: World, p: Instance, d: Instance, where: str) -> list[Place]:
    """What is listened on: the side channels, HTTP servers, the bootstrap server, the router, or anything else in the
    processes that move the caches (the transport's library, and vLLM's own rendezvous)."""
    named = {
        "prefill server": p.spec.port,
        "decode server": d.spec.port,
        "side channel": p.side_port,
        "decode side channel": d.side_port,
        "bootstrap": p.extra.get("bootstrap_port"),
        "router": world.router.spec.port if world.router else None,
    }
    if where in named:
        return [(HOST, port)] if (port := named[where]) else []
    instance = p if where.startswith("prefill") else d
    found = {place for worker in instance.processes("worker") for place in processes.listening(worker.pid)}
    return sorted(place for place in found if place[1] not in named.values())


def junk(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """Bytes that nobody understands, connections that say nothing, many at once; requests come meanwhile, the first
    for what was kept before."""
    rng = random.Random(fault.salt)
    kept, prompt = world.prefill(p, world.prompt()), world.prompts[world.last]
    reached = 0
    with contextlib.ExitStack() as open_ones:
        for place in places(world, p, d, fault.where):
            for _ in range(150 if fault.phase == "crowd" else 3):
                try:
                    client = open_ones.enter_context(socket.create_connection(place, timeout=2))
                except OSError:
                    break  # it has no room for more, or is gone
                reached += 1
                with contextlib.suppress(OSError):
                    if fault.phase == "bytes":
                        client.sendall(rng.randbytes(rng.choice((1, 64, 1000, 100_000))))
                    elif fault.phase == "greeting":
                        client.sendall(GREETING + rng.randbytes(rng.randrange(1, 500)))
        first = kept if kept.params is None else world.decode(d, prompt, kept.params)
        outcomes = [first, world.both(p, d, world.prompt())]
        if world.router is not None:
            outcomes.append(world.ask_router())
        return Struck(outcomes, reached)

"""What each kind of fault does, on one pair of instances; here those of processes, clients and the network.

A strike returns how the requests that it met have ended, and how much it touched. It leaves the instances as it found
them: what was stopped continues, the relay is honest again. The numbers that a strike chooses come from the fault's
amount and salt, so that a campaign can be repeated.
"""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future

from tests.faults.asked import KEEP, End, Outcome, Struck, begin, pause, settled
from tests.faults.instances import Instance
from tests.faults.plan import Fault
from tests.faults.strikes.forging import forged, forged_name, used_again
from tests.faults.strikes.giving_back import both_full, rejected, several
from tests.faults.strikes.knocking import junk
from tests.faults.strikes.orders import out_of_order
from tests.faults.strikes.tampering import (
    LATE_S,
    SOON_S,
    damaged,
    delayed,
    duplicated,
    foreign,
    lost,
    lost_once,
    replay,
    tampered,
)
from tests.faults.system import processes
from tests.faults.system.relay import Passing, forward
from tests.faults.world import World

Strike = Callable[[World, Instance, Instance, Fault], Struck]

LONGEST_STOP_S = 4.0
DECODE_MOMENTS_S = 0.08
"""A moment in the first milliseconds after a request reached the decode instance: handshake, read or confirmation."""

CONFIRMED_S = 10.0
LOSS, DELAY_S = 0.3, 0.5
LONGEST = 600
"""Bytes of a packet that passes a link with a smaller MTU of which nobody is told; ours are up to `network.MTU`."""


def victims(p: Instance, d: Instance, where: str, rng: random.Random) -> list[processes.Process]:
    """The process to strike; of several workers one."""
    side, part = where.split()
    found = {"prefill": p, "decode": d}[side].processes(part)
    return [rng.choice(found)] if found else []


def stopped(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """SIGSTOP in a phase of one request, SIGCONT up to some seconds later; a second request comes meanwhile."""
    rng = random.Random(fault.salt)
    seconds = 0.2 + (LONGEST_STOP_S - 0.2) * fault.amount**2
    targets = victims(p, d, fault.where, rng)
    hits: list[bool] = []

    def stop() -> None:
        hits.extend(process.send(signal.SIGSTOP) for process in targets)

    try:
        running = in_phase(world, p, d, fault, rng, stop, held_s=seconds)
        running.append(beside(world, p, d, seconds))
        pause(seconds)
    finally:
        for process in targets:
            process.send(signal.SIGCONT)
    return Struck(settled(running), sum(hits))


def in_phase(
    world: World, p: Instance, d: Instance, fault: Fault, rng: random.Random, act: Callable[[], None], held_s: float
) -> list[Future[Outcome]]:
    """Start a request and act in the fault's phase of it; returns the request that is still under way."""
    prompt = world.prompt()
    if fault.phase == "prefill":
        running = begin(lambda: world.both(p, d, prompt, held_s))
        pause(rng.random() * 0.1)
        act()
        return [running]
    first = world.prefill(p, prompt)
    if first.params is None:
        return [begin(lambda: first)]
    if fault.phase == "between":
        act()
    confirmed = threading.Event()

    def rule(passing: Passing) -> list[tuple[float, bytes]]:
        if passing.name == ("Pushed" if world.pushes else "ReadDone") and not confirmed.is_set():
            act()
            confirmed.set()
        return forward(passing)

    if fault.phase == "confirm":
        world.relay(p).obey(rule)
    params = first.params
    running = begin(lambda: world.decode(d, prompt, params, held_s))
    if fault.phase == "decode":
        pause(rng.random() * DECODE_MOMENTS_S)
        act()
    if fault.phase == "confirm":
        confirmed.wait(CONFIRMED_S)
        world.relay(p).obey(forward)
    return [running]


def beside(world: World, p: Instance, d: Instance, held_s: float = 0.0) -> Future[Outcome]:
    """A request that nothing is done to. Its prompt is taken here: in the order of the campaign, not of threads."""
    prompt = world.prompt()
    return begin(lambda: world.both(p, d, prompt, held_s))


def leave_decode(world: World, p: Instance, d: Instance, after_s: float) -> Outcome:
    """A client that goes away from the second leg."""
    prompt = world.prompt()
    first = world.prefill(p, prompt)
    return first if first.params is None else world.leave(d, prompt, first.params, after_s)


def aborted(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """Three clients leave one leg; a fourth, beside them, is served."""
    longest = {"at once": 0.0, "soon": SOON_S, "late": LATE_S}[fault.phase]
    rng = random.Random(fault.salt)
    served = beside(world, p, d)
    outcomes = []
    for _ in range(3):
        after = longest * rng.random()
        if fault.where == "prefill":
            outcomes.append(world.leave(p, world.prompt(), dict(KEEP), after))
        else:
            outcomes.append(leave_decode(world, p, d, after))
    left = sum(outcome.end is End.ABORTED for outcome in outcomes)
    return Struck([*outcomes, served.result(120.0)], left)


def bad_network(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """The packets between the two hosts are lost or late for up to some seconds; a second request comes meanwhile."""
    network = world.network
    assert network is not None
    rng = random.Random(fault.salt)
    seconds = 0.3 + 6.0 * fault.amount**2
    ways = [way for name, way in network.ways.items() if fault.where in ("both", name)]
    before, links = network.touched, fault.kind == "link down"

    def strike() -> None:
        if links:
            network.link(fault.where, False)
        for way in ways:
            way.open = fault.kind in ("loss", "delay", "large lost")
            way.longest = LONGEST if fault.kind == "large lost" else None
            way.loss = LOSS if fault.kind == "loss" else 0.0
            way.delay_s = DELAY_S if fault.kind == "delay" else 0.0

    try:
        running = in_phase(world, p, d, fault, rng, strike, held_s=seconds)
        running.append(beside(world, p, d, seconds))
        pause(seconds)
    finally:
        network.mend()
    return Struck(settled(running), network.touched - before + links)


STRIKES: dict[str, Strike] = {
    "duplicated": tampered(duplicated, held_s=2.0),
    "delayed": tampered(delayed, held_s=5.0),
    "lost once": tampered(lost_once, held_s=4.0),
    "lost": tampered(lost, held_s=4.0),
    "replayed": replay,
    "damaged": tampered(damaged),
    "foreign": tampered(foreign),
    "stopped": stopped,
    "aborted": aborted,
    "junk": junk,
    "forged": forged,
    "forged name": forged_name,
    "rejected": rejected,
    "several choices": several,
    "full": both_full,
    "used again": used_again,
    "out of order": out_of_order,
    "link down": bad_network,
    "blackout": bad_network,
    "loss": bad_network,
    "large lost": bad_network,
    "delay": bad_network,
    "half-open": bad_network,
}

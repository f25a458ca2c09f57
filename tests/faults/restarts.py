"""Faults that end an instance: it is started again at the same addresses, and must be told from its former life.

What was asked of the killed instance may break off; whatever the others were asked must end as ever, and parameters
that the former life gave out must be refused by the new one.
"""

from __future__ import annotations

import random
import signal
import time

from faults.plan import Fault
from faults.strikes import in_phase, pause, settled, victims
from faults.world import RECOVERY_S, End, Instance, Outcome, World, begin

GONE_S = 20.0
"""How long the rest of an instance may take to end after one of its processes was killed."""


def instance_of(p: Instance, d: Instance, fault: Fault) -> Instance:
    return p if fault.where.startswith("prefill") else d


def ended(world: World, p: Instance, d: Instance, fault: Fault) -> list[Outcome]:
    """Kill (SIGKILL, or SIGTERM as an orderly end) in a phase of a request, use what is left, start again."""
    rng = random.Random(fault.salt)
    number = signal.SIGTERM if fault.kind == "terminated" else signal.SIGKILL
    victim = instance_of(p, d, fault)
    targets = victims(p, d, fault.where)
    kept, prompt = world.prefill(p, world.prompt()), world.prompts[world.last]
    frozen_s = 2.0 * fault.amount if fault.kind.startswith("frozen") else 0.0

    def strike() -> None:
        for process in targets:
            if frozen_s:
                process.send(signal.SIGSTOP)
                pause(frozen_s)
            process.send(number)

    running = in_phase(world, p, d, fault, rng, strike, held_s=GONE_S)
    running += [begin(lambda: world.both(p, d, world.prompt(), GONE_S))]
    outcomes = settled(running)
    if kept.params is not None and victim is p:
        outcomes.append(world.decode(d, prompt, kept.params, GONE_S))
    world.restart(victim)
    if kept.params is not None and victim is p:
        stale = world.decode(d, prompt, kept.params)
        policy = "refused" if d.policy == "fail" else "right"
        if stale.end.value != policy:
            stale = Outcome(End.WRONG, f"parameters of a former life: {stale.end.value}, not {policy}: {stale.detail}")
        outcomes.append(stale)
    return outcomes


def recovered(world: World, p: Instance, d: Instance, seconds: float = RECOVERY_S) -> Outcome:
    """The first right answer of a pair, or the last wrong one."""
    until = time.monotonic() + seconds
    while (outcome := world.both(p, d, world.prompt())).end is not End.RIGHT and time.monotonic() < until:
        pause(0.25)
    return outcome

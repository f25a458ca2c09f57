"""Faults that end an instance: it is started again at the same addresses, and must be told from its former incarnation.

What was asked of the killed instance may break off; whatever the others were asked must end as ever, and parameters
that the former incarnation gave out must be refused by the new one.
"""

from __future__ import annotations

import random
import signal
from dataclasses import replace

from tests.faults.asked import End, Outcome, Struck, pause, settled
from tests.faults.instances import Instance
from tests.faults.plan import Fault
from tests.faults.strikes.strikes import beside, in_phase, victims
from tests.faults.world import World

GONE_S = 20.0
"""How long the rest of an instance may take to end after one of its processes was killed."""

WAITS = "Waiting for connections to close"

KINDS = ("killed", "terminated", "frozen, then killed")


def instance_of(p: Instance, d: Instance, fault: Fault) -> Instance:
    return p if fault.where.startswith("prefill") else d


def ended(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """Kill (SIGKILL, or SIGTERM as an orderly end) in a phase of a request, use what is left, start again."""
    rng = random.Random(fault.salt)
    number = signal.SIGTERM if fault.kind == "terminated" else signal.SIGKILL
    victim = instance_of(p, d, fault)
    targets = victims(p, d, fault.where, rng)
    kept, prompt = world.prefill(p, world.prompt()), world.prompts[world.last]
    frozen_s = 2.0 * fault.amount if fault.kind.startswith("frozen") else 0.0
    hits: list[bool] = []

    def strike() -> None:
        for process in targets:
            if frozen_s:
                process.send(signal.SIGSTOP)
                pause(frozen_s)
            hits.append(process.send(number))

    running = in_phase(world, p, d, fault, rng, strike, held_s=GONE_S)
    running.append(beside(world, p, d, GONE_S))
    outcomes = settled(running)
    if fault.kind == "terminated":
        log = victim.server.log.read_text(errors="replace")
        outcomes = [of_a_server_that_ends(outcome, victim.name, log) for outcome in outcomes]
    if kept.params is not None and victim is p:
        outcomes.append(world.decode(d, prompt, kept.params, GONE_S))
    world.restart(victim)
    if kept.params is not None and victim is p:
        outcomes.append(of_former_life(world.decode(d, prompt, kept.params), d.policy))
    return Struck(outcomes, sum(hits))


def of_a_server_that_ends(outcome: Outcome, victim: str, log: str) -> Outcome:
    """What became of a request to a server that was told to end. vLLM ends its engine first and then waits for the open
    requests, of which one that came at that moment is never answered: the same as broken off, and not the connector's.
    """
    if outcome.end is End.STUCK and outcome.asked == victim and WAITS in log:
        return replace(outcome, end=End.BROKEN, detail=f"{outcome.detail}; its server {WAITS.lower()}")
    return outcome


def of_former_life(outcome: Outcome, policy: str) -> Outcome:
    """What became of parameters of a former incarnation: right only where the decode instance computes the prompt
    itself."""
    wanted = End.REFUSED if policy == "fail" else End.RIGHT
    if outcome.end is wanted:
        return outcome
    text = f"parameters of a former life: {outcome.end.value}, not {wanted.value}: {outcome.detail}"
    return Outcome(End.WRONG, text, asked=outcome.asked)

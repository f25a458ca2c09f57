"""Both legs of a hand-off in orders in which no router sends them, in mode push: they find each other by a common name.

Whatever comes first, whatever is missing, every leg ends in time, with the right tokens or refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from tests.faults.asked import End, Outcome, Struck, begin, pause, settled
from tests.faults.instances import LEASE_S, Instance
from tests.faults.plan import Fault
from tests.faults.strikes.forging import prefill_leg
from tests.faults.world import World
from tests.support.servers.workload import Prompt

ANSWER_S = 60.0


def out_of_order(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """The legs come in the order that the fault names, up to the time of a lease apart."""
    rng = random.Random(fault.salt)
    wait_s = LEASE_S * fault.amount**2
    name, prompt = f"{fault.salt:08x}-{rng.randrange(1 << 32):08x}", world.prompt()
    keep, fetch = world.named(p, name)

    def prefill(asked: Prompt = prompt) -> Outcome:
        return prefill_leg(world, p, asked, keep)

    def decode() -> Outcome:
        return world.decode(d, prompt, fetch)

    def other() -> Outcome:
        return prefill(another)

    def again() -> Outcome:
        return world.at_once(p, d, another, name=name)

    def leave(instance: Instance) -> Callable[[], Outcome]:
        params = keep if instance is p else fetch
        return lambda: world.leave(instance, prompt, params, 0.1 * rng.random())

    another = world.prompt()
    if fault.where.startswith("retry"):
        return tried_again(world, p, d, fault)
    legs: tuple[Callable[[], Outcome], ...] = {
        "decode first": (decode, prefill),
        "prefill first": (prefill, decode),
        "no prefill": (decode,),
        "no decode": (prefill,),
        "two decodes": (decode, decode, prefill),
        "two prefills": (prefill, decode, prefill),
        "another prompt": (decode, other),
        "name again": (prefill, decode, again),
        "prefill leaves": (decode, leave(p)),
        "decode leaves": (leave(d), prefill),
    }[fault.where]
    running = []
    for leg in legs:
        running.append(begin(leg))
        pause(wait_s / len(legs))
    return Struck(settled(running, ANSWER_S), len(legs))


def tried_again(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """A router's next attempt under the name of one that has just ended, in either order: nothing is left of the last
    one that could refuse it."""
    name = f"again-{fault.salt:08x}"
    outcomes = []
    for attempt in range(2):
        prompt = world.prompt()
        head_start_s = 0.3 if fault.where.endswith("prefill first") else -0.3
        outcome = world.at_once(p, d, prompt, head_start_s if attempt else 0.0, name=name)
        if outcome.end is End.REFUSED:
            outcome = Outcome(End.WRONG, f"attempt {attempt + 1} under one name: {outcome.detail}", asked=outcome.asked)
        outcomes.append(outcome)
    return Struck(outcomes, len(outcomes))

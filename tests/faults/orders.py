"""Both legs of a hand-off in orders in which no router sends them, in mode push: they find each other by a common name.

Whatever comes first, whatever is missing, every leg ends in time, with the right tokens or refused.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from e2e.workload import Prompt
from faults.asked import Outcome, Struck, begin, pause, settled
from faults.forging import prefill_leg
from faults.instances import LEASE_S, Instance
from faults.plan import Fault
from faults.world import World

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

"""Faults of requests: what vLLM refuses on decode, several choices of one, and two instances that wait for each other.

The prefill side must have its blocks back at once, not when a lease has run out, so here a lease that outlives its
request is a request without an end.
"""

from __future__ import annotations

import random
import time

from tests.faults.asked import KEEP, End, Outcome, Struck, begin, pause, settled
from tests.faults.instances import LEASE_S, Instance
from tests.faults.plan import Fault
from tests.faults.strikes.forging import prefill_leg
from tests.faults.world import World
from tests.support.servers.workload import Prompt

REFUSED = {"temperature": {"temperature": -3}, "length": {"max_tokens": 10**6}}
CHOICES = 3
AT_ONCE_S = 0.75 * LEASE_S
FULL_S = 20.0
"""After which an instance of both roles gives up blocks that another one keeps."""
WAITING, WAITING_TOKENS = 4, 1900
"""Prompts and their tokens: together more of a cache of CACHE_BYTES than leaves room for another one of them."""


def rejected(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """A request that decode's vLLM refuses before an engine sees it."""
    prompt = world.prompt()
    if fault.phase == "at once":
        keep, params = world.named(p)
        running = [begin(lambda: prefill_leg(world, p, prompt, keep))]
    else:
        first, running = world.prefill(p, prompt), []
        if first.params is None:
            return Struck([first], 0)
        params = first.params
    outcome = world.ask(d, prompt, params, **REFUSED[fault.where])
    outcomes = [outcome, *settled(running)]
    return Struck([*outcomes, *kept(world, p)], int(outcome.end is End.REFUSED))


def kept(world: World, p: Instance) -> list[Outcome]:
    """Nothing, or that a prefill instance still holds blocks."""
    until = time.monotonic() + AT_ONCE_S
    while world.holdings(p).get("pd_leases", 0.0):
        if time.monotonic() > until:
            return [Outcome(End.STUCK, f"{p.name} holds a lease {AT_ONCE_S:g} s after its request was refused")]
        pause(0.1)
    return []


def several(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """`n` > 1 by way of a proxy that passes it on, to both instances or to the second one."""
    prompt = world.prompt()
    asked = CHOICES if fault.where == "both" else 1
    first = world.ask(p, prompt, dict(KEEP), max_tokens=1, **choices(asked))
    if first.params is None:
        return Struck([first], 0)
    params = world.through_relay(p, first.params)
    if fault.phase == "client leaves":
        return Struck([world.leave(d, prompt, params, fault.amount * 0.1, **choices(CHOICES))], 1)
    return Struck([world.ask(d, prompt, params, **choices(CHOICES))], 1)


def choices(number: int) -> dict[str, float]:
    """Greedy, by a name under which vLLM allows `n` > 1."""
    return {"n": number, "temperature": 1.0, "top_k": 1}


def both_full(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """Two instances of both roles whose caches are full of prefills for each other: some of them give up."""
    rng = random.Random(fault.salt)
    pairs = [(p, d), (d, p)] if fault.where == "in turn" else [(p, d)] * WAITING + [(d, p)] * WAITING
    legs = (pairs * WAITING)[: 2 * WAITING]
    prompts: list[Prompt] = [tuple(rng.randrange(256) for _ in range(WAITING_TOKENS)) for _ in legs]
    for prompt, (_, other) in zip(prompts, legs, strict=True):
        world.answers[prompt] = world.compute(other, prompt)
    world.forget_prefixes()
    handed = [begin(lambda a=a, x=x: world.prefill(a, x)) for (a, _), x in zip(legs, prompts, strict=True)]
    first = settled(handed)
    running = [
        begin(lambda b=b, x=x, leg=leg: world.decode(b, x, leg.params or {}, held_s=FULL_S))
        for (_, b), x, leg in zip(legs, prompts, first, strict=True)
        if leg.params is not None
    ]
    outcomes = settled(running)
    for prompt in prompts:
        del world.answers[prompt]
    lost = [leg for leg in first if leg.params is None]
    return Struck([*lost, *outcomes], len(running))

"""Faults of the parameters: changed on the way, of another request, used where and when they should not be."""

from __future__ import annotations

import random
from typing import Any

from tests.faults.asked import End, Outcome, Params, Struck, begin, pause, settled
from tests.faults.instances import LEASE_S, Instance
from tests.faults.plan import Fault
from tests.faults.world import World
from tests.support.ports import free_port
from tests.support.servers.workload import Prompt

FILLING, FILLING_TOKENS = 8, 1100
"""Prompts and their tokens, together more than CACHE_BYTES hold of model gqa: 8 KiB each."""


def own(params: Params, field: str, value: Any) -> Params:
    return {**params, "pd_connector": {**params["pd_connector"], field: value}}


def forgeries(params: Params, rng: random.Random) -> dict[str, Params]:
    """Changed answers of a prefill instance, by what was changed."""
    blocks = params["remote_block_ids"]
    digits = f"{rng.randrange(1 << 128):032x}"
    other_mode = "push" if params["transfer_mode"] == "pull" else "pull"
    firsts = params["pd_connector"]["first_blocks"]
    return {
        "nonce": own(params, "nonce", digits),
        "incarnation": own(params, "incarnation", digits),
        "request": {**params, "remote_request_id": f"cmpl-{digits}"},
        "engine": {**params, "remote_engine_id": digits},
        "blocks": {**params, "remote_block_ids": [[1 + rng.randrange(40) for _ in group] for group in blocks]},
        "far blocks": {**params, "remote_block_ids": [[10**6 + block for block in group] for group in blocks]},
        "tokens": {**params, "remote_num_tokens": rng.randrange(1, 2000)},
        "port": {**params, "remote_port": free_port()},
        "mode": {**params, "transfer_mode": rng.choice([other_mode, "teleport", None])},
        "groups": {**params, "remote_block_ids": [*blocks, [1]]},
        "digest": own(params, "prompt_digest", digits[:16]),
        "version": own(params, "version", rng.randrange(2, 60000)),
        "first blocks": own(params, "first_blocks", [first + 1 + rng.randrange(5) for first in firsts]),
    }


def named_forgeries(params: Params, rng: random.Random) -> dict[str, Params]:
    """Changed parameters of a router that sends both legs at once, by what was changed."""
    digits = f"{rng.randrange(1 << 128):032x}"
    return {
        "engine": {**params, "remote_engine_id": digits},
        "host": {**params, "remote_host": rng.choice(["10.255.255.1", "not a host", "::;tcp://*:1", ""])},
        "port": {**params, "remote_port": rng.choice([0, 70000, free_port()])},
        "name": {**params, "transfer_id": digits},
        "no name": {**params, "transfer_id": rng.choice(["", "x" * 600, 7])},
        "mode": {**params, "transfer_mode": rng.choice(["pull", "teleport"])},
        "both flags": {**params, "do_remote_decode": True},
        "blocks": {**params, "remote_block_ids": [[1 + rng.randrange(40) for _ in range(8)]], "remote_num_tokens": 256},
        "sizes": {**params, "tp_size": rng.choice([0, 2, 7]), "remote_num_tokens": rng.randrange(-1, 2000)},
        "extension": {**params, "pd_connector": {"version": 1, "nonce": digits}},
        "bootstrap": {**params, "remote_bootstrap_addr": f"http://127.0.0.1:{free_port()}"},
        "unknown field": {**params, "remote_blocks": [1, 2, 3]},
    }


def forged(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """Parameters that were changed on the way, or belong to another prompt."""
    prompt, other = world.prompt(), world.prompt()
    first = world.prefill(p, prompt)
    if first.params is None:
        return Struck([first], 0)
    rng = random.Random(fault.salt)
    if fault.where == "another prompt":
        return Struck([world.decode(d, other, first.params)], 1)
    changed = forgeries(first.params, rng)[fault.where]
    return Struck([world.decode(d, prompt, changed)], int(changed != first.params))


def forged_name(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """The same for legs that are sent at once: the prefill waits meanwhile for a decode request that never comes."""
    prompt, rng = world.prompt(), random.Random(fault.salt)
    keep, fetch = world.named(p)
    changed = named_forgeries(fetch, rng)[fault.where]
    running = begin(lambda: prefill_leg(world, p, prompt, keep))
    pause(0.1 * fault.amount)
    outcome = world.decode(d, prompt, changed)
    return Struck([outcome, running.result(120.0)], int(changed != fetch))


def prefill_leg(world: World, p: Instance, prompt: Prompt, keep: Params) -> Outcome:
    """The prefill leg of a named hand-off; its token is nobody's answer."""
    outcome = world.ask(p, prompt, keep, max_tokens=1)
    return Outcome(End.RIGHT) if outcome.end is End.WRONG else outcome


def used_again(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """The same parameters twice, in different states of their lease."""
    prompt, rng = world.prompt(), random.Random(fault.salt)
    first = world.prefill(p, prompt)
    if (params := first.params) is None:
        return Struck([first], 0)
    if fault.where == "at the same time":
        return Struck(settled([begin(lambda: world.decode(d, prompt, params)) for _ in range(3)]), 2)
    if fault.where == "after the lease":
        pause(LEASE_S + 1.0)
        fill(world, p, rng)
        return Struck([world.decode(d, prompt, params)], 1)
    outcomes = [world.decode(d, prompt, params)]
    if fault.where == "after a reset":
        world.forget_prefixes()
    fill(world, p, rng)
    return Struck([*outcomes, world.decode(d, prompt, params), world.both(p, d, prompt)], 1)


def fill(world: World, p: Instance, rng: random.Random) -> None:
    """Have the prefill instance use every block for prompts that nobody has asked before."""
    for _ in range(FILLING):
        world.compute(p, tuple(rng.randrange(256) for _ in range(FILLING_TOKENS)), max_tokens=1)

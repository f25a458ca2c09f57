"""Faults of the side channel: what the man in the middle does to chosen control messages.

A `Rule` is made for each fault; what it did to messages is counted, because messages that undisturbed requests do
without (`PROVOKED`) have to be brought about: by clients that leave, or by holding a request up until its lease is
renewed. The relay is honest again afterwards.
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.faults.asked import Outcome, Struck, begin, pause
from tests.faults.instances import LEASE_S, Instance
from tests.faults.plan import Fault
from tests.faults.system.relay import Passing, Relay, Rule, forward
from tests.faults.world import World
from vllm_pd_connector.protocol.wire import messages
from vllm_pd_connector.protocol.wire.push_messages import Pushed, PushState

PROVOKED = ("Release", "Renew", "WithdrawPush", "DeclinePush")
"""Messages that undisturbed requests do without."""

SOON_S, LATE_S = 0.02, 0.3
FROZEN_S = 0.5
HELD_S = LEASE_S / 2
"""How long a confirmation is held back so that the lease is renewed meanwhile, which comes after a third of it; well
below `confirm_timeout`."""

TRIES = 3
RuleOf = Callable[[Fault, random.Random], Rule]


class Counted:
    """A rule, and how many messages it did not simply forward."""

    def __init__(self, rule: Rule):
        self._rule = rule
        self.touched = 0

    def __call__(self, passing: Passing) -> list[tuple[float, bytes]]:
        made = self._rule(passing)
        self.touched += made != forward(passing)
        return made


@contextmanager
def obeying(relay: Relay, rule: Rule) -> Iterator[None]:
    relay.obey(rule)
    try:
        yield
    finally:
        relay.obey(forward)


def tampered(rule_of: RuleOf, held_s: float = 0.0) -> Callable[[World, Instance, Instance, Fault], Struck]:
    """Two requests while the relay follows a rule; the second meets what the first left behind."""

    def strike(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
        rng = random.Random(fault.salt)
        rule = Counted(rule_of(fault, rng))
        first = world.prefill(p, prompt := world.prompt())
        if first.params is None:
            return Struck([first], 0)
        held = held_s + 2 * HELD_S
        with obeying(world.relay(p), withheld("ReadDone", HELD_S, rule) if fault.where == "Renew" else rule):
            outcomes = [world.decode(d, prompt, first.params, held)]
            for _ in range(TRIES):
                if fault.where in PROVOKED:
                    outcomes += provoke(world, p, d, fault.where)
                if rule.touched or fault.where not in PROVOKED:
                    break
            outcomes.append(world.both(p, d, world.prompt(), held))
        return Struck(outcomes, rule.touched)

    return strike


def withheld(name: str, seconds: float, rule: Rule, clock: Callable[[], float] = time.monotonic) -> Rule:
    """The same rule, but what questions of this name say arrives only once it is repeated `seconds` after it was said
    first: an answer to an earlier one would come too late to be waited for."""
    said: dict[object, float] = {}

    def dropping(passing: Passing) -> list[tuple[float, bytes]]:
        made = rule(passing)
        if passing.name != name:
            return made
        first = said.setdefault(messages.decode_request(passing.frame)[1], clock())
        return made if clock() - first >= seconds else []

    return dropping


def provoke(world: World, p: Instance, d: Instance, name: str) -> list[Outcome]:
    """Have the decode instance send such a message: by clients that leave, or a lease that gets old."""
    if name == "Renew":
        # Its confirmation is late as well: without a renewal that arrives, the lease is over by then.
        first = world.prefill(p, prompt := world.prompt())
        pause(LEASE_S / 2)
        return [world.decode(d, prompt, first.params, 2 * HELD_S) if first.params else first]
    if name == "Release":
        first = world.prefill(p, prompt := world.prompt())
        return [first if first.params is None else leave_unseen(world, d, prompt, first.params)]
    if name == "DeclinePush":
        return [leave_unseen(world, d, world.prompt(), world.named(p)[1])]
    # Without a prefill a push is waited for until the client leaves.
    return [world.leave(d, world.prompt(), world.named(p)[1], after) for after in (SOON_S, LATE_S)]


def leave_unseen(world: World, d: Instance, prompt: tuple[int, ...], params: dict[str, object]) -> Outcome:
    """A client that comes and goes while the engine is stopped: the request ends before anything is loaded for it."""
    engine = d.processes("engine")
    for process in engine:
        process.send(signal.SIGSTOP)
    try:
        outcome = world.leave(d, prompt, params, FROZEN_S / 2)
        pause(FROZEN_S / 2)
    finally:
        for process in engine:
            process.send(signal.SIGCONT)
    return outcome


def once(name: str | tuple[str, ...], change: Callable[[Passing], list[tuple[float, bytes]]], times: int = 1) -> Rule:
    """Treat the first messages of that name, or those names, so."""
    left, names = [times], (name,) if isinstance(name, str) else name

    def rule(passing: Passing) -> list[tuple[float, bytes]]:
        if passing.name not in names or not left[0]:
            return forward(passing)
        left[0] -= 1
        return change(passing)

    return rule


def duplicated(fault: Fault, rng: random.Random) -> Rule:
    delays = [rng.choice((0.0, 0.0, 0.05, 0.5, 2.0)) for _ in range(rng.randrange(1, 4))]
    return once(fault.where, lambda it: [(0.0, it.frame), *((delay, it.frame) for delay in delays)], 9)


def delayed(fault: Fault, rng: random.Random) -> Rule:
    return once(fault.where, lambda it: [(0.1 + 2.0 * fault.amount, it.frame)], 2)


def lost_once(fault: Fault, rng: random.Random) -> Rule:
    return once(fault.where, lambda it: [], 1 + rng.randrange(2))


def lost(fault: Fault, rng: random.Random) -> Rule:
    return once(fault.where, lambda it: [], 1 << 30)


def replayed(fault: Fault, rng: random.Random) -> Rule:
    """Earlier messages of this kind come again, before and after each new one, which itself comes twice."""
    past: list[bytes] = []

    def rule(passing: Passing) -> list[tuple[float, bytes]]:
        if passing.name != fault.where:
            return forward(passing)
        old = [(rng.choice((0.0, 0.0, 0.3)), frame) for frame in past[-8:]]
        past.append(passing.frame)
        return [*old, (0.0, passing.frame), (0.0, passing.frame), *old]

    return rule


def damaged(fault: Fault, rng: random.Random) -> Rule:
    """The frame's first bytes or its end are hit; a flipped truth value is beyond what can be told without keys."""

    def change(it: Passing) -> list[tuple[float, bytes]]:
        frame = bytearray(it.frame)
        for _ in range(1 + rng.randrange(3)):
            frame[rng.randrange(0, 6)] ^= 1 << rng.randrange(8)
        return [(0.0, bytes(frame) if rng.random() < 0.5 else it.frame[: rng.randrange(1, len(it.frame))])]

    return once(fault.where, change, 1 + rng.randrange(2))


def foreign(fault: Fault, rng: random.Random) -> Rule:
    """Replies that nobody asked for, before the true one."""
    made = {
        "failure": messages.encode(0, messages.Failure(rng.choice(list(messages.FailureCode)), "not from here")),
        "verdict": messages.encode(rng.randrange(1 << 40), messages.ReadVerdict(True, "")),
        "pushed": messages.encode(rng.randrange(1 << 40), Pushed(PushState.DONE, "", True)),
        "junk": rng.randbytes(rng.randrange(1, 2000)),
        "manifests": messages.encode(rng.randrange(1 << 40), messages.Manifests("x", "0" * 32, (b"junk",))),
    }
    before = ("ReadVerdict", "Pushed")
    return once(before, lambda it: [(0.0, made[fault.where]), (0.0, it.frame)], 2)


def replayed_later(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """The messages of a request that has ended come again between the legs of the next, on the lines that it used."""
    past: list[Passing] = []

    def listen(passing: Passing) -> list[tuple[float, bytes]]:
        if passing.name == fault.where:
            past.append(passing)
        return forward(passing)

    relay = world.relay(p)
    with obeying(relay, listen):
        outcomes = [serial(world, p, d)]
        if fault.where in PROVOKED:
            outcomes += provoke(world, p, d, fault.where)
            pause(FROZEN_S)
    old = list(past)
    relay.say(old)
    first = world.prefill(p, prompt := world.prompt())
    if first.params is None:
        return Struck([*outcomes, first], len(old))
    relay.say(old)
    running = begin(lambda: world.decode(d, prompt, first.params or {}))
    relay.say(old)
    return Struck([*outcomes, running.result(120.0)], len(old))


def serial(world: World, p: Instance, d: Instance) -> Outcome:
    """One leg after the other."""
    first = world.prefill(p, prompt := world.prompt())
    return first if first.params is None else world.decode(d, prompt, first.params)


def replay(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    return (replayed_later if fault.phase == "between" else tampered(replayed))(world, p, d, fault)

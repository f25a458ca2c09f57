"""What becomes of a conversation between two turns, and while prefill reads it: no turn may fail for it, or be wrong.

Decode keeps a first turn; then its lease ends, its blocks are used again, an instance is stopped, killed or started
again, or the parameters of the next turn are changed. Whatever cannot be read must be computed, so that here a refusal
is a fault, too, unless the instance that was killed is the one that was asked.
"""

from __future__ import annotations

import random
import re
import secrets
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from tests.faults.asked import KEEP, End, Outcome, Params, Struck, begin, pause
from tests.faults.instances import LEASE_S, Instance
from tests.faults.plan import Fault
from tests.faults.strikes.forging import FILLING, FILLING_TOKENS, forgeries
from tests.faults.strikes.outlived import wait_until
from tests.faults.strikes.restarts import GONE_S, instance_of
from tests.faults.strikes.strikes import victims
from tests.faults.world import World
from tests.support.servers.workload import Prompt

TALKS = {"conversations": True, "conversation_lease": LEASE_S}
"""Short, so that what nobody has read is free again when a fault is looked at."""
FLAGS = ("--no-enable-prefix-caching",)
"""What is not read of a conversation is computed, and seen in the counters."""
SAID = 60
"""Tokens of the second turn."""
PRESSED_TOKENS = 40
"""Answered by each of the requests that take a pool: they are all under way before the first has ended."""
READING_S = 0.06
"""A moment in the first milliseconds after the second turn's prefill was asked: its questions, or its read."""
LONGEST_STOP_S = 3.0
COUNTED = re.compile(r"^vllm:pd_(turns_read|turns_computed|conversations_kept)_total\{[^}]*\} (\S+)$", re.MULTILINE)


def counted(world: World, instance: Instance, what: str) -> float:
    """How many turns an instance has read or computed, or conversations kept."""
    world.holdings(instance)  # renews its metrics
    return {name: float(value) for name, value in COUNTED.findall(instance.metrics())}[what]


def press(world: World, d: Instance, rng: random.Random) -> None:
    """Have an instance use every block for requests that run at a time, and get what is held for conversations."""
    asked = [tuple(rng.randrange(256) for _ in range(FILLING_TOKENS)) for _ in range(FILLING)]
    with ThreadPoolExecutor(FILLING) as pool:
        list(pool.map(lambda prompt: world.compute(d, prompt, max_tokens=PRESSED_TOKENS), asked))


class Talk:
    """A conversation of two turns, the first of which was answered: `first` says how, and `kept` is what a router has
    of it, decode's answer or the name that decode was given."""

    def __init__(self, world: World, p: Instance, d: Instance, fault: Fault):
        self.world, self.p, self.d = world, p, d
        self.rng = random.Random(fault.salt)
        began = world.prompt()
        said = tuple(self.rng.randrange(256) for _ in range(SAID))
        self.prompt: Prompt = (*began, *world.answers[began], *said)
        world.answers[self.prompt] = world.compute(d, self.prompt)
        world.forget_prefixes()
        name = secrets.token_hex(8)
        self.kept_before = counted(world, d, "conversations_kept")
        self.first = world.prefill(p, began)
        if self.first.params is not None:
            self.first = world.decode(d, began, {**self.first.params, "transfer_id": name})
        self.kept: Params | None = self.first.params
        if self.kept is not None and fault.phase == "named":
            place = {"remote_engine_id": d.engine_id, "remote_host": "127.0.0.1", "remote_port": d.side_port}
            self.kept = {**KEEP, **place, "remote_request_id": name}

    def prefill(self, held_s: float = 0.0) -> Outcome:
        """The second turn's first leg, which must hand over."""
        assert self.kept is not None
        outcome = self.world.prefill(self.p, self.prompt, held_s, self.kept)
        if outcome.end is End.REFUSED:
            return replace(outcome, end=End.WRONG, detail=f"a turn that can be computed was refused: {outcome.detail}")
        return outcome

    def go_on(self, handed: Outcome) -> list[Outcome]:
        """The rest of the second turn."""
        if handed.params is None:
            return [self.first, handed]
        return [self.first, handed, self.world.decode(self.d, self.prompt, handed.params)]

    def end(self, outcomes: list[Outcome], touched: float) -> Struck:
        del self.world.answers[self.prompt]
        return Struck(outcomes, int(touched))


def _told(strike: Callable[[Talk, Fault], Struck]) -> Callable[[World, Instance, Instance, Fault], Struck]:
    """A strike on a conversation whose first turn was answered."""

    def body(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
        talk = Talk(world, p, d, fault)
        if talk.kept is None:
            detail = f"decode kept nothing: {talk.first.end.value}: {talk.first.detail}"
            return talk.end([Outcome(End.WRONG, detail)], 0)
        return strike(talk, fault)

    return body


@_told
def gone(talk: Talk, fault: Fault) -> Struck:
    """What is held ends before the next turn comes, which is computed."""
    world, d = talk.world, talk.d
    before = counted(world, talk.p, "turns_computed")
    if fault.where == "lease over":
        held = d.at_start.get("pd_conversations_held", 0.0)
        wait_until(lambda: counted(world, d, "conversations_kept") > talk.kept_before, "what is kept is counted")
        wait_until(lambda: world.holdings(d).get("pd_conversations_held", 0.0) == held, "the lease ends")
    elif fault.where == "forgotten":
        world.forget_prefixes()
    press(world, d, talk.rng)
    outcomes = talk.go_on(talk.prefill())
    return talk.end(outcomes, counted(world, talk.p, "turns_computed") - before)


@_told
def forged(talk: Talk, fault: Fault) -> Struck:
    """Parameters that were changed, or are of another conversation."""
    world, kept = talk.world, talk.kept
    assert kept is not None
    if fault.where == "another's":
        other = Talk(world, talk.p, talk.d, replace(fault, salt=fault.salt + 1000))
        talk.kept = other.kept or kept
        other.end([], 0)
    elif fault.where == "prefixes":
        [*prefixes] = kept["pd_connector"]["prefixes"]
        short = [[tokens - 1, digest] for tokens, digest in prefixes[:-1]]
        talk.kept = {**kept, "pd_connector": {**kept["pd_connector"], "prefixes": [*short, prefixes[-1]]}}
    elif fault.where == "twice":
        first = talk.go_on(talk.prefill())
        outcomes = [*first, *talk.go_on(talk.prefill())[1:]]
        return talk.end(outcomes, 1)
    else:
        talk.kept = forgeries(kept, talk.rng)[fault.where]
    return talk.end(talk.go_on(talk.prefill()), talk.kept != kept)


@_told
def struck(talk: Talk, fault: Fault) -> Struck:
    """A process is stopped for a while or killed, between the turns or while prefill asks and reads."""
    world, killed = talk.world, fault.kind == "conversation killed"
    targets = victims(talk.p, talk.d, fault.where, talk.rng)
    seconds = 0.2 + (LONGEST_STOP_S - 0.2) * fault.amount**2
    victim = instance_of(talk.p, talk.d, fault)
    hits: list[bool] = []

    def strike() -> None:
        hits.extend(process.send(signal.SIGKILL if killed else signal.SIGSTOP) for process in targets)

    held_s = GONE_S if killed else seconds
    running = begin(lambda: talk.prefill(held_s)) if fault.phase == "reading" else None
    if running is not None:
        pause(talk.rng.random() * READING_S)
    strike()
    if running is None and not (killed and victim is talk.p):
        running = begin(lambda: talk.prefill(held_s))
    if not killed:
        pause(seconds)
        for process in targets:
            process.send(signal.SIGCONT)
    handed = running.result(120.0) if running is not None else None
    if killed:
        world.restart(victim)
    if handed is None:  # nobody was there to be asked
        return talk.end(talk.go_on(talk.prefill()), sum(hits))
    if killed:  # what was handed over is gone, or its lease is: the turn comes again, with what the former life gave
        again = talk.go_on(talk.prefill())[1:]
        return talk.end([talk.first, handed, *again], sum(hits))
    return talk.end(talk.go_on(handed), sum(hits))


KINDS = {
    "conversation gone": gone,
    "conversation forged": forged,
    "conversation stopped": struck,
    "conversation killed": struck,
}

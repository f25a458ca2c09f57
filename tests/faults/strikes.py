"""What each kind of fault does, on one pair of instances. A strike returns how the requests that it met have ended.

Every strike leaves the instances as it found them: what was stopped continues, the relay is honest again. The numbers
that a strike chooses come from the fault's amount and salt, so that a campaign can be repeated.
"""

from __future__ import annotations

import contextlib
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from e2e.workload import Prompt
from faults import processes
from faults.orders import out_of_order
from faults.plan import Fault
from faults.relay import Passing, Relay, Rule, forward
from faults.world import KEEP, LEASE_S, Instance, Outcome, Params, World, begin
from launch import free_port
from vllm_pd_connector.protocol import messages
from vllm_pd_connector.protocol.push_messages import Pushed, PushState

Strike = Callable[[World, Instance, Instance, Fault], list[Outcome]]

SOON_S, LATE_S = 0.02, 0.3
LONGEST_STOP_S = 4.0
DECODE_MOMENTS_S = 0.08
"""A moment in the first milliseconds after a request reached the decode instance: handshake, read or confirmation."""


def pause(seconds: float) -> None:
    threading.Event().wait(seconds)


def settled(futures: list[Any], seconds: float = 120.0) -> list[Outcome]:
    return [future.result(seconds) for future in futures]


PROVOKED = ("Release", "Renew", "WithdrawPush", "DeclinePush")
"""Messages that undisturbed requests do without."""


# -- control messages -------------------------------------------------------------------------------------------------


@contextmanager
def obeying(relay: Relay, rule: Rule) -> Iterator[None]:
    relay.obey(rule)
    try:
        yield
    finally:
        relay.obey(forward)


def tampered(rule_of: Callable[[Fault, random.Random, list[bytes]], Rule], held_s: float = 0.0) -> Strike:
    """Two requests while the relay follows a rule; the second meets what the first left behind."""

    def strike(world: World, p: Instance, d: Instance, fault: Fault) -> list[Outcome]:
        rng = random.Random(fault.salt)
        first = world.prefill(p, prompt := world.prompt())
        if first.params is None:
            return [first]
        assert p.relay is not None
        with obeying(p.relay, rule_of(fault, rng, [])):
            outcomes = [world.decode(d, prompt, first.params, held_s)]
            if fault.where in PROVOKED:
                outcomes += provoke(world, p, d, fault.where)
            outcomes.append(world.both(p, d, world.prompt(), held_s))
        return outcomes

    return strike


def provoke(world: World, p: Instance, d: Instance, name: str) -> list[Outcome]:
    """Have the decode instance send such a message: by clients that leave, or a lease that gets old."""
    if name == "Renew":
        first = world.prefill(p, prompt := world.prompts[0])
        pause(LEASE_S / 2)
        return [world.decode(d, prompt, first.params) if first.params else first]
    if name == "Release":
        return [leave_decode(world, p, d, after) for after in (0.0, SOON_S)]
    # Without a prefill a push is waited for until the client leaves.
    return [world.leave(d, world.prompt(), world.named(p)[1], after) for after in (SOON_S / 2, SOON_S, LATE_S)]


def leave_decode(world: World, p: Instance, d: Instance, after_s: float) -> Outcome:
    """A client that goes away from the second leg."""
    prompt = world.prompt()
    first = world.prefill(p, prompt)
    return first if first.params is None else world.leave(d, prompt, first.params, after_s)


def once(name: str | tuple[str, ...], change: Callable[[Passing], list[tuple[float, bytes]]], times: int = 1) -> Rule:
    """Treat the first messages of that name, or those names, so."""
    left, names = [times], (name,) if isinstance(name, str) else name

    def rule(passing: Passing) -> list[tuple[float, bytes]]:
        if passing.name not in names or not left[0]:
            return forward(passing)
        left[0] -= 1
        return change(passing)

    return rule


def duplicated(fault: Fault, rng: random.Random, _: list[bytes]) -> Rule:
    delays = [rng.choice((0.0, 0.0, 0.05, 0.5, 2.0)) for _ in range(rng.randrange(1, 4))]
    return once(fault.where, lambda it: [(0.0, it.frame), *((delay, it.frame) for delay in delays)], 9)


def delayed(fault: Fault, rng: random.Random, _: list[bytes]) -> Rule:
    return once(fault.where, lambda it: [(0.1 + 2.0 * fault.amount, it.frame)], 2)


def lost_once(fault: Fault, rng: random.Random, _: list[bytes]) -> Rule:
    return once(fault.where, lambda it: [], 1 + rng.randrange(2))


def lost(fault: Fault, rng: random.Random, _: list[bytes]) -> Rule:
    return once(fault.where, lambda it: [], 1 << 30)


def replayed(fault: Fault, rng: random.Random, past: list[bytes]) -> Rule:
    """Earlier messages of this kind come again, before and after each new one."""

    def rule(passing: Passing) -> list[tuple[float, bytes]]:
        if passing.name != fault.where:
            return forward(passing)
        old = [(rng.choice((0.0, 0.0, 0.3)), frame) for frame in past[-8:]]
        past.append(passing.frame)
        return [*old, (0.0, passing.frame), *old]

    return rule


def damaged(fault: Fault, rng: random.Random, _: list[bytes]) -> Rule:
    """The frame's first bytes or its end are hit; a flipped truth value is beyond what can be told without keys."""

    def change(it: Passing) -> list[tuple[float, bytes]]:
        frame = bytearray(it.frame)
        for _ in range(1 + rng.randrange(3)):
            frame[rng.randrange(0, 6)] ^= 1 << rng.randrange(8)
        return [(0.0, bytes(frame) if rng.random() < 0.5 else it.frame[: rng.randrange(1, len(it.frame))])]

    return once(fault.where, change, 1 + rng.randrange(2))


def foreign(fault: Fault, rng: random.Random, _: list[bytes]) -> Rule:
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


# -- processes --------------------------------------------------------------------------------------------------------


def victims(p: Instance, d: Instance, where: str) -> list[processes.Process]:
    side, part = where.split()
    return {"prefill": p, "decode": d}[side].processes(part)


def stopped(world: World, p: Instance, d: Instance, fault: Fault) -> list[Outcome]:
    """SIGSTOP in a phase of one request, SIGCONT up to some seconds later; a second request comes meanwhile."""
    rng = random.Random(fault.salt)
    seconds = 0.2 + (LONGEST_STOP_S - 0.2) * fault.amount**2
    targets = victims(p, d, fault.where)

    def stop() -> None:
        for process in targets:
            process.send(signal.SIGSTOP)

    try:
        running = in_phase(world, p, d, fault, rng, stop, held_s=seconds)
        running.append(begin(lambda: world.both(p, d, world.prompt(), seconds)))
        pause(seconds)
    finally:
        for process in targets:
            process.send(signal.SIGCONT)
    return settled(running)


def in_phase(
    world: World, p: Instance, d: Instance, fault: Fault, rng: random.Random, act: Callable[[], None], held_s: float
) -> list[Any]:
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
    if fault.phase == "confirm":
        assert p.relay is not None
        done = threading.Event()

        def rule(passing: Passing) -> list[tuple[float, bytes]]:
            if passing.name == ("Pushed" if world.pushes else "ReadDone") and not done.is_set():
                act()
                done.set()
            return forward(passing)

        p.relay.obey(rule)
    params = first.params
    running = begin(lambda: world.decode(d, prompt, params, held_s))
    if fault.phase == "decode":
        pause(rng.random() * DECODE_MOMENTS_S)
        act()
    if fault.phase == "confirm":
        done.wait(10.0)
        assert p.relay is not None
        p.relay.obey(forward)
    return [running]


def aborted(world: World, p: Instance, d: Instance, fault: Fault) -> list[Outcome]:
    """Three clients leave one leg; a fourth, beside them, is served."""
    longest = {"at once": 0.0, "soon": SOON_S, "late": LATE_S}[fault.phase]
    rng = random.Random(fault.salt)
    beside = begin(lambda: world.both(p, d, world.prompt()))
    outcomes = []
    for _ in range(3):
        after = longest * rng.random()
        if fault.where == "prefill":
            outcomes.append(world.leave(p, world.prompt(), dict(KEEP), after))
        else:
            outcomes.append(leave_decode(world, p, d, after))
    return [*outcomes, beside.result(120.0)]


# -- ports ------------------------------------------------------------------------------------------------------------


def ports(p: Instance, d: Instance, where: str) -> list[int]:
    """The side channel, an HTTP server, or what the library listens on in the process that moves the caches."""
    http = {"prefill server": p.spec.port, "decode server": d.spec.port}
    if where in http:
        return [http[where]]
    sides = {"side channel": p.side_port, "decode side channel": d.side_port}
    if where in sides:
        return [sides[where]]
    instance = p if where.startswith("prefill") else d
    found = [port for worker in instance.processes("worker") for port in transport_ports(worker.pid)]
    return [port for port in found if port not in sides.values()]


def transport_ports(pid: int) -> list[int]:
    """Ports of the transport's library: those not bound by vLLM's rendezvous, which listens on the IPv6 wildcard."""
    return sorted(port for address, port in processes.listening(pid) if address != "0" * 32)


def junk(world: World, p: Instance, d: Instance, fault: Fault) -> list[Outcome]:
    """Bytes that nobody understands, connections that say nothing, many at once; a request comes meanwhile."""
    rng = random.Random(fault.salt)
    world.prefill(p, world.prompt())  # so that the relay is there, and a lease is held
    greeting = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + b"\0" * 48
    with contextlib.ExitStack() as open_ones:
        for port in ports(p, d, fault.where):
            for _ in range(150 if fault.phase == "crowd" else 3):
                with contextlib.suppress(OSError):
                    client = open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=2))
                    if fault.phase == "bytes":
                        client.sendall(rng.randbytes(rng.choice((1, 64, 1000, 100_000))))
                    elif fault.phase == "greeting":
                        client.sendall(greeting + rng.randbytes(rng.randrange(1, 500)))
        return [world.both(p, d, world.prompt()), world.both(p, d, world.prompt())]


# -- parameters -------------------------------------------------------------------------------------------------------


def own(params: Params, field: str, value: Any) -> Params:
    return {**params, "pd_connector": {**params["pd_connector"], field: value}}


def forgeries(params: Params, rng: random.Random) -> dict[str, Params]:
    blocks = params["remote_block_ids"]
    digits = f"{rng.randrange(1 << 128):032x}"
    other_mode = "push" if params["transfer_mode"] == "pull" else "pull"
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
        "first blocks": own(params, "first_blocks", [1 + rng.randrange(5) for _ in blocks]),
    }


def forged(world: World, p: Instance, d: Instance, fault: Fault) -> list[Outcome]:
    """Parameters that were changed on the way, or belong to another prompt."""
    prompt, other = world.prompt(), world.prompt()
    first = world.prefill(p, prompt)
    if first.params is None:
        return [first]
    rng = random.Random(fault.salt)
    if fault.where == "another prompt":
        return [world.decode(d, other, first.params)]
    return [world.decode(d, prompt, forgeries(first.params, rng)[fault.where])]


def used_again(world: World, p: Instance, d: Instance, fault: Fault) -> list[Outcome]:
    """The same parameters twice, in different states of their lease."""
    prompt = world.prompt()
    first = world.prefill(p, prompt)
    if (params := first.params) is None:
        return [first]
    if fault.where == "at the same time":
        return settled([begin(lambda: world.decode(d, prompt, params)) for _ in range(3)])
    if fault.where == "after the lease":
        fill(world, p, prompt, seconds=LEASE_S + 1.0)
        return [world.decode(d, prompt, params)]
    outcomes = [world.decode(d, prompt, params)]
    if fault.where == "after a reset":
        world.forget_prefixes()
    fill(world, p, prompt)
    return [*outcomes, world.decode(d, prompt, params), world.both(p, d, prompt)]


def fill(world: World, p: Instance, but: Prompt, seconds: float = 0.0) -> None:
    """Have the prefill instance use its blocks for other prompts, for a while."""
    until = time.monotonic() + seconds
    for prompt in (prompt for prompt in world.prompts if prompt != but):
        world.ask(p, prompt, {}, max_tokens=1)
        if time.monotonic() > until and prompt == world.prompts[3]:
            return
    pause(max(0.0, until - time.monotonic()))


# -- network ----------------------------------------------------------------------------------------------------------


def bad_network(world: World, p: Instance, d: Instance, fault: Fault) -> list[Outcome]:
    """The packets between the two hosts are lost or late for up to some seconds; a second request comes meanwhile."""
    assert world.network is not None
    rng = random.Random(fault.salt)
    seconds = 0.3 + 6.0 * fault.amount**2
    ways = [way for name, way in world.network.ways.items() if fault.where in ("both", name)]

    def strike() -> None:
        for way in ways:
            way.open = fault.kind in ("loss", "delay")
            way.loss = 0.3 if fault.kind == "loss" else 0.0
            way.delay_s = 0.5 if fault.kind == "delay" else 0.0

    running = in_phase(world, p, d, fault, rng, strike, held_s=seconds)
    running.append(begin(lambda: world.both(p, d, world.prompt(), seconds)))
    pause(seconds)
    world.network.mend()
    return settled(running)


STRIKES: dict[str, Strike] = {
    "duplicated": tampered(duplicated, held_s=2.0),
    "delayed": tampered(delayed, held_s=5.0),
    "lost once": tampered(lost_once, held_s=4.0),
    "lost": tampered(lost, held_s=4.0),
    "replayed": tampered(replayed),
    "damaged": tampered(damaged),
    "foreign": tampered(foreign),
    "stopped": stopped,
    "aborted": aborted,
    "junk": junk,
    "forged": forged,
    "used again": used_again,
    "out of order": out_of_order,
    "link down": bad_network,
    "loss": bad_network,
    "delay": bad_network,
    "half-open": bad_network,
}

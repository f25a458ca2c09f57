"""What operators and trainers do while requests are handed over: weights that change in place, pauses, resets.

New weights are the old ones with the norms before attention scaled (`pd_test_plugins.weights`), under a name of their
own; the right answers are those of the old weights or of the new, all of an answer's tokens by one of them, unless vLLM
kept the request over the pause while it decoded: its tokens stay, and the new weights go on from them. Where one side
alone is changed, nothing that the other computed is taken.
"""

from __future__ import annotations

import json
import random
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from examples.make_models import MODELS, make
from tests.faults.asked import End, Outcome, Struck, pause, settled
from tests.faults.instances import Instance
from tests.faults.plan import Fault
from tests.faults.strikes.strikes import beside, in_phase
from tests.faults.world import World
from tests.support.servers.workload import Prompt

SCALE = "1.5"
PAUSED_S = 1.5
CALL_S = 60.0
MODES = ("abort", "wait", "keep")


def call(instance: Instance, path: str, body: Mapping[str, object] | None = None) -> bool:
    """Whether an operator's request was carried out. Raises OSError if it was not answered."""
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{instance.url}/{path}", json.dumps(body or {}).encode(), headers)
    with urllib.request.urlopen(request, timeout=CALL_S) as answer:
        return bool(answer.status == 200)


def ask_workers(instance: Instance, method: str, *args: str, **kwargs: str) -> list[Any]:
    """What the workers' extension answers, one of each. Raises OSError if it was not answered."""
    body = json.dumps({"method": method, "args": args, "kwargs": kwargs}).encode()
    request = urllib.request.Request(f"{instance.url}/collective_rpc", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=CALL_S) as answer:
        results: list[Any] = json.load(answer)["results"]
    return results


def change(instance: Instance, name: str, method: str, *args: str, mode: str = "abort", **kwargs: str) -> None:
    """Weights change as a trainer changes them."""
    call(instance, f"pause?mode={mode}")
    call(instance, "collective_rpc", {"method": method, "args": args, "kwargs": kwargs})
    call(instance, "update_weight_version", {"new_version": name})
    call(instance, "resume")


def new_weights(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """The weights of one side or of both change in a phase of one request; others come afterwards."""
    rng = random.Random(fault.salt)
    changed = {"prefill": [p], "decode": [d], "both": [p, d]}[fault.where]
    changes: dict[Instance, str] = {}

    def act() -> None:
        for instance in changed:
            mode = rng.choice(("abort", "keep"))
            change(instance, f"new {fault.salt}", "scale_norms", SCALE, mode=mode)
            changes[instance] = mode

    first = world.last + 1
    back = {"weights_path": str(make(MODELS[world.family]))}
    try:
        running = in_phase(world, p, d, fault, rng, act, held_s=CALL_S)
        outcomes = settled(running)
        outcomes += settled([beside(world, p, d, CALL_S) for _ in range(2)])
        asked = world.prompts[first : world.last + 1]
        mixed = [judged(outcome, world, d, asked, keeps=changes.get(d) == "keep") for outcome in outcomes]
    finally:
        for instance in (p, d):
            change(instance, f"old {fault.salt}", "reload_weights", **back)
    if fault.where != "both":
        taken = [outcome for outcome in outcomes[len(running) :] if outcome.end is End.RIGHT]
        mixed += [Outcome(End.WRONG, f"taken although only the {fault.where} side was changed") for _ in taken]
    return Struck(mixed, len(changes))


def judged(outcome: Outcome, world: World, d: Instance, asked: Sequence[Prompt], *, keeps: bool) -> Outcome:
    """An outcome by both weights, while `d` has the new: what those answer is right, what an answer that a pause kept
    goes on with, too, and what a pause aborted is aborted."""
    if outcome.end is End.WRONG and any(
        outcome.detail == f"{tokens} instead of {world.answers[prompt]}"
        for prompt in asked
        if outcome.detail.endswith(f" instead of {world.answers[prompt]}")
        for tokens in answers_of_new(world, d, prompt, keeps=keeps)
    ):
        return Outcome(End.RIGHT, asked=outcome.asked)
    return let_go(outcome)


def answers_of_new(world: World, d: Instance, prompt: Prompt, *, keeps: bool) -> Iterator[tuple[int, ...]]:
    """What an instance with new weights answers; with `keeps` also after some tokens of the old."""
    old = world.answers[prompt]
    for kept in range(len(old) if keeps else 1):
        yield old[:kept] + world.compute(d, (*prompt, *old[:kept]), max_tokens=len(old) - kept)


def let_go(outcome: Outcome) -> Outcome:
    """A pause of mode abort ends requests as it says."""
    aborted = outcome.end is End.BROKEN and "finish_reason abort" in outcome.detail
    return Outcome(End.ABORTED, asked=outcome.asked) if aborted else outcome


def paused(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """One side is paused in a phase of one request, in a mode, and goes on; another request comes meanwhile."""
    rng = random.Random(fault.salt)
    side, mode = fault.where.split()
    instance = {"prefill": p, "decode": d}[side]
    clear = fault.amount < 0.5
    done: list[bool] = []

    def act() -> None:
        done.append(call(instance, f"pause?mode={mode}&clear_cache={str(clear).lower()}"))

    try:
        running = in_phase(world, p, d, fault, rng, act, held_s=CALL_S)
        running.append(beside(world, p, d, CALL_S))
        pause(PAUSED_S * rng.random())
    finally:
        done.append(call(instance, "resume"))
    return Struck([let_go(outcome) for outcome in settled(running)], sum(done))


def reset(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """The prefix cache of one side is reset in a phase of one request: never without an answer."""
    rng = random.Random(fault.salt)
    side, how = fault.where.split()
    instance = {"prefill": p, "decode": d}[side]
    words = {"plainly": "", "connector": "?reset_external=true", "force": "?reset_running_requests=true"}[how]
    done: list[bool] = []

    def act() -> None:
        try:
            done.append(call(instance, f"reset_prefix_cache{words}"))
        except urllib.error.HTTPError as error:  # vLLM's word for requests that load
            with error:
                done.append(error.code == 500)

    running = in_phase(world, p, d, fault, rng, act, held_s=CALL_S)
    running.append(beside(world, p, d, CALL_S))
    return Struck([let_go(outcome) for outcome in settled(running)], sum(done))


KINDS = {"new weights": new_weights, "paused": paused, "reset": reset}

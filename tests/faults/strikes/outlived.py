"""An engine core that its workers outlive: it is killed in a slow step, while they hold writes that they have begun.

In mode push, with two workers. The decode side must keep the blocks of the push until the workers have ended.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from tests.faults.asked import End, Outcome, Struck, begin, pause, settled
from tests.faults.instances import CHUNK, Instance
from tests.faults.plan import Fault
from tests.faults.strikes.restarts import GONE_S
from tests.faults.system.processes import alive
from tests.faults.world import PATIENCE_S, World
from tests.support.servers.workload import Prompt

QUARANTINED = "pd_quarantined_blocks"
HELD_S = 60.0
"""How long a request may be held up: until the workers hold, and until the core's end is noticed."""


def wait_until(condition: Callable[[], bool], what: str, seconds: float = HELD_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        pause(0.05)


@dataclass
class Outlived:
    """A push whose prefill instance has no core any more, only workers: `workers` are their numbers."""

    hold: Path
    workers: list[int]
    outcome: Future[Outcome]

    def release(self, what: str) -> None:
        """Let go of the workers' "writes" or "steps"; returns when those that held them have gone on, or have ended."""
        self._file(what).unlink(missing_ok=True)
        wait_until(lambda: all(map(self._went_on(what), alive(self.workers))), f"{what} go on")

    def end(self) -> None:
        """Nothing is held any more; returns when the workers have ended."""
        self.release("writes")
        self.release("steps")
        wait_until(lambda: not alive(self.workers), "workers without a core end")

    def _went_on(self, what: str) -> Callable[[int], bool]:
        file = self._file(what)
        return lambda pid: not Path(f"{file}.held.{pid}").exists() or Path(f"{file}.done.{pid}").exists()

    def _file(self, what: str) -> Path:
        return Path(f"{self.hold}.{what}")


def outlive(world: World, p: Instance, d: Instance, prompt: Prompt) -> Outlived:
    """Hold the workers of a prefill instance in the middle of a push of this prompt, and kill their core."""
    assert world.hold is not None and len(prompt) > 4 * CHUNK
    writes, steps = Path(f"{world.hold}.writes"), Path(f"{world.hold}.steps")
    writes.touch()
    steps.touch()
    keep, fetch = world.named(p)
    fetch["remote_port"] = p.side_port  # a relay listens whoever dies behind it
    workers = [worker.pid for worker in p.processes("worker")]
    decode = begin(lambda: world.decode(d, prompt, fetch, HELD_S))
    begin(lambda: world.ask(p, prompt, keep, HELD_S, max_tokens=1))
    wait_until(lambda: all(Path(f"{writes}.held.{pid}").exists() for pid in workers), "workers to hold writes")
    begin(lambda: world.ask(p, (0,) * CHUNK, None, HELD_S, max_tokens=1))  # the prefill may have had its last step
    # One is enough: the other is in the same step, and waits for it.
    wait_until(lambda: any(Path(f"{steps}.held.{pid}").exists() for pid in workers), "a worker to hold its step")
    for engine in p.processes("engine"):
        engine.send(signal.SIGKILL)
    return Outlived(world.hold, workers, decode)


def outlived(world: World, p: Instance, d: Instance, fault: Fault) -> Struck:
    """The fault of a campaign."""
    prompt = next(prompt for prompt in world.prompts if len(prompt) > 4 * CHUNK)
    world.forget_prefixes()
    scene = outlive(world, p, d, prompt)
    [outcome] = settled([scene.outcome], PATIENCE_S + HELD_S)
    if alive(scene.workers) != scene.workers or not world.holdings(d)[QUARANTINED]:
        what = f"workers {alive(scene.workers)} of {scene.workers} live, {world.holdings(d)[QUARANTINED]} in quarantine"
        outcome = Outcome(End.WRONG, f"blocks may be written into and are given back: {what}", asked=d.name)
    beside = world.ask(d, world.prompt(), None, GONE_S)
    scene.end()
    world.restart(p)
    return Struck([outcome, beside], len(scene.workers))

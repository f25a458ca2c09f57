"""The strikes at conversations, with stand-ins for instances: what they do, and what they take for wrong.

The stand-ins keep and read as instances do, so that a strike that struck nothing, or a turn that was refused, shows.
"""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

from tests.faults.asked import End, Outcome, Params
from tests.faults.campaign import ALL_STRIKES
from tests.faults.plan import TALKS, Fault
from tests.support.handed_over import kept

HANDED = {"do_remote_prefill": True}
SAYS: dict[str, Any] = kept()
CASES = [pytest.param(kind.name, where, phase, id=f"{kind.name}, {where}, {phase}")
         for kind in TALKS for where, phase in product(kind.where, kind.phases)]  # fmt: skip


class StandIn(SimpleNamespace):
    """An instance: `holds` is whether decode keeps the turn, `read` and `computed` what prefill did with it."""

    def __init__(self, name: str):
        super().__init__(name=name, at_start={}, engine_id=SAYS["remote_engine_id"], side_port=5600)
        self.holds, self.alive = False, True
        self.counts = {"turns_read": 0, "turns_computed": 0, "conversations_kept": 0}

    def processes(self, _part: str) -> list[Any]:
        return [self]

    def send(self, number: int) -> bool:
        self.alive = self.alive and number != 9
        return True

    def metrics(self) -> str:
        return "".join(f'vllm:pd_{name}_total{{engine="0"}} {n}\n' for name, n in self.counts.items())


class StandInWorld:
    """Both of them, and what asks them. `refuses`: prefill refuses what it cannot read, as it must not. Decode tells at
    a look what was so at the one before, and what it holds ends when it was told."""

    def __init__(self, refuses: bool = False):
        self.p, self.d, self.refuses = StandIn("prefill0"), StandIn("decode0"), refuses
        self.answers: dict[Any, tuple[int, ...]] = {(1, 2, 3): (4,)}
        self.restarted: list[str] = []
        self.kept, self.seen = 0, (False, 0)
        self.pressed = False  # whether blocks were taken of what was held
        self.said: list[Params] = []

    def prompt(self) -> tuple[int, ...]:
        return 1, 2, 3

    def compute(self, instance: StandIn, _prompt: Any, **fields: Any) -> tuple[int, ...]:
        self.pressed |= instance.holds and bool(fields)
        instance.holds = instance.holds and not fields  # requests that take every block
        return (5,)

    def forget_prefixes(self) -> None:
        self.d.holds = False

    def holdings(self, instance: StandIn) -> dict[str, float]:
        if instance is self.p:
            return {}
        (held, kept), self.seen = self.seen, (instance.holds, self.kept)
        instance.counts["conversations_kept"] = kept
        instance.holds = instance.holds and not held
        return {"pd_conversations_held": float(held)}

    def prefill(self, p: StandIn, _prompt: Any, _held_s: float = 0.0, asked: Params | None = None) -> Outcome:
        if not p.alive:
            return Outcome(End.BROKEN, asked=p.name)
        if asked is not None:
            named = "remote_block_ids" not in asked
            reads = self.d.holds and self.d.alive and (named or asked == self.said[-1])
            if self.refuses and not reads:
                return Outcome(End.REFUSED, "HTTP 500")
            p.counts["turns_read" if reads else "turns_computed"] += 1
            self.d.holds = self.d.holds and not reads
        return Outcome(End.RIGHT, params=HANDED)

    def decode(self, d: StandIn, _prompt: Any, params: Params) -> Outcome:
        assert params["do_remote_prefill"]
        d.holds, self.kept = True, self.kept + 1
        self.said.append(SAYS | {"remote_request_id": f"cmpl-{len(self.said)}"})
        return Outcome(End.RIGHT, params=self.said[-1])

    def restart(self, instance: StandIn) -> None:
        instance.alive, instance.holds = True, False
        self.restarted.append(instance.name)


def struck(world: StandInWorld, kind: str, where: str, phase: str) -> Any:
    return ALL_STRIKES[kind](world, world.p, world.d, Fault(kind, where, phase, 0.0, 7))


@pytest.mark.parametrize(("kind", "where", "phase"), CASES)
def test_a_strike_touches_what_it_says_and_every_turn_is_answered(kind: str, where: str, phase: str) -> None:
    world = StandInWorld()
    found = struck(world, kind, where, phase)
    assert found.touched >= 1
    bad = {one.end for one in found.outcomes} - {End.RIGHT}
    assert bad <= ({End.BROKEN} if kind == "conversation killed" and where.startswith("prefill") else set())
    assert [one.end for one in found.outcomes].count(End.RIGHT) >= 3, "the first turn, and both legs of the second"
    assert world.restarted == ([f"{where.split()[0]}0"] if kind == "conversation killed" else [])
    assert world.answers == {(1, 2, 3): (4,)}, "what was learned for the fault alone is forgotten"


def test_a_lease_that_is_to_end_has_ended_before_blocks_are_taken() -> None:
    world = StandInWorld()
    struck(world, "conversation gone", "lease over", "told")
    assert not world.pressed


@pytest.mark.parametrize(("where", "phase"), list(product(TALKS[0].where, TALKS[0].phases)))
def test_a_turn_that_is_refused_though_it_can_be_computed_is_wrong(where: str, phase: str) -> None:
    found = struck(StandInWorld(refuses=True), "conversation gone", where, phase)
    assert End.WRONG in {one.end for one in found.outcomes}

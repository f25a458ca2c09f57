"""What a failed read means, with one and with several KV-cache groups: an HTTP error, or the right tokens.

`kv_load_failure_policy` is vLLM's: with "fail" the request ends with an error, with "recompute" the decode instance
computes the prompt itself. The same holds for what the prefill side should have written. Neither ever answers 200 with
nothing in it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from tests.faults.plan import Fault
from tests.faults.strikes.forging import forgeries
from tests.faults.strikes.strikes import STRIKES
from tests.faults.world import LEASE_S, End, World
from tests.support.servers.pairs import Pairs

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

WORLDS = (("gqa", "pull"), ("swa", "pull"), ("kimi", "pull"), ("gqa", "push"), ("kimi", "push"))
"""One KV-cache group, two, and attention beside states, in both directions."""

LOST = {"pull": ("ReadDone", "ReadVerdict"), "push": ("PushInto", "Pushed")}


@pytest.fixture(params=WORLDS, ids="-".join, scope="module")
def world(request: pytest.FixtureRequest, pairs: Pairs) -> Iterator[World]:
    pairs.end()
    family, mode = request.param
    made = World(pairs.servers, family, 1, ("fail", "recompute"), {"verify": "all", "mode": mode})
    try:
        yield made
    finally:
        made.close()
        pairs.servers.stop(*(instance.server for instance in made.instances))


EXPECTED = {"fail": End.REFUSED, "recompute": End.RIGHT}


def test_parameters_that_cannot_be_read_end_as_the_policy_says(world: World) -> None:
    [p] = world.prefills
    wrong = []
    for d in world.decodes:
        first = world.prefill(p, world.prompt())
        assert first.params is not None
        for name in forgeries(first.params, random.Random(0)):
            prompt = world.prompt()
            params = world.prefill(p, prompt).params
            assert params is not None
            outcome = world.decode(d, prompt, forgeries(params, random.Random(name))[name])
            if outcome.end is not EXPECTED[d.policy]:
                wrong.append(f"{d.policy}, {name}: {outcome.end.value} {outcome.detail}")
    assert not wrong, "\n".join(wrong)
    assert not world.leaks() and not world.dead()


def test_a_prefill_instance_that_no_longer_holds_the_blocks_ends_as_the_policy_says(world: World) -> None:
    [p] = world.prefills
    for d in world.decodes:
        prompt = world.prompt()
        params = world.prefill(p, prompt).params
        assert params is not None
        assert not world.leaks(3 * LEASE_S), "the lease did not end"
        assert world.decode(d, prompt, params).end is EXPECTED[d.policy]


def test_a_prefill_instance_that_does_not_answer_ends_as_the_policy_says(world: World) -> None:
    [p] = world.prefills
    for d in world.decodes:
        for message in LOST["push" if world.pushes else "pull"]:
            struck = STRIKES["lost"](world, p, d, Fault("lost", message, "decode", 0.5, 0))
            assert struck.touched and {outcome.end for outcome in struck.outcomes} == {EXPECTED[d.policy]}, struck
    assert not world.leaks() and not world.recovers()

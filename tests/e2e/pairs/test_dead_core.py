"""Workers may outlive their engine core, and write on: the decode side keeps the blocks until they have ended."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.asked import End
from tests.faults.instances import LIMITS
from tests.faults.strikes.outlived import QUARANTINED, outlive
from tests.faults.system.processes import alive
from tests.faults.world import World
from tests.support.servers.cluster import until
from tests.support.servers.pairs import Pairs


@pytest.fixture(params=["nixl", "mooncake"])
def world(request: pytest.FixtureRequest, pairs: Pairs, tmp_path: Path) -> Iterator[World]:
    pairs.end()
    extra = {**LIMITS, "transfer_timeout": 60.0, "mode": "push", "transport": request.param}
    made = World(pairs.servers, extra=extra, tp_size=2, hold=tmp_path / "hold")
    try:
        yield made
    finally:
        made.close()
        pairs.servers.stop(*(instance.server for instance in made.instances))


@pytest.mark.e2e
@pytest.mark.matrix
def test_what_workers_without_a_core_may_write_into_is_nobody_elses(world: World) -> None:
    (p, d), prompt = world.pair(0), max(world.prompts, key=len)

    def quarantined() -> float:
        return world.holdings(d)[QUARANTINED]

    scene = outlive(world, p, d, prompt)
    assert scene.outcome.result(120).end is End.REFUSED
    assert alive(scene.workers) == scene.workers and quarantined() > 0
    scene.release("writes")
    assert alive(scene.workers) == scene.workers and quarantined() > 0, "writes land in blocks that were given back"
    for other in world.prompts[:8]:
        assert world.compute(d, other) == world.answers[other]
    scene.end()
    until(lambda: quarantined() == 0, "the quarantine ends with the workers")
    assert world.compute(d, prompt) == world.answers[prompt]
    assert not world.dead() or world.dead() == [p.name]

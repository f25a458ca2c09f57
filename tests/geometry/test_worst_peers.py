"""A peer's manifests are within all limits and as bad as these allow: the work stays linear in what came."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.geometry.opaque import opaque_worker
from tests.support.geometry.world import Model, Side, instance
from vllm_pd_connector.geometry import topology
from vllm_pd_connector.geometry.manifest import CONFIGURATION, Manifest
from vllm_pd_connector.geometry.topology import MAX_UNLIKE, TopologyStatus, check_pd_topology

change = msgspec.structs.replace
RANKS = 64


def ranks(engine: str = "p-0") -> list[Manifest]:
    return [worker.manifest for worker in instance(Model(layers=2, heads=RANKS), Side(tp=RANKS), engine)]


class Counted(dict[str, str]):
    """A dictionary that adds to a list what it is asked."""

    def __init__(self, content: dict[str, str], asked: list[object]) -> None:
        super().__init__(content)
        self.asked = asked

    def __contains__(self, key: object) -> bool:
        self.asked.append(key)
        return super().__contains__(key)


def test_files_that_each_rank_names_otherwise_are_not_looked_for_at_every_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """4096 workers that name 64 files each would take a thousand million looks."""
    told = [change(m, software="x" + CONFIGURATION + f"a{i}=1 b=2") for i, m in enumerate(ranks())]
    own, asked = Manifest.configuration.fget, list[object]()
    assert own is not None
    monkeypatch.setattr(Manifest, "configuration", property(lambda manifest: Counted(own(manifest), asked)))
    assert check_pd_topology(ranks("d-0")[0], told).allowed
    assert len(asked) <= RANKS
    told[1] = change(told[1], software="x" + CONFIGURATION + "b=3")
    assert "disagree about configuration b: 2 and 3" in check_pd_topology(ranks("d-0")[0], told).reason


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many pairs of tensors were compared."""
    count, differences = [0], topology.pair_differences

    def counting(*pair: object) -> object:
        count[0] += 1
        return differences(*pair)  # type: ignore[arg-type]

    monkeypatch.setattr(topology, "pair_differences", counting)
    return count


def test_a_tensor_is_compared_with_a_few_of_the_forms_that_a_peer_claims(compared: list[int]) -> None:
    local = ranks("d-0")[:2]
    remote = [change(m, tensors=tuple(change(t, dtype=f"float{i}") for t in m.tensors)) for i, m in enumerate(ranks())]
    check = check_pd_topology(local[0], remote)
    assert check.status is TopologyStatus.DENY and len(check.differences) == MAX_UNLIKE
    assert compared[0] <= MAX_UNLIKE * len(local[0].tensors)


@pytest.mark.parametrize("alike", [False, True])
def test_an_opaque_one_is_compared_with_its_own_part_where_the_peer_has_that(compared: list[int], alike: bool) -> None:
    local = opaque_worker("x", 4, 8, 7).manifest
    remote = [opaque_worker("x" if alike else f"y{rank}", 4, 8, rank).manifest for rank in range(8)]
    assert check_pd_topology(local, remote).allowed is alike
    assert compared[0] == len(local.tensors)

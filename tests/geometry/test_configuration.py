"""Configuration files of instances of several nodes."""

from __future__ import annotations

import msgspec

from tests.support.geometry.world import Model, Side, instance
from vllm_pd_connector.geometry.manifest import CONFIGURATION, Manifest
from vllm_pd_connector.geometry.topology import TopologyStatus, check_pd_topology
from vllm_pd_connector.geometry.validate import MAX_FILES

MODEL = Model(layers=2, heads=4)


def side(*said: str) -> list[Manifest]:
    """An instance of as many nodes, each of which tells this of the files that it reads."""
    workers = instance(MODEL, Side(tp=len(said)), "p-0")
    return [
        msgspec.structs.replace(worker.manifest, software=f"vllm 0.32{CONFIGURATION}{one}")
        for worker, one in zip(workers, said, strict=True)
    ]


def test_files_of_all_nodes_are_compared() -> None:
    """One that has none, or cannot read it, tells nothing."""
    assert check_pd_topology(side("config=0a"), side("config=0a", "")).allowed
    refused = check_pd_topology(side("config=0a"), side("", "config=0b"))
    assert refused.status is TopologyStatus.DENY and "config 0a here, config 0b there" in refused.reason


def test_nodes_with_other_files_are_no_instance() -> None:
    found = check_pd_topology(side("config=0a"), side("config=0a", "config=0b"))
    assert found.status is TopologyStatus.INVALID_REMOTE
    assert "workers disagree about configuration config: 0a and 0b" in found.reason


def test_a_peer_that_tells_of_thousands_of_files_is_refused() -> None:
    """Each would be compared with those of all other ranks, in the thread that moves everybody's caches."""
    told = " ".join(f"{number:x}=0a" for number in range(MAX_FILES + 1))
    found = check_pd_topology(side("config=0a"), side(told, told))
    assert found.status is TopologyStatus.INVALID_REMOTE
    assert f"{MAX_FILES + 1} files of the configuration" in found.reason and f"at most {MAX_FILES}" in found.reason

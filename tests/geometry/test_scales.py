"""Scales within pages that one side writes as any float32 and the other reads as powers of two."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.support.geometry.world import Model, Side, instance
from vllm_pd_connector.geometry.manifest import READS_POWERS, Manifest
from vllm_pd_connector.geometry.topology import check_pd_topology
from vllm_pd_connector.geometry.validate import validate

LATENT = Model(heads=0, key=8)


def side(engine: str, pcp: int = 1, *, powers: bool = False) -> list[Manifest]:
    found = []
    for worker in instance(LATENT, Side(pcp=pcp), engine):
        name = "fp8_ds_mla" + (READS_POWERS if powers else "")
        tensors = tuple(replace(tensor, dtype=name) for tensor in worker.manifest.tensors)
        found.append(replace(worker.manifest, tensors=tensors))
        validate(found[-1])
    return found


@pytest.mark.parametrize(
    ("prefill", "decode", "allowed"),
    [
        (side("p"), side("d", powers=True), True),
        (side("p", pcp=2), side("d"), True),
        (side("p", powers=True), side("d"), True),
        (side("p", powers=True), side("d", powers=True), True),
        (side("p", pcp=2), side("d", powers=True), False),
        (side("p", pcp=2, powers=True), side("d", powers=True), False),
    ],
    ids=["rounded", "any reader", "back", "alike", "not rounded", "not rounded, alike"],
)
def test_what_context_parallel_ranks_wrote_is_not_read_as_powers_of_two(
    prefill: list[Manifest], decode: list[Manifest], allowed: bool
) -> None:
    for local, remote in ((prefill, decode), (decode, prefill)):
        result = check_pd_topology(local, remote)
        assert result.allowed == allowed
        assert all(d.field.startswith("dtype of") for d in result.differences)
        assert allowed or "--prefill-context-parallel-size" in result.differences[0].advice

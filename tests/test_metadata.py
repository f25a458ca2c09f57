"""What the halves tell each other survives the way between their processes."""

from __future__ import annotations

import pickle
from dataclasses import fields

from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.metadata import BadParameters, HeldRequest, ReceiveRequest, StepMetadata


def test_a_step_s_metadata_arrives_with_all_its_fields() -> None:
    """It is pickled by a list of them."""
    tables = (BlockTable.of(0, (1, 2)),)
    receive = ReceiveRequest("d-1", BadParameters("for the test"), tables, 0, 20)
    sent = StepMetadata(3, True, True, "bell", [receive], ["d-2"], [HeldRequest("p-1", tables, 20)])
    told = {field.name: getattr(sent, field.name) for field in fields(sent)}
    assert all(told.values()), "a field that has its default could be lost unseen"
    came = pickle.loads(pickle.dumps(sent))
    assert {name: getattr(came, name) for name in told} == told

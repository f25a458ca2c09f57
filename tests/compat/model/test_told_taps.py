"""What an instance's `software` tells of taps for draft tokens, as a peer reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.geometry.world import Model, Side, instance
from vllm_pd_connector.compat.model import facts
from vllm_pd_connector.config import Config


@pytest.mark.parametrize("files", ["", "config=0a"])
@pytest.mark.parametrize("taps", [None, 0, 2])
def test_taps_for_drafts_are_told_beside_the_configuration(
    files: str, taps: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "configuration_of", lambda _: files)
    config: Any = SimpleNamespace(model_config=None)
    [worker] = instance(Model(layers=1), Side(), "p-0")
    manifest = msgspec.structs.replace(worker.manifest, software=facts.software(config, Config(), taps))
    assert manifest.draft_taps == taps
    assert manifest.configuration == ({"config": "0a"} if files else {})

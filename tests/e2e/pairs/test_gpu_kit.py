"""The acceptance kit's pair: as `make gpu` runs it on GPUs, over stand-ins and vLLM's CPU platform."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.gpu.kit import SECTIONS, run_section
from tests.support.gpu.stand_in import VARIABLE

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]


def test_the_kits_pair_runs_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")
    [section] = [one for one in SECTIONS if one.name == "pair"]
    outcome = run_section(replace(section, limit_s=600), tmp_path)
    assert outcome.passed, f"{outcome.findings.failures}\n{outcome.output}"
    decodes = {row["decode"] for row in outcome.findings.rows}
    assert decodes == {"reads", "is-written"} and all(row["bytes"] > 0 for row in outcome.findings.rows)

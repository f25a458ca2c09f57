"""A plain run's answers are kept on disk for what they were computed with, and for nothing else."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from examples.make_models import MODELS
from tests.support.servers import cluster

FAMILY = "gqa"


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], str]:
    """Under what the answers are kept, with weights and plugins of the test's own."""
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "pd_test_plugins").mkdir()
    (tmp_path / "pd_test_plugins" / "__init__.py").write_text("")
    monkeypatch.setattr(cluster, "make", lambda _: tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "pd_test_plugins", raising=False)
    nobody: Any = None
    return lambda: cluster.Baselines(nobody, tmp_path)._key(FAMILY, [(1, 2)])


def test_answers_are_others_where_the_model_needs_other_variables(
    key: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = key()
    monkeypatch.setitem(MODELS, FAMILY, replace(MODELS[FAMILY], environment={"PD_TEST_REFERENCE_ATTENTION": "1"}))
    assert key() != before


def test_answers_are_others_by_other_kernels(key: Callable[[], str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    before = key()
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert key() != before


def test_answers_are_others_when_a_plugin_has_changed(key: Callable[[], str], tmp_path: Path) -> None:
    before = key()
    (tmp_path / "pd_test_plugins" / "reference_attention.py").write_text("ROUNDED = True\n")
    assert key() != before

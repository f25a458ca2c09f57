"""Options of the whole suite; they stand here because pytest reads them before it looks into sub-directories."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("end-to-end")
    group.addoption("--kv-connector", default="PDConnector", help="connector of the pairs (default: this project's)")
    group.addoption("--row", default="", help="run only rows of the matrix whose name contains this text")
    group.addoption("--results", default=str(ROOT / "out" / "e2e-results.json"), help="file for the rows' results")

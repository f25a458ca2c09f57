"""Options of the whole suite; they stand here because pytest reads them before it looks into sub-directories.

Property tests have no deadline for an example: a busy machine decides nothing.
"""

from __future__ import annotations

import importlib.metadata
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support.distributions import use_checkout
from tests.support.gpu.stand_in import prepare

ROOT = Path(__file__).resolve().parent.parent

settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("suite")


def pytest_configure(config: pytest.Config) -> None:
    """A run that is to show another vLLM (`make test VLLM=…`) does not fall back to the installed one."""
    wanted = os.environ.get("PD_TEST_VLLM", "")
    if wanted and not (found := importlib.metadata.version("vllm")).startswith(f"{wanted}."):
        raise pytest.UsageError(f"PD_TEST_VLLM={wanted}, but the vllm in this environment is {found}")
    prepare()
    metadata = tempfile.TemporaryDirectory()
    config.add_cleanup(metadata.cleanup)
    use_checkout(Path(metadata.name))


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("transports")
    group.addoption("--transport", default="", help="run the conformance suite over this transport alone")
    group.addoption("--transport-options", default="{}", help="its transport_options, as JSON")
    group = parser.getgroup("end-to-end")
    group.addoption("--kv-connector", default="PDConnector", help="connector of the pairs (default: this project's)")
    group.addoption("--row", default="", help="run only rows of the matrix whose name contains this text")
    group.addoption("--results", default=str(ROOT / "out" / "e2e-results.json"), help="file for the rows' results")

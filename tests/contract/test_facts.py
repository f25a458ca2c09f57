"""What the package relies on in vLLM holds in the installed one, and a break of each kind is named."""

from __future__ import annotations

import importlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.contract.contract import ORDERS, broken, main

ROOT = Path(__file__).parents[2]
BASE = "distributed/kv_transfer/kv_connector/v1/base.py"


@pytest.fixture(scope="module")
def installed() -> Path:
    return Path(importlib.import_module("vllm").__file__).parent


@pytest.fixture(scope="module")
def copied(installed, tmp_path_factory) -> Path:
    """vLLM's sources, to be doctored."""
    package = tmp_path_factory.mktemp("sources") / "vllm"
    shutil.copytree(installed, package, ignore=shutil.ignore_patterns("*.so", "*.json", "*.pyc", "third_party"))
    return package


@pytest.fixture
def doctored(copied) -> Iterator[Callable[[str, str, str], Path]]:
    """Has `new` stand for `old` in one of vLLM's files until the test is over; returns the package."""
    kept: dict[Path, str] = {}

    def doctor(path: str, old: str, new: str) -> Path:
        text = kept.setdefault(copied / path, (copied / path).read_text())
        assert old in text
        (copied / path).write_text(text.replace(old, new))
        return copied

    yield doctor
    for path, text in kept.items():
        path.write_text(text)


def test_every_fact_holds_in_the_installed_vllm(installed):
    assert broken(installed) == []
    assert ORDERS


@pytest.mark.parametrize(
    ("path", "old", "new", "named"),
    [
        ("v1/core/block_pool.py", "def touch(", "def ref(", "BlockPool.touch: it is used, and it is not there"),
        ("v1/core/block_pool.py", "class BlockPool", "class Pool", "BlockPool: there is no such class"),
        ("v1/core/block_pool.py", "def touch(self, blocks", "def touch(self, them", "it takes (self, them"),
        ("v1/request.py", "class RequestStatus", "class Status", "vllm.v1.request.RequestStatus: compat imports it"),
        (BASE, "def on_new_request(", "def on_request(", "PDConnector.on_new_request: the base class has no such"),
        (BASE, "def get_loaded_kv_cache_group_ids(self, ", "def get_loaded_kv_cache_group_ids(self, step, ", "step"),
        ("v1/worker/kv_connector_model_runner_mixin.py", "wait_for_save()", "saved()", "does not call wait_for_save"),
        ("v1/core/sched/scheduler.py", "self.connector.on_new_request", "self.on_new", "does not call on_new_request"),
        ("model_executor/layers/attention/mla_attention.py", "@maybe_transfer_kv_layer\n", "", "is not decorated by"),
    ],
)
def test_a_break_is_named(doctored, path, old, new, named):
    found = broken(doctored(path, old, new))
    assert any(named in line for line in found), found


def test_the_report_of_a_directory_ends_with_its_result(installed, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["contract.py", str(installed)])
    assert main() == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("0 of ")


def test_the_command_runs_by_itself(installed):
    done = subprocess.run(
        [sys.executable, "-m", "tests.contract.contract", str(installed)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and done.stdout.splitlines()[-1].startswith("0 of "), done.stderr
    assert "$(RUN) -m tests.contract.contract $(WHEEL)" in (ROOT / "Makefile").read_text()

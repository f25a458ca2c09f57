"""The recall task scores on P/D what it scores on a plain instance, and a corrupted cache makes it fail."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.support.servers.pairs import ROOT, Pairs

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]


@pytest.mark.parametrize(
    "names",
    [
        ("pull", "pull-blocks"),
        ("push", "push-blocks"),
        ("mooncake-pull", "mooncake-pull-blocks"),
        ("mooncake-push", "mooncake-push-blocks"),
        ("corrupt",),
        ("states", "states-push"),
        ("states-corrupt",),
    ],
    ids=", ".join,
)
def test_recall_through_a_pair_is_that_of_a_plain_instance(pairs: Pairs, names: tuple[str, ...]) -> None:
    pairs.end()  # its own servers need the memory
    command = [sys.executable, str(ROOT / "benchmarks" / "accuracy" / "recall.py"), "--questions", "80", "--pairs"]
    done = subprocess.run([*command, *names], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr

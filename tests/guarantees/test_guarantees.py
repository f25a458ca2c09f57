"""Each guarantee's test fails when the guarantee's line is taken away (see `table`)."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from guarantees.table import GUARANTEES, Guarantee

TESTS = Path(__file__).resolve().parents[1]
PACKAGE = TESTS.parent / "vllm_pd_connector"
SECONDS = 45.0
"""For one test without its line; one that then waits for ever has noticed as well."""

NOTICED, ENDED = 100, -1
by_name = {"ids": lambda guarantee: guarantee.says}


def changed(guarantee: Guarantee) -> dict[str, object]:
    source = (PACKAGE / guarantee.file).read_text()
    return {
        "module": "vllm_pd_connector." + guarantee.file.removesuffix(".py").replace("/", "."),
        "source": source.replace(guarantee.code, guarantee.without),
        "test": str(TESTS / guarantee.test),
        "seconds": SECONDS,
    }


def unchanged(guarantee: Guarantee) -> dict[str, object]:
    return {**changed(guarantee), "source": (PACKAGE / guarantee.file).read_text()}


@pytest.fixture(scope="module")
def codes() -> dict[Guarantee, int]:
    """Exit codes of all tests without their lines."""
    # A test that fails in this harness whatever the package does would prove nothing, so each also runs unchanged.
    controls = list({guarantee.test: guarantee for guarantee in GUARANTEES}.values())
    done = subprocess.run(
        [sys.executable, str(TESTS / "guarantees" / "zygote.py")],
        input=json.dumps([*map(changed, GUARANTEES), *map(unchanged, controls)]),
        capture_output=True,
        text=True,
        cwd=TESTS.parent,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    wrong = {test.test: code for test, code in zip(controls, found[len(GUARANTEES) :], strict=True) if code}
    assert not wrong, f"these ended so although nothing was changed: {wrong}"
    return dict(zip(GUARANTEES, found, strict=False))


@pytest.mark.parametrize("guarantee", GUARANTEES, **by_name)
def test_the_line_stands_where_the_table_says(guarantee: Guarantee) -> None:
    assert (PACKAGE / guarantee.file).read_text().count(guarantee.code) == 1


@pytest.mark.guarantees
@pytest.mark.parametrize("guarantee", GUARANTEES, **by_name)
def test_a_guarantee_without_its_line_is_missed(guarantee: Guarantee, codes: dict[Guarantee, int]) -> None:
    code = codes[guarantee]
    assert code in (NOTICED, ENDED), f"{guarantee.test} ended with {code} without {guarantee.code!r}"

"""Each guarantee's test fails when the guarantee's line is taken away (see `table`)."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from tests.guarantees.guarantee import Guarantee
from tests.guarantees.table import GUARANTEES

ROOT = Path(__file__).resolve().parents[2]
TESTS, PACKAGE = ROOT / "tests", ROOT / "vllm_pd_connector"
SECONDS = 120.0
"""For one test without its line; one that then waits for ever has noticed as well. One with its line has longer."""

NOTICED, ENDED = 100, -1
by_name = {"ids": lambda guarantee: guarantee.says}


@cache
def holders() -> dict[str, list[tuple[Path, str]]]:
    """The package's top-level definitions by name: file and source of each."""
    found = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        text, begin = path.read_text(), 0
        lines = text.splitlines(keepends=True)
        for node in ast.parse(text).body:
            source, begin = "".join(lines[begin : node.end_lineno]), node.end_lineno
            match node:
                case ast.ClassDef(name=name) | ast.FunctionDef(name=name):
                    found[name].append((path, source))
                case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                    found[name].append((path, source))
    return found


@cache
def nodes_of_tests() -> dict[str, list[str]]:
    """The suite's tests by the name of their function: nodes as pytest takes them."""
    found = defaultdict(list)
    for path in sorted(TESTS.rglob("test_*.py")):
        for name in re.findall(r"^(?:async )?def (test_\w+)", path.read_text(), re.MULTILINE):
            found[name].append(f"{path}::{name}")
    return found


def place(guarantee: Guarantee) -> tuple[Path, str]:
    """The file that has the guarantee's code, and the definition around it."""
    around = holders().get(guarantee.holder, [])
    assert around, f"the package defines no {guarantee.holder}"
    places = [(path, source) for path, source in around for _ in range(source.count(guarantee.code))]
    assert len(places) == 1, f"{guarantee.code!r} stands {len(places)} times in {guarantee.holder}, not once"
    return places[0]


def node(guarantee: Guarantee) -> str:
    file, _, test = guarantee.test.rpartition("::")
    name, bracket, parameters = test.partition("[")
    nodes = [node for node in nodes_of_tests().get(name, []) if not file or f"/{file}.py::" in node]
    assert len(nodes) == 1, f"{name} is a test in {len(nodes)} files, not in one: {nodes}"
    return nodes[0] + bracket + parameters


def unchanged(guarantee: Guarantee) -> dict[str, object]:
    path, _ = place(guarantee)
    parts = path.relative_to(ROOT).with_suffix("").parts
    return {
        "module": ".".join(parts),
        "source": path.read_text(),
        "test": node(guarantee),
        "seconds": 5 * SECONDS,
    }


def changed(guarantee: Guarantee) -> dict[str, object]:
    path, around = place(guarantee)
    without = around.replace(guarantee.code, guarantee.without)
    return {
        **unchanged(guarantee),
        "source": path.read_text().replace(around, without),
        "seconds": SECONDS,
    }


@pytest.fixture(scope="module")
def codes(request: pytest.FixtureRequest) -> dict[Guarantee | str, int]:
    """Exit codes of the chosen guarantees' tests without their lines, and by name with them."""
    items = (item for item in request.session.items if isinstance(item, pytest.Function))
    chosen: list[Guarantee] = [item.callspec.params["guarantee"] for item in items if "codes" in item.fixturenames]
    # A test that fails in this harness whatever the package does would prove nothing, so each also runs unchanged.
    controls = list({guarantee.test: guarantee for guarantee in chosen}.values())
    done = subprocess.run(
        [sys.executable, str(TESTS / "guarantees" / "zygote.py")],
        input=json.dumps([*map(changed, chosen), *map(unchanged, controls)]),
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    keys = [*chosen, *(guarantee.test for guarantee in controls)]
    return dict(zip(keys, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("guarantee", GUARANTEES, **by_name)
def test_the_line_and_its_test_are_each_found_once(guarantee: Guarantee) -> None:
    assert place(guarantee)
    assert node(guarantee)


def test_a_test_is_run_alike_with_its_line_and_without() -> None:
    """One that is slow here would fail without the line because of that alone."""
    control, change = unchanged(GUARANTEES[0]), changed(GUARANTEES[0])
    assert {key for key in control if control[key] != change[key]} == {"source", "seconds"}


def test_no_change_fails_by_a_name_that_is_not_there(tmp_path: Path) -> None:
    """Its test would fail whatever the line does."""
    for number, guarantee in enumerate(GUARANTEES):
        (tmp_path / f"{number}.py").write_text(str(changed(guarantee)["source"]))
    ruff = (str(Path(sys.executable).with_name("ruff")), "check", "--isolated", "--select", "F821", "--output-format")
    done = subprocess.run((*ruff, "concise", str(tmp_path)), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.guarantees
@pytest.mark.parametrize("guarantee", GUARANTEES, **by_name)
def test_a_guarantee_without_its_line_is_missed(guarantee: Guarantee, codes: dict[Guarantee | str, int]) -> None:
    assert codes[guarantee.test] == 0, f"{guarantee.test} ended with {codes[guarantee.test]} though nothing was changed"
    code = codes[guarantee]
    assert code in (NOTICED, ENDED), f"{guarantee.test} ended with {code} without {guarantee.code!r}"

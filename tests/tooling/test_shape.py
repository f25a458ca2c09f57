"""The package's shape: small files, folders that one look takes in, imports in one direction, no circle.

An import counts wherever it stands, in a function or for types too.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "vllm_pd_connector"
NAME = PACKAGE.name

LINES, FILES = 400, 12

LEVELS: tuple[set[str], ...] = (
    {"errors", "bounded", "arguments", "content", "wake"},
    {"in_tree"},
    {"geometry", "instance_info"},
    {"protocol", "transport", "routing"},
    {"config"},
    {"sidechannel", "compat"},
    {"checks"},
    {"metadata", "plugin"},
    {"observability"},
    {"scheduler", "worker"},
    {"connector"},
    {"proxy", "integrations"},
    {"cli"},
)
"""The package's modules and folders. Each imports from levels above its own alone."""

NARROWER = {
    "geometry": {"errors", "bounded"},
    "protocol": {"errors", "bounded", "geometry"},
    "transport": {"errors", "geometry", "wake"},
    "routing": {"errors", "instance_info"},
    "proxy": {"errors", "bounded", "arguments", "instance_info", "routing"},
    "integrations": {"errors", "config", "instance_info", "routing", "connector"},
}
"""Parts that may know less than what lies above them."""

LIBRARIES = {"vllm", "torch", "triton", "nixl", "mooncake", "aiohttp", "ray"}
KNOW_A_LIBRARY = {
    "vllm_pd_connector/compat": {"vllm", "torch"},
    "vllm_pd_connector/connector.py": {"vllm", "torch"},
    "vllm_pd_connector/worker": {"torch"},
    "vllm_pd_connector/worker/staging/kernel.py": {"triton"},
    "vllm_pd_connector/transport/nixl": {"nixl"},
    "vllm_pd_connector/transport/mooncake": {"mooncake"},
    "vllm_pd_connector/proxy": {"aiohttp"},
    "vllm_pd_connector/integrations/ray.py": {"ray"},
}


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


@cache
def modules() -> dict[str, Path]:
    """Dotted names, that of a folder for its `__init__`."""
    names = {path: ".".join(path.relative_to(ROOT).with_suffix("").parts) for path in PACKAGE.rglob("*.py")}
    return {name.removesuffix(".__init__"): path for path, name in names.items()}


def imported(path: Path) -> Iterator[str]:
    """Dotted names of the modules that a file imports, the package's and others'."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), level=level, names=names):
                assert not level, f"{path}: a relative import"
                for alias in names:
                    full = f"{module}.{alias.name}"
                    yield full if full in modules() else module


def part(name: str) -> str:
    """The module or folder at the package's top that has it."""
    return name.split(".")[1] if "." in name else ""


def arrows() -> set[tuple[str, str]]:
    """From each module of the package to each that it imports."""
    return {(name, other) for name, path in modules().items() for other in imported(path) if other in modules()}


def test_no_file_is_longer_than_it_may_be() -> None:
    files = [*PACKAGE.rglob("*.py"), *(ROOT / "tests").rglob("*.py")]
    assert {named(path) for path in files if len(path.read_text().splitlines()) > LINES} == set()


def test_no_folder_has_more_files_than_one_look_takes_in() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    counts = {named(folder): sum(path.name != "__init__.py" for path in folder.glob("*.py")) for folder in folders}
    assert {folder: count for folder, count in counts.items() if count > FILES} == {}


def test_every_folder_says_what_goes_there() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [
        named(f) for f in sorted(folders) if not ast.get_docstring(ast.parse((f / "__init__.py").read_text()))
    ] == []


def test_no_import_goes_round_in_a_circle() -> None:
    graph: dict[str, set[str]] = {name: set() for name in modules()}
    for name, other in arrows():
        graph[name].add(other)
    TopologicalSorter(graph).prepare()  # raises CycleError, with the circle


def test_every_part_has_its_level() -> None:
    assert sorted(set().union(*LEVELS)) == sorted({part(name) for name in modules()} - {""})


def test_imports_go_one_way() -> None:
    above: dict[str, set[str]] = {}
    for number, level in enumerate(LEVELS):
        above |= {one: NARROWER.get(one, set().union(*LEVELS[:number])) | {one, ""} for one in level}
    wrong = {
        f"{name} imports {other}" for name, other in arrows() if name != NAME and part(other) not in above[part(name)]
    }
    assert wrong == set()


def test_only_the_command_line_imports_the_router() -> None:
    outside = {name for name, other in arrows() if part(other) == "proxy" and part(name) != "proxy"}
    assert outside == {f"{NAME}.cli.app"}
    at_once = ast.parse((PACKAGE / "cli" / "app.py").read_text()).body
    lines = [ast.unparse(node) for node in at_once if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [line for line in lines if "proxy" in line] == []


def test_nothing_imports_an_integration() -> None:
    assert {name for name, other in arrows() if part(other) == "integrations"} == set()


@pytest.mark.parametrize("library", sorted(LIBRARIES))
def test_a_library_is_known_in_its_folder_alone(library: str) -> None:
    users = [named(path) for path in modules().values() if library in {name.split(".")[0] for name in imported(path)}]
    homes = tuple(home for home, libraries in KNOW_A_LIBRARY.items() if library in libraries)
    assert [user for user in users if not user.startswith(homes)] == []

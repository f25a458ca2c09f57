"""What this package relies on in vLLM, checked against a wheel or a source tree without importing it.

    python -m tests.contract.contract WHEEL_OR_DIRECTORY        # `make contract WHEEL=…`

`docs/design/contract.md` says it in words; here each line of it is a fact that can be looked up in vLLM's sources:
a name that `compat` imports, a member of a class, of an enum, the parameters of a method that vLLM calls, the order in
which a function of vLLM calls others, or its decorators. Prints one line per fact that does not hold and exits with 1
if there is one.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tests.contract.describe_vllm import CLASSES, class_methods, imported_names, top_level
from tests.contract.relied_on import DECORATED, MEMBERS, ORDERS, TAKES, Members, Order, Takes

CONNECTOR = Path(__file__).parents[2] / "vllm_pd_connector" / "connector.py"

OWN = {"scheduler", "worker"}
"""Methods of PDConnector that are nobody's override."""

LATER = {"supports_sleep_mode", "unregister_kv_caches", "restore_kv_caches"}
"""Methods that vLLM calls from 0.33 on; where it does not, nothing is lost."""


Fact = TypeVar("Fact", Members, Order, Takes)


class Sources:
    """A vLLM package that is read, not imported."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.tree = cache(self._tree)
        self.release = release_of(package)

    def _tree(self, module: str) -> ast.Module | None:
        base = self.package.joinpath(*module.split(".")[1:])
        found = next((p for p in (base.with_suffix(".py"), base / "__init__.py") if p.is_file()), None)
        return ast.parse(found.read_text()) if found is not None else None

    def since(self, facts: tuple[Fact, ...]) -> list[Fact]:
        """Those that hold from this release on, or from one before."""
        return [fact for fact in facts if fact.since <= self.release]

    def find(self, path: str) -> ast.ClassDef | ast.FunctionDef | None:
        """The class or function `module:Name` or `module:Name.method`, also where the module only imports it."""
        module, _, qualified = path.partition(":")
        first, *rest = qualified.split(".")
        node = self._in_module(module, first)
        for name in rest:
            node = next((m for m in self._lineage(module, node) for m in m.body if _named(m, name)), None)
        return node

    def members(self, path: str) -> set[str]:
        """Names that a class or its bases in this tree define: in the body, or as `self.name` in a method."""
        node = self.find(path)
        found: set[str] = set()
        for owner in self._lineage(path.partition(":")[0], node):
            for item in ast.walk(owner):
                match item:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        found.add(name)
                    case ast.Name(id=name, ctx=ast.Store()):
                        found.add(name)
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        found.add(name)
        return found

    def _in_module(self, module: str, name: str) -> ast.ClassDef | ast.FunctionDef | None:
        tree = self.tree(module)
        if tree is None:
            return None
        for node in tree.body:
            if _named(node, name):
                return node
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("vllm"):
                for alias in node.names:
                    if (alias.asname or alias.name) == name:
                        return self._in_module(node.module, alias.name)
        return None

    def _lineage(self, module: str, node: object) -> Iterator[ast.ClassDef]:
        if not isinstance(node, ast.ClassDef):
            return
        yield node
        for base in node.bases:
            name = base.id if isinstance(base, ast.Name) else None
            if name is not None:
                yield from self._lineage(module, self._in_module(module, name))


def release_of(package: Path) -> tuple[int, int]:
    """The release of a vLLM package; of sources that do not say it, the newest that there may be."""
    told = package / "_version.py"
    found = re.search(r"version = '(\d+)\.(\d+)", told.read_text()) if told.is_file() else None
    return (int(found[1]), int(found[2])) if found is not None else (sys.maxsize, 0)


def _named(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name


def broken(package: Path) -> list[str]:
    """Every fact that does not hold in this vLLM package, one sentence each."""
    sources = Sources(package)
    return [
        *_names(sources),
        *_overrides(package),
        *_lacking_members(sources),
        *_orders(sources),
        *_decorators(sources),
        *_parameters(sources),
    ]


def _overrides(package: Path) -> Iterator[str]:
    """Methods of ours that do not take what vLLM passes, and abstract ones that we lack."""
    ours = class_methods(ast.parse(CONNECTOR.read_text()), "PDConnector")
    known: set[str] = set()
    for path, names in CLASSES.items():
        if not (package / path).is_file():
            yield f"{path}: there is no such file; {', '.join(names)} are in it"
            continue
        tree = ast.parse((package / path).read_text())
        for name in names:
            if not any(_named(node, name) for node in tree.body):
                yield f"{path}: it has no class {name}"
            elif name in ("KVConnectorBase_V1", "SupportsHMA"):
                theirs = class_methods(tree, name)
                known |= theirs.keys()
                yield from _differences(name, theirs, ours)
    for method in sorted(ours.keys() - known - OWN - LATER):
        yield f"PDConnector.{method}: the base class has no such method, so vLLM does not call it"


def _differences(base: str, theirs: dict[str, Any], ours: dict[str, Any]) -> Iterator[str]:
    for method, described in theirs.items():
        if method not in ours:
            if "abstractmethod" in described["decorators"]:
                yield f"{base}.{method}: it is abstract, and PDConnector has none"
            continue
        have = {parameter: default for parameter, _, default in ours[method]["parameters"]}
        wild = any(kind == "**" for _, kind, _ in ours[method]["parameters"])
        passed = [parameter for parameter, kind, _ in described["parameters"] if kind in ("positional", "keyword")]
        if missing := [parameter for parameter in passed if parameter not in have and not wild]:
            yield f"{base}.{method}: vLLM passes {', '.join(missing)}, which PDConnector does not take"
        if surplus := [p for p, kind, default in ours[method]["parameters"] if not default and p not in passed]:
            yield f"{base}.{method}: vLLM does not pass {', '.join(surplus)}, which PDConnector needs"


def news(package: Path, known: dict[str, Any]) -> list[str]:
    """Methods of the connector's base class that a recorded description does not have: no break, but worth a look."""
    path = next(iter(CLASSES))
    now = class_methods(ast.parse((package / path).read_text()), "KVConnectorBase_V1")
    return sorted(now.keys() - known["classes"]["KVConnectorBase_V1"].keys())


def _names(sources: Sources) -> Iterator[str]:
    for module, names in sorted(imported_names().items()):
        if sources.tree(module) is None:
            yield f"{module}: there is no such module; compat imports {', '.join(sorted(names))} from it"
            continue
        for name in sorted(names - top_level(sources.package, module)):
            yield f"{module}.{name}: compat imports it, and it is not there"


def _lacking_members(sources: Sources) -> Iterator[str]:
    for fact in sources.since(MEMBERS):
        if sources.find(fact.of) is None:
            yield f"{fact.of}: there is no such class; {', '.join(fact.names)} of it are used"
            continue
        for name in sorted(set(fact.names) - sources.members(fact.of)):
            yield f"{fact.of}.{name}: it is used, and it is not there"


def _orders(sources: Sources) -> Iterator[str]:
    for fact in sources.since(ORDERS):
        node = sources.find(fact.of)
        if node is None:
            yield f"{fact.of}: there is no such function; relied on: {fact.says}"
            continue
        calls = [_called(call) for call in sorted(_calls(node), key=lambda call: (call.lineno, call.col_offset))]
        if lacking := [name for name in fact.calls if name not in calls]:
            yield f"{fact.of}: it does not call {', '.join(lacking)}; relied on: {fact.says}"
        elif not _follow(calls, fact.calls):
            yield f"{fact.of}: it does not call {', then '.join(fact.calls)}; relied on: {fact.says}"


def _decorators(sources: Sources) -> Iterator[str]:
    for fact in DECORATED:
        node = sources.find(fact.of)
        have = [ast.unparse(decorator) for decorator in node.decorator_list] if node is not None else []
        if not _follow(have, fact.decorators):
            yield f"{fact.of}: it is not decorated by {', then '.join(fact.decorators)}; relied on: {fact.says}"


def _follow(names: list[str], wanted: tuple[str, ...]) -> bool:
    """Whether the wanted names stand in this order among all, whatever stands between them."""
    rest = iter(names)
    return all(name in rest for name in wanted)


def _calls(node: ast.AST) -> list[ast.Call]:
    return [item for item in ast.walk(node) if isinstance(item, ast.Call)]


def _called(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def _parameters(sources: Sources) -> Iterator[str]:
    for fact in sources.since(TAKES):
        node = sources.find(fact.of)
        if not isinstance(node, ast.FunctionDef):
            yield f"{fact.of}: there is no such function"
            continue
        have = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args)]
        if [name for name in have if name in fact.parameters] != list(fact.parameters):
            yield f"{fact.of}: it takes ({', '.join(have)}), expected ({', '.join(fact.parameters)})"


def main() -> int:
    if len(sys.argv) != 2:
        print(__doc__, file=sys.stderr)
        return 2
    given = Path(sys.argv[1])
    if given.is_dir():
        return report(given if (given / "__init__.py").is_file() else given / "vllm")
    with tempfile.TemporaryDirectory() as directory, zipfile.ZipFile(given) as wheel:
        wheel.extractall(directory, [n for n in wheel.namelist() if n.startswith("vllm/") and n.endswith(".py")])
        return report(Path(directory) / "vllm")


def report(package: Path) -> int:
    """Print what does not hold, then what is new; 1 if something does not hold."""
    found = broken(package)
    sources = Sources(package)
    facts = sum(map(len, imported_names().values())) + sum(len(fact.names) for fact in sources.since(MEMBERS))
    facts += len(sources.since(ORDERS)) + len(DECORATED) + len(sources.since(TAKES))
    for line in found:
        print(f"broken  {line}")
    newest = max(Path(__file__).parent.glob("vllm-*.json"))
    for name in news(package, json.loads(newest.read_text())):
        print(f"new     KVConnectorBase_V1.{name}: not in {newest.stem}; read what its default means for us")
    print(f"{len(found)} of {facts} facts do not hold")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())

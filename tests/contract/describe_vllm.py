"""Describe vLLM's connector interface from its sources, without importing them.

    python tests/contract/describe_vllm.py PATH_OF_THE_VLLM_PACKAGE VERSION > tests/contract/vllm-VERSION.json

The description has, per class, every method with its parameters (name, kind, whether it has a default), decorators
and whether it is abstract; and, per module, the names that `vllm_pd_connector.compat` imports from it and whether
they are there. A test compares our class with each recorded version, and the installed vLLM with its record.
"""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path
from typing import Any

CONNECTOR = "distributed/kv_transfer/kv_connector"
CLASSES = {
    f"{CONNECTOR}/v1/base.py": ("KVConnectorBase_V1", "SupportsHMA", "KVConnectorTransferResults"),
    f"{CONNECTOR}/v1/metrics.py": ("KVConnectorStats", "KVConnectorPromMetrics"),
}
COMPAT = Path(__file__).parents[2] / "vllm_pd_connector" / "compat"


def describe(package: Path) -> dict[str, Any]:
    """The description of one vLLM source tree."""
    return {
        "classes": {
            name: class_methods(_parse(package / path), name) for path, names in CLASSES.items() for name in names
        },
        "names": {
            module: {name: name in top_level(package, module) for name in sorted(names)}
            for module, names in sorted(imported_names().items())
            if _file(package, module) is not None
        },
    }


def imported_names() -> dict[str, set[str]]:
    """What `compat` imports from vLLM, by module."""
    found: dict[str, set[str]] = {}
    for path in COMPAT.rglob("*.py"):
        for node in ast.walk(_parse(path)):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "vllm":
                found.setdefault(node.module, set()).update(alias.name for alias in node.names)
    return found


def class_methods(tree: ast.Module, name: str) -> dict[str, Any]:
    """The public methods of a class and its constructor: parameters and decorators."""
    [node] = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name]
    return {
        item.name: {
            "parameters": _parameters(item.args),
            "decorators": sorted(ast.unparse(decorator) for decorator in item.decorator_list),
        }
        for item in node.body
        if isinstance(item, ast.FunctionDef) and (not item.name.startswith("_") or item.name == "__init__")
    }


def _parameters(args: ast.arguments) -> list[list[Any]]:
    positional = [*args.posonlyargs, *args.args]
    defaults = [False] * (len(positional) - len(args.defaults)) + [True] * len(args.defaults)
    found = [[arg.arg, "positional", default] for arg, default in zip(positional, defaults, strict=True)]
    if args.vararg:
        found.append([args.vararg.arg, "*", True])
    found += [
        [arg.arg, "keyword", default is not None]
        for arg, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)
    ]
    if args.kwarg:
        found.append([args.kwarg.arg, "**", True])
    return found


def _file(package: Path, module: str) -> Path | None:
    base = package.joinpath(*module.split(".")[1:])
    candidates = (base.with_suffix(".py"), base / "__init__.py")
    return next((path for path in candidates if path.exists()), None)


def top_level(package: Path, module: str) -> set[str]:
    """Names that a module defines or imports, and those that it tells type checkers of."""
    path = _file(package, module)
    assert path is not None
    names: set[str] = set()
    body = _parse(path).body
    for node in [*body, *(told for block in body if isinstance(block, ast.If) for told in block.body)]:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def _parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


if __name__ == "__main__":
    json.dump({"version": sys.argv[2], **describe(Path(sys.argv[1]))}, sys.stdout, indent=1)
    print()

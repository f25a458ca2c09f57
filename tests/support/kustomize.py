"""What `kubectl apply -k` sends, for the part of Kustomize that examples/kubernetes uses; whether Kubernetes takes it.

    python -m tests.support.kustomize DIRECTORY

renders every kustomization below a directory and validates each object against the schema of the API. Used by
`make lint`, which must not need kubectl; where that is installed, a test compares.

Resources (files and directories), replica counts, and strategic-merge patches, in which a list whose entries have names
is merged by name and any other is replaced. A kustomization that asks for more is refused.

Source: Kustomize's reference of `kustomization.yaml`.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

Object = dict[str, Any]
KNOWN = {"resources", "replicas", "patches"}
KUBERNETES = ("1.30", "1.37")
"""The oldest and the newest version for which the manifests are validated."""
CUSTOM = {"PodMonitor", "PrometheusRule"}
"""Kinds that others bring; the tool has no schema of theirs."""


def render(directory: Path) -> list[Object]:
    """The objects of a kustomization."""
    file = directory / "kustomization.yaml"
    kustomization = yaml.safe_load(file.read_text())
    if unknown := set(kustomization) - KNOWN:
        raise ValueError(f"{file}: {', '.join(sorted(unknown))} is not rendered here")
    objects: list[Object] = []
    for name in kustomization["resources"]:
        path = (directory / name).resolve()
        objects += render(path) if path.is_dir() else load(path)
    for patch in kustomization.get("patches", ()):
        for change in load(directory / patch["path"]):
            [target] = [one for one in objects if named(one) == named(change)]
            objects[objects.index(target)] = merged(target, change)
    for replicas in kustomization.get("replicas", ()):
        found = [one for one in objects if one["metadata"]["name"] == replicas["name"] and "replicas" in one["spec"]]
        if not found:
            raise ValueError(f"{file}: replicas: nothing is called {replicas['name']}")
        for target in found:
            objects[objects.index(target)] = merged(target, {"spec": {"replicas": replicas["count"]}})
    return objects


def load(path: Path) -> list[Object]:
    return [one for one in yaml.safe_load_all(path.read_text()) if one is not None]


def named(one: Object) -> tuple[str, str]:
    return one["kind"], one["metadata"]["name"]


def merged(old: Any, new: Any) -> Any:
    """A strategic merge, on a copy."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: merged(old.get(key), value) for key, value in new.items()}}
    if (
        isinstance(old, list)
        and isinstance(new, list)
        and all(isinstance(one, dict) and "name" in one for one in [*old, *new])
    ):
        changes = {one["name"]: one for one in new}
        kept = [merged(one, changes.pop(one["name"], {})) for one in old]
        return [*kept, *changes.values()]
    return new


def problems(one: Object) -> list[str]:
    """What Kubernetes would not take in an object; fields that it does not know are among it."""
    import kubernetes_validate

    if one["kind"] in CUSTOM:
        return []
    found = []
    for version in KUBERNETES:
        try:
            kubernetes_validate.validate(one, version, strict=True)
        except kubernetes_validate.ValidationError as error:
            found.append(f"{' '.join(named(one))}: Kubernetes {version}: {error.message}")
    return found


def main(directory: Path) -> int:
    found: list[str] = []
    directories = sorted(path.parent for path in directory.rglob("kustomization.yaml"))
    for one in directories:
        objects = render(one)
        found += [f"{one}: {problem}" for each in objects for problem in problems(each)]
        print(f"{one}: {len(objects)} objects")
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found or not directories else 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))

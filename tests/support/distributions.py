"""What an installed distribution says of itself, without installing one: its name and its entry points."""

from __future__ import annotations

import importlib.metadata
import os
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path

from vllm_pd_connector import __version__

ROOT = Path(__file__).resolve().parent.parent.parent
NAME = "vllm-pd-connector"


def write_distribution(
    directory: Path, name: str, entry_points: Mapping[str, Mapping[str, str]], version: str = "1.0"
) -> None:
    """Metadata that is found once `directory` is on `sys.path`. `entry_points`: by group and name."""
    info = directory / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    groups = (
        "\n".join([f"[{group}]", *(f"{key} = {value}" for key, value in entries.items())])
        for group, entries in entry_points.items()
    )
    (info / "entry_points.txt").write_text("\n\n".join(groups) + "\n")


def use_checkout(directory: Path) -> None:
    """Let this process and those that it starts find the entry points of the checkout's `pyproject.toml`, where what is
    installed has others: pytest takes the package from the checkout, whichever one was installed and when."""
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    installed = next(iter(importlib.metadata.distributions(name=NAME)), None)
    if installed and all(wanted[group] == _entries(installed, group) for group in wanted):
        return
    write_distribution(directory, NAME, wanted, __version__)
    sys.path.insert(0, str(directory))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(directory), os.environ.get("PYTHONPATH")]))


def _entries(distribution: importlib.metadata.Distribution, group: str) -> dict[str, str]:
    return {entry.name: entry.value for entry in distribution.entry_points.select(group=group)}

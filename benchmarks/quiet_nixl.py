"""A vLLM plugin for the benchmark alone: makes vLLM's own NixlConnector a fair rival on a CPU.

As shipped, each NIXL agent keeps a core busy (its progress thread never sleeps) and each worker pins itself to the
last core, so that on a small machine the instances of a pair starve each other. With this plugin the thread sleeps
up to a millisecond between polls and nothing is pinned; nothing else is changed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

PROGRESS_INTERVAL_US = 1000


def register() -> None:
    """Entry point of group `vllm.general_plugins`; see `environment`."""
    # vLLM sets this itself, but only before NIXL is imported for the first time, which is now.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    import nixl._api as api
    import nixl._bindings as bindings
    from vllm.platforms.cpu import CpuPlatform

    class SleepingConfig(bindings.nixlAgentConfig):  # type: ignore[misc]
        """NIXL's agent writes an interval of 0, which means a thread that never sleeps."""

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, max(int(value), PROGRESS_INTERVAL_US) if name == "pthrDelay" else value)

    sys.modules[api.nixl_agent.__module__].nixlBind.nixlAgentConfig = SleepingConfig
    CpuPlatform.discover_numa_topology = classmethod(lambda cls: [])


def environment(directory: Path) -> dict[str, str]:
    """Variables that make a vLLM process load this plugin; its entry point is written into `directory`."""
    info = directory / "quiet_nixl-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quiet-nixl\nVersion: 0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nquiet_nixl = quiet_nixl:register\n")
    paths = [str(directory), str(Path(__file__).resolve().parent), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}

"""Which vLLM a server runs: the installed one, or another release, as an overlay of its Python.

A test process runs on one release (`make test VLLM=…`), and a server that it starts on the same unless a row names
another: then the server's PYTHONPATH is the test's, with that release's overlay in place of any other.
"""

from __future__ import annotations

import functools
import os
from pathlib import Path

from tools.setup_env import VLLM_VERSION
from tools.vllm_overlay import CACHE, overlay

INSTALLED = VLLM_VERSION.rpartition(".")[0]
"""The release in `.venv`, as rows name it ("0.32")."""


@functools.cache
def python_path(release: str) -> str:
    """PYTHONPATH of a server that is to run this release; the first call may download it.

    Raises:
        OverlayError: a release that is neither installed nor known, or that cannot be had.
    """
    inherited = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
    kept = [entry for entry in inherited if CACHE not in Path(entry).parents]
    return os.pathsep.join(kept if release == INSTALLED else [str(overlay(release)), *kept])

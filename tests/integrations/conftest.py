"""Ray is imported by nobody but who asks for its tests: it changes the logging and the limits of its process."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return True if collection_path.name == "test_ray.py" and config.option.markexpr != "ray" else None

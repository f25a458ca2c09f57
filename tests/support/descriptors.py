"""Processes that have no file descriptor left."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


@contextlib.contextmanager
def no_descriptor_left() -> Iterator[None]:
    """In this process; sockets that are there already can be used."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    filled: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 512), hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                filled.append(os.dup(0))
        yield
    finally:
        for descriptor in filled:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

"""Open files of this process, which sockets are: how many it may have, and a word before there are none left.

`vllm serve` allows itself and those it starts 65,535 where the hard limit does. `vllm serve --headless`, Ray and who
uses vLLM as a library do not, and have what shells allow: 1024, which some dozens of instances use up.
"""

from __future__ import annotations

import logging
import os
import resource
import time

logger = logging.getLogger(__name__)

FILES = 65_535
NEAR = 0.8
LOOK_S = 60.0


def allow_files() -> None:
    """As many files as `vllm serve` allows itself, if the hard limit does; never fewer than there were."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
        except (OSError, ValueError) as error:  # a sandbox allows no change
            logger.warning("the limit of %d open files cannot be raised to %d: %s", soft, wanted, error)
            return
        logger.info("this process may have %d open files (it was %d)", wanted, soft)


class FilesLeft:
    """Says so when this process has nearly as many files open as it may, each minute at most."""

    def __init__(self) -> None:
        self._look_at = 0.0

    def look(self) -> None:
        """To be called when more are about to be opened."""
        if (now := time.monotonic()) < self._look_at:
            return
        self._look_at = now + LOOK_S
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            count = len(os.listdir("/proc/self/fd")) - 1  # but for the one that lists them
        except OSError:  # there is none left even for that
            count = limit
        if limit != resource.RLIM_INFINITY and count >= NEAR * limit:
            logger.warning(
                "this process has %d files open and may have %d; with none left it can dial nobody: raise the hard "
                "limit (ulimit -Hn), or have fewer instances meet",
                count,
                limit,
            )

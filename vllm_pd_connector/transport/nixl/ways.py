"""Which transports and devices UCX chose for a peer. It has no call that says so; its log does, when it connects.

Source: UCX 1.23, `ucp_worker_print_used_tls`: "intra-node cfg#1 rma(tcp/lo) am(tcp/lo cma/memory) ka(tcp/lo)". `rma`
moves what NIXL reads and writes, `rma_am` the same in messages, whose large ones may go another way that `am` names.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

logger = logging.getLogger(__name__)

_CHOSEN = re.compile(r" UCX +INFO .*\b(intra-node|inter-node) cfg#\d+ +(.*)")
_PLACES = {"intra-node": "on this host", "inter-node": "on another host"}
_MOVES = re.compile(r"\b(?:rma|rma_am|am|rkey_ptr|rndv)\([^)]*\)")


@contextlib.contextmanager
def ways() -> Iterator[Callable[[], tuple[str, ...]]]:
    """What UCX says, once per kind of connection, of those that are made meanwhile. To be entered before the library is
    loaded, which reads the environment then; where that tells UCX what to log, it is left alone and nothing is known.
    What UCX warns of is logged at the end."""
    if os.environ.keys() & {"UCX_LOG_LEVEL", "UCX_LOG_FILE"}:
        yield lambda: ()
        return
    with tempfile.TemporaryDirectory() as directory:
        log = Path(directory, "ucx.log")
        os.environ.update(UCX_LOG_LEVEL="info", UCX_LOG_FILE=str(log))
        try:
            yield lambda: chosen(_text(log))
        finally:
            del os.environ["UCX_LOG_LEVEL"], os.environ["UCX_LOG_FILE"]
            for line in _text(log).splitlines():
                if re.search(r" UCX +(WARN|ERROR|FATAL) ", line):
                    logger.warning("%s", line)


def chosen(log: str) -> tuple[str, ...]:
    """The choices in a log, for people, each once."""
    found = dict.fromkeys(match.groups() for match in _CHOSEN.finditer(log))
    return tuple(
        f"UCX took {' '.join(_MOVES.findall(lanes)) or lanes.strip()} for a peer {_PLACES[where]}"
        for where, lanes in found
    )


def _text(log: Path) -> str:
    ctypes.CDLL(None).fflush(None)  # UCX writes to a stream of the C library
    return log.read_text(errors="replace") if log.exists() else ""

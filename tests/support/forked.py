"""Processes of tests, forked from a server that has imported what is slow to import.

The server has neither a thread of Python's nor an agent of a transport, so a child begins as a fresh process would.
Mooncake is not among the imports: it chooses its version of IP when it is imported.
"""

from __future__ import annotations

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
# The server is one for the whole test process. pytest is what a child imports because its parent's main module did.
PROCESSES.set_forkserver_preload(["msgspec", "nixl", "numpy", "pytest", "zmq.auth.thread"])

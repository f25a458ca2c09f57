"""Servers can be started beside the collector of spans: gRPC's threads do not come along into their processes."""

from __future__ import annotations

import subprocess
import sys

STARTS = """
import subprocess
from tests.support.otlp import Collector

with Collector():
    for _ in range(60):
        subprocess.run(["true"], preexec_fn=int, check=True)
"""


def test_a_process_is_started_beside_the_collector_as_anywhere() -> None:
    ended = subprocess.run([sys.executable, "-c", STARTS], capture_output=True, text=True, timeout=120)
    assert (ended.returncode, ended.stderr) == (0, ""), "with its handlers of forks gRPC says when it left one out"

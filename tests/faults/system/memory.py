"""Whether the memory of processes grows with the requests that they served.

Counted is what a process has of its own, its caches included and mapped files not: RssAnon and RssShmem of
/proc/PID/status. Caches are touched and allocators warm up in the first half of a run, so the second half decides: a
line through its samples must rise by less than GROWTH_BYTES from its beginning to its end.
"""

from __future__ import annotations

import contextlib
import re
import statistics
from dataclasses import dataclass, field

from tests.faults.system.processes import PROC, tree

GROWTH_BYTES = 16 << 20
LEAST_SAMPLES = 6
_OWN = re.compile(r"^Rss(?:Anon|Shmem):\s*(\d+) kB$", re.MULTILINE)


def resident(pid: int) -> int:
    """Bytes of memory of its own that a process has in RAM.

    Raises:
        OSError: it has ended.
    """
    found = _OWN.findall((PROC / str(pid) / "status").read_text())
    return 1024 * sum(map(int, found))


@dataclass(slots=True)
class Trend:
    """Samples of one process: requests served so far, and bytes."""

    requests: list[int] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    def add(self, requests: int, size: int) -> None:
        self.requests.append(requests)
        self.bytes.append(size)

    def growth(self) -> float:
        """Bytes by which a line through the second half of the samples rises."""
        half = len(self.bytes) // 2
        requests, sizes = self.requests[half:], self.bytes[half:]
        slope, _ = statistics.linear_regression(requests, sizes)
        return slope * (requests[-1] - requests[0])


@dataclass(slots=True)
class Memory:
    """All processes of some servers."""

    trends: dict[str, Trend] = field(default_factory=dict)

    def add(self, name: str, requests: int, size: int) -> None:
        """One more sample of this name."""
        self.trends.setdefault(name, Trend()).add(requests, size)

    def sample(self, roots: dict[str, int], requests: int) -> None:
        """`roots` are the servers' own processes by name; those that they started come with them."""
        for name, pid in roots.items():
            for process in tree(pid):
                with contextlib.suppress(OSError):
                    size = resident(process.pid)
                    kind = "engine" if "EngineCore" in process.name else "server" if process.pid == pid else "helper"
                    self.add(f"{name} {kind} {process.pid}", requests, size)

    def problems(self) -> list[str]:
        """Processes that grow, and those of which too little was seen."""
        return [text for name, trend in self.trends.items() if (text := judge(name, trend))]

    def samples(self) -> dict[str, list[list[int]]]:
        """Requests and bytes of every process."""
        return {name: [trend.requests, trend.bytes] for name, trend in self.trends.items()}

    def table(self) -> str:
        lines = ["| process | MiB at first | MiB in the middle | MiB at the end | growth in the second half, MiB |",
                 "|---|---|---|---|---|"]  # fmt: skip
        for name, trend in self.trends.items():
            sizes = [trend.bytes[0], trend.bytes[len(trend.bytes) // 2], trend.bytes[-1]]
            cells = [f"{size / 2**20:.1f}" for size in sizes]
            grown = f"{trend.growth() / 2**20:+.2f}" if len(trend.bytes) >= LEAST_SAMPLES else "?"
            lines.append(f"| {name} | " + " | ".join([*cells, grown]) + " |")
        return "\n".join(lines)


def judge(name: str, trend: Trend) -> str:
    if len(trend.bytes) < LEAST_SAMPLES:
        return f"{name}: {len(trend.bytes)} samples, not {LEAST_SAMPLES}"
    if (grown := trend.growth()) >= GROWTH_BYTES:
        return f"{name} grew by {grown / 2**20:.1f} MiB, not less than {GROWTH_BYTES / 2**20:.0f}"
    return ""

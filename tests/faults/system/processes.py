"""The processes of a `vllm serve` and the TCP ports that they listen on, from /proc."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import signal
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
LISTEN = "0A"


@dataclass(frozen=True, slots=True)
class Process:
    pid: int
    name: str

    def send(self, number: signal.Signals) -> bool:
        """Send a signal; whether there was a process to take it."""
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:
            return False
        return True


def tree(pid: int) -> list[Process]:
    """A process and everything that it started, itself first."""
    parents: dict[int, list[int]] = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                parents.setdefault(_parent(entry), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        current = todo.pop(0)
        todo += parents.get(current, [])
        with contextlib.suppress(OSError):
            words = (PROC / str(current) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            found.append(Process(current, words.strip()))
    return found


def _parent(entry: Path) -> int:
    # The name in parentheses may contain anything; the state and the parent follow the last one.
    return int((entry / "stat").read_text().rpartition(")")[2].split()[1])


def engines(pid: int) -> list[Process]:
    """The engine core of a server, which moves the caches itself, or has workers that do."""
    return [process for process in tree(pid) if "EngineCore" in process.name]


def workers(pid: int) -> list[Process]:
    """The workers of a server; the engine core where it has none."""
    return [process for process in tree(pid) if "Worker" in process.name] or engines(pid)


def listening(pid: int) -> set[tuple[str, int]]:
    """Where the TCP sockets on which a process listens can be reached from this host: (address, port)."""
    inodes = set()
    for entry in (PROC / str(pid) / "fd").iterdir():
        with contextlib.suppress(OSError):
            target = os.readlink(entry)
            if target.startswith("socket:["):
                inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in (PROC / str(pid) / "net" / table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTEN and fields[9] in inodes:
                address, _, port = fields[1].partition(":")
                found.add((reached(address), int(port, 16)))
    return found


def reached(address: str) -> str:
    """An address of /proc/net/tcp or tcp6 (words of 4 bytes in the host's order, hexadecimal), loopback for any."""
    words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
    found = ipaddress.ip_address(b"".join(words))
    return "127.0.0.1" if found.is_unspecified else str(found)


def alive(pids: list[int]) -> list[int]:
    """Those that run; a process that has ended and was not waited for does not."""
    found = []
    for pid in pids:
        with contextlib.suppress(OSError):
            if (PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X"):
                found.append(pid)
    return found

"""Ports: free ones, as what is started takes them (`examples.ports`), and what the kernel does at them."""

from __future__ import annotations

from pathlib import Path

from examples.ports import free_port as free_port
from examples.ports import free_ports as free_ports


def probes_due(port: int) -> list[int]:
    """When the kernel probes this host's connections to a port, in ticks: none while what was sent is not acknowledged
    (proc(5): timer 02 is keep-alive)."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    timers = [row[5].split(":") for row in rows if row[2].endswith(f":{port:04X}")]
    return [int(due, 16) for kind, due in timers if kind == "02"]

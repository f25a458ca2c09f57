"""The picture that `transports.py` draws of its points."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

KIB, MIB = 1 << 10, 1 << 20


class Point(Protocol):
    """What is drawn of one point: GB/s of one message, with the sizes in bytes."""

    @property
    def transport(self) -> str: ...

    @property
    def operation(self) -> str: ...

    @property
    def message_bytes(self) -> int: ...

    @property
    def run_bytes(self) -> int: ...

    @property
    def connector(self) -> float: ...

    @property
    def bare(self) -> float: ...

    @property
    def copy(self) -> float: ...


def size(count: int) -> str:
    """A number of bytes for people."""
    return f"{count // MIB} MiB" if count >= MIB else f"{count // KIB} KiB"


def plot(points: Sequence[Point], path: Path) -> None:
    """Throughput against run length, one panel per message size and operation."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    messages = sorted({p.message_bytes for p in points})
    figure, panels = pyplot.subplots(
        len(messages), 2, figsize=(11, 3.4 * len(messages)), sharex=True, sharey="row", squeeze=False
    )
    for row, message in zip(panels, messages, strict=True):
        for panel, operation in zip(row, ("read", "write"), strict=True):
            some = [p for p in points if (p.message_bytes, p.operation) == (message, operation)]
            for i, name in enumerate(dict.fromkeys(p.transport for p in some)):
                line = [p for p in some if p.transport == name]
                lengths = [p.run_bytes for p in line]
                panel.plot(lengths, [p.connector for p in line], "o-", color=f"C{i}", label=name)
                if name != "loopback":
                    panel.plot(lengths, [p.bare for p in line], "x:", color=f"C{i}", label=f"{name}, bare")
            lengths = sorted({p.run_bytes for p in some})
            copies = [max(p.copy for p in some if p.run_bytes == length) for length in lengths]
            panel.plot(lengths, copies, "--", color="black", label="plain copy")
            panel.set(xscale="log", yscale="log", title=f"{operation}, {size(message)}", ylabel="GB/s")
            panel.set_xticks(lengths, [size(length) for length in lengths])
            panel.grid(True, which="both", alpha=0.3)
    for panel in panels[-1]:
        panel.set_xlabel("length of a run")
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path)

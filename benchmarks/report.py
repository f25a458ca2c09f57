"""What a benchmark leaves behind: a JSON document with what it ran on, and rows of figures.

Documents differ in what they hold besides; wherever one has a list of records, that is a table here. A record's words
and truths, and the settings in `KEYS`, say what was measured; its other numbers are figures. A figure that was not had
is null.
"""

from __future__ import annotations

import json
import math
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SIZES = frozenset({"tp", "message", "message_bytes", "run", "run_bytes", "layers", "tokens"})
KEYS = SIZES | {"routers", "rate", "requests", "in_flight", "peers", "decoders", "ranks", "simulated_s"}
"""Numbers by which a record is known."""
LOOPS, LOOP_TURNS = 21, 500_000

Row = Mapping[str, Any]


def machine() -> dict[str, Any]:
    """What a figure depends on besides the code."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    return {
        "cores": os.cpu_count(),
        "processor": model.partition(": ")[2],
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 1),
        "loop_ns": loop_ns(),
    }


def loop_ns() -> float:
    """Nanoseconds of one turn of an empty loop, the median of LOOPS: how fast a core of this machine is now, which on
    shared machines is not the same from day to day. Times of one document are held against those of another by it."""
    took = []
    for _ in range(LOOPS):
        began = time.perf_counter()
        for _ in range(LOOP_TURNS):
            pass
        took.append(time.perf_counter() - began)
    return round(1e9 * statistics.median(took) / LOOP_TURNS, 1)


def commit() -> str:
    """Of the checkout, with a plus if it was changed since; empty outside one."""
    asked = ["git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty=+", "--exclude=*"]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def write(path: Path, content: Mapping[str, Any]) -> None:
    """Write a document, with the machine and the commit."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(as_json({"machine": machine(), "commit": commit(), **content}))
    print(f"wrote {path}")


def as_json(content: Any) -> str:
    """A document as JSON, which has no NaN and no infinity: they are null there."""
    return json.dumps(_finite(content), indent=1, allow_nan=False) + "\n"


def _finite(content: Any) -> Any:
    if isinstance(content, Mapping):
        return {key: _finite(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def tables(document: Any, name: str = "") -> Iterator[tuple[str, list[Row]]]:
    """Every list of records, with the path of keys to it. Of a record only what is one word or number counts."""
    if isinstance(document, Mapping):
        for key, value in document.items():
            yield from tables(value, f"{name}.{key}" if name else str(key))
    elif isinstance(document, list) and document and all(isinstance(row, Mapping) for row in document):
        yield name or "rows", [{k: v for k, v in row.items() if not isinstance(v, list | Mapping)} for row in document]


def case(row: Row) -> tuple[tuple[str, Any], ...]:
    """What a record is about."""
    return tuple((k, v) for k, v in row.items() if isinstance(v, str | bool) or k in KEYS)


def figures(row: Row) -> dict[str, float]:
    """What was measured."""
    about = {k for k, _ in case(row)}
    return {k: float(v) for k, v in row.items() if k not in about and v is not None}


def markdown(rows: list[Row]) -> str:
    """A table of all that the records hold."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(key)) for key in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e6 else f"{value:.0f}"
    return str(value).replace("|", "\\|")

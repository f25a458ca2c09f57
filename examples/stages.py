"""How far a starting instance has got, and how long it still takes.

vLLM answers nobody until it serves, but logs what it does: each stage begins with a line that vLLM writes, and a stage
whose line a release words otherwise is passed over. How long the rest takes is what it took the last time that the same
was started with logs in the same directory, which keeps the record; a first start has no estimate.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

STAGES = (
    ("imports its modules", ""),
    ("starts its engine", "Initializing a V1 LLM engine"),
    ("loads weights", "Starting to load model"),
    ("makes its cache", "Loading weights took"),
    ("warms up", "KV cache size: "),
    ("opens its port", "init engine (profile, create kv cache, warmup model) took"),
)
"""What an instance does, and the line of its log with which that begins. Source: vLLM 0.32, `v1/engine/core.py`,
`v1/worker/gpu_model_runner.py`, `model_loader/default_loader.py`, `v1/core/kv_cache_utils.py`."""
SERVES = "serves"
QUIET_S = 10.0
"""Seconds after which a stage that goes on is told again."""
RECORD = "last-start.json"


def stage_of(log: str) -> int:
    """The last stage that has begun, as an index of `STAGES`."""
    return max(index for index, (_, line) in enumerate(STAGES) if line in log)


def seconds_left(last: Mapping[str, float], stage: str, for_s: float) -> float | None:
    """Seconds until an instance serves that has been in `stage` for `for_s`; None if the last start does not tell.

    `last` has the second of the last start in which each stage began, and in which it served.
    """
    if SERVES not in last or stage not in last:
        return None
    return max(0.0, last[SERVES] - last[stage] - for_s)


@dataclass(slots=True)
class _Start:
    began: dict[str, float] = field(default_factory=dict)
    told: float = -QUIET_S


class Progress:
    """Tells through `say` how instances get on, and keeps how long they took in `directory`."""

    def __init__(self, say: Callable[[str], None], directory: Path):
        self._say = say
        self._file = directory / RECORD
        self._last = _read(self._file)
        self._starts: dict[str, _Start] = {}

    def starting(self, name: str, what: str, now: float, log: str) -> None:
        """`name` does not serve yet, `now` seconds after it was started; `what` tells it from other starts."""
        start = self._starts.setdefault(what, _Start())
        index = stage_of(log)
        stage = STAGES[index][0]
        new = stage not in start.began
        start.began.setdefault(stage, now)
        if not new and now < start.told + QUIET_S:
            return
        start.told = now
        left = seconds_left(self._last.get(what, {}), stage, now - start.began[stage])
        if left is None:
            estimate = "no estimate before its first start"
        else:
            estimate = f"about {left:.0f} s to go, as last time" if left >= 1 else "longer than last time"
        line = "" if new or not log.strip() else f": {log.strip().splitlines()[-1][:100]}"
        self._say(f"{now:.0f} s, {name} {stage} ({index + 1} of {len(STAGES)}; {estimate}){line}")

    def serves(self, name: str, what: str, now: float, url: str) -> None:
        """`name` answers."""
        self._say(f"{name} serves at {url} after {now:.0f} s")
        # Who has no stages started before anybody looked: a router.
        if start := self._starts.get(what):
            self._last[what] = start.began | {SERVES: now}
            self._file.write_text(json.dumps(self._last, indent=1) + "\n")


def _read(file: Path) -> dict[str, dict[str, float]]:
    """The record, or none: it is an estimate's, so one that is not there or not whole is begun anew."""
    try:
        record = json.loads(file.read_text())
        return {str(what): {str(k): float(v) for k, v in began.items()} for what, began in record.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}

"""The bytes on the decode side equal those on the prefill side, whatever the layouts.

With `digest_dir` set, each worker writes one file per request: a digest per token position for every (layer, role,
head) that it holds, computed from logical elements. Two workers with other strides, other block sizes or other shards
give the same digest for the same logical element, so a transfer is right if and only if the two sides' digests agree
on the range that was transferred.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

FILE_NAME = re.compile(r"(?P<side>[^-]+)-(?P<request>.+)-tp(?P<tp>\d+)-pp(?P<pp>\d+)\.npz")


@dataclass(frozen=True, slots=True)
class Record:
    """One worker's digests of one request; each array is indexed by absolute token position. `share` is which tokens
    the worker has: its rank among those that take turns, how many these are, and by how many tokens."""

    path: Path
    request: str
    remote_request: str | None
    start: int
    stop: int
    tensors: Mapping[str, npt.NDArray[np.uint64]]
    share: tuple[int, int, int] = (0, 1, 1)


def load(directory: Path) -> list[Record]:
    """Every record in a directory; files of another name are an error."""
    records = []
    for path in sorted(directory.glob("*.npz")):
        match = FILE_NAME.fullmatch(path.name)
        assert match, f"{path.name} is not named <side>-<request>-tp<r>-pp<r>.npz"
        with np.load(path) as file:
            tensors = {key: file[key] for key in file.files if "|" in key}
            remote = str(file["remote_request_id"]) if "remote_request_id" in file.files else None
            share = tuple(file["share"].tolist()) if "share" in file.files else (0, 1, 1)
            start, stop = int(file["start"]), int(file["stop"])
            records.append(Record(path, match["request"], remote, start, stop, tensors, share))
    return records


def received(records: list[Record]) -> list[Record]:
    return [record for record in records if record.remote_request is not None]


def differences(records: list[Record], window_of: Callable[[str], int | None] = lambda layer: None) -> list[str]:
    """What is wrong between the two sides, one line per tensor; empty if all that is needed is there and equal.

    `window_of` tells how many tokens a layer looks back at. What lies before the window is needed by nobody: there,
    and only there, a decode worker may hold nothing.
    """
    problems = []
    for got in received(records):
        sources = [
            record for record in records if record.remote_request is None and record.request == got.remote_request
        ]
        if not got.tensors:
            problems.append(f"{got.path.name}: holds no tensor")
        for key, here in got.tensors.items():
            state = key.endswith("|state")
            held = np.flatnonzero(here) if state else np.flatnonzero(here[got.start : got.stop]) + got.start
            if not state and (lacking := _lacking(here, got, window_of(key.split("|")[0]))).size:
                problems.append(f"{got.path.name}: {key} lacks {lacking.size} needed tokens, first {lacking[0]}")
            wrong = held[~_vouched(here, held, [source.tensors[key] for source in sources if key in source.tensors])]
            if wrong.size:
                problems.append(
                    f"{got.path.name}: {key} differs from prefill request {got.remote_request} "
                    f"({len(sources)} workers) at {wrong.size} of {held.size} positions, first at {wrong[0]}"
                )
    return problems


def _lacking(here: npt.NDArray[np.uint64], got: Record, window: int | None) -> npt.NDArray[np.intp]:
    """Positions that the next forward looks at, and that the worker should hold and does not."""
    start = got.start if window is None else max(got.start, got.stop + 1 - window)
    lacking = np.flatnonzero(here[start : got.stop] == 0) + start
    rank, size, interleave = got.share
    missed: npt.NDArray[np.intp] = lacking[lacking // interleave % size == rank]
    return missed


def _vouched(
    here: npt.NDArray[np.uint64], held: npt.NDArray[np.intp], sources: list[npt.NDArray[np.uint64]]
) -> npt.NDArray[np.bool_]:
    """Which of the held positions some source has, and every source that has it with the same digest."""
    seen, equal = np.zeros(held.size, dtype=bool), np.ones(held.size, dtype=bool)
    for there in sources:
        inside = held < len(there)
        theirs = np.zeros(held.size, dtype=np.uint64)
        theirs[inside] = there[held[inside]]
        has = theirs != 0
        seen |= has
        equal &= ~has | (theirs == here[held])
    both: npt.NDArray[np.bool_] = seen & equal
    return both

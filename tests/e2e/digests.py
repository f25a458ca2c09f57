"""The bytes on the decode side equal those on the prefill side, whatever the layouts.

With `digest_dir` set, each worker writes one file per request: a digest per token position for every (layer, role,
head) that it holds, computed from logical elements. Two workers with other strides, other block sizes or other shards
give the same digest for the same logical element, so a transfer is right if and only if the two sides' digests agree
on the range that was transferred.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

FILE_NAME = re.compile(r"(?P<side>[^-]+)-(?P<request>.+)-tp(?P<tp>\d+)-pp(?P<pp>\d+)\.npz")


@dataclass(frozen=True, slots=True)
class Record:
    """One worker's digests of one request; each array is indexed by absolute token position."""

    path: Path
    request: str
    remote_request: str | None
    start: int
    stop: int
    tensors: Mapping[str, npt.NDArray[np.uint64]]


def load(directory: Path) -> list[Record]:
    """Every record in a directory; files of another name are an error."""
    records = []
    for path in sorted(directory.glob("*.npz")):
        match = FILE_NAME.fullmatch(path.name)
        assert match, f"{path.name} is not named <side>-<request>-tp<r>-pp<r>.npz"
        with np.load(path) as file:
            tensors = {key: file[key] for key in file.files if "|" in key}
            remote = str(file["remote_request_id"]) if "remote_request_id" in file.files else None
            records.append(Record(path, match["request"], remote, int(file["start"]), int(file["stop"]), tensors))
    return records


def received(records: list[Record]) -> list[Record]:
    return [record for record in records if record.remote_request is not None]


def differences(records: list[Record]) -> list[str]:
    """What is wrong between the two sides, one line per tensor; empty if all received elements equal those sent."""
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
            if not state and (not held.size or held[-1] != got.stop - 1):
                problems.append(f"{got.path.name}: {key} lacks the last token {got.stop - 1}")
            wrong = held[~_vouched(here, held, [source.tensors[key] for source in sources if key in source.tensors])]
            if wrong.size:
                problems.append(
                    f"{got.path.name}: {key} differs from prefill request {got.remote_request} "
                    f"({len(sources)} workers) at {wrong.size} of {held.size} positions, first at {wrong[0]}"
                )
    return problems


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
    return seen & equal

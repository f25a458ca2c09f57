"""How far a start has got, and the estimate of the rest."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from examples.stages import QUIET_S, RECORD, SERVES, STAGES, Progress, seconds_left, stage_of

LINES = [line for _, line in STAGES]


@pytest.mark.parametrize("line", LINES[1:])
def test_vllm_writes_the_line_with_which_a_stage_begins(line: str) -> None:
    found = importlib.util.find_spec("vllm")
    assert found and found.origin
    sources = Path(found.origin).parent
    folders = (sources / "v1" / name for name in ("engine", "core", "worker"))
    files = [
        path for folder in (*folders, sources / "model_executor" / "model_loader") for path in folder.rglob("*.py")
    ]
    assert any(line in path.read_text() for path in files)


def test_the_last_stage_that_began_is_told_and_one_without_its_line_is_passed_over() -> None:
    for index, line in enumerate(LINES):
        assert stage_of("INFO banner\n" + "\n".join(LINES[1 : index + 1])) == index
        assert stage_of(f"INFO banner\n{line} of a release\n") == index


def test_what_is_left_is_what_the_last_start_took_from_there() -> None:
    last = {"loads weights": 10.0, "warms up": 25.0, SERVES: 40.0}
    assert seconds_left(last, "loads weights", 5.0) == 25.0
    assert seconds_left(last, "warms up", 0.0) == 15.0
    assert seconds_left(last, "warms up", 60.0) == 0.0
    assert seconds_left(last, "makes its cache", 0.0) is None, "the last start did not log it"
    assert seconds_left({"loads weights": 10.0}, "loads weights", 5.0) is None, "the last start never served"


def start(directory: Path, what: str = "prefill m") -> list[str]:
    """What is told of a start whose stages take 10 s each."""
    told: list[str] = []
    progress = Progress(told.append, directory)
    for index in range(len(STAGES)):
        progress.starting("prefill-0", what, 10.0 * index, "\n".join(LINES[1 : index + 1]))
    progress.serves("prefill-0", what, 60.0, "http://h:1")
    return told


def test_a_first_start_shows_its_stages_and_the_second_how_long_they_take(tmp_path: Path) -> None:
    first, second = start(tmp_path), start(tmp_path)
    assert first[2] == "20 s, prefill-0 loads weights (3 of 6; no estimate before its first start)"
    assert second[2] == "20 s, prefill-0 loads weights (3 of 6; about 40 s to go, as last time)"
    assert first[-1] == second[-1] == "prefill-0 serves at http://h:1 after 60 s"
    assert len(first) == len(second) == len(STAGES) + 1
    assert "no estimate" in start(tmp_path, "prefill of another size")[2]


def test_a_stage_that_goes_on_is_told_again_with_the_last_line_of_its_log(tmp_path: Path) -> None:
    told: list[str] = []
    progress = Progress(told.append, tmp_path)
    for now in (0.0, QUIET_S / 2, QUIET_S, 1.5 * QUIET_S):
        progress.starting("prefill-0", "m", now, "downloading 1 of 7\n")
    assert [": downloading 1 of 7" in line for line in told] == [False, True]


def test_a_start_that_takes_longer_than_the_last_is_not_said_to_end_at_once(tmp_path: Path) -> None:
    start(tmp_path)
    told: list[str] = []
    progress = Progress(told.append, tmp_path)
    progress.starting("prefill-0", "prefill m", 0.0, "")
    progress.starting("prefill-0", "prefill m", 90.0, "")
    assert "longer than last time" in told[1]


@pytest.mark.parametrize("kept", ["", "[1]", '{"prefill m": 3}', '{"prefill m": {"serves": "soon"}}'])
def test_a_record_that_is_not_whole_is_begun_anew(kept: str, tmp_path: Path) -> None:
    (tmp_path / RECORD).write_text(kept)
    assert "no estimate" in start(tmp_path)[0]
    assert json.loads((tmp_path / RECORD).read_text())["prefill m"][SERVES] == 60.0

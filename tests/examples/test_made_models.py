"""Checkpoints that are made when they are first wanted, by whichever process comes first."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from examples.make_models import made


def test_several_that_want_a_checkpoint_at_once_find_it_whole_and_one_makes_it(tmp_path: Path) -> None:
    path, all_there, writers = tmp_path / "models" / "tiny", threading.Barrier(4), []

    def write(partial: Path) -> None:
        writers.append(partial)
        time.sleep(0.2)  # for the others to come
        (partial / "config.json").write_text("{}")

    def want(_: int) -> bool:
        all_there.wait(10)
        return (made(path, write, Path(__file__)) / "config.json").exists()

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(want, range(4))) == [True] * 4
    assert len(writers) == 1
    made(path, write, Path(threading.__file__))
    assert len(writers) == 2, "made by another file, it is made anew"

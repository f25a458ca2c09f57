"""The soak tells a process that grows from one that is warm, and asks the same of a seed each time."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from pd_test_plugins.memory import TidiesMemory

from tests.faults import soak
from tests.faults.system.memory import GROWTH_BYTES, LEAST_SAMPLES, Memory, Trend, resident
from tests.faults.world import World


def trend(sizes: list[float]) -> Memory:
    found = Trend()
    for number, size in enumerate(sizes):
        found.add(500 * number, int(size))
    return Memory({"engine": found})


def test_what_the_first_half_takes_is_no_growth() -> None:
    warm = [min(i, 10) * 30e6 for i in range(30)]
    assert trend(warm).problems() == []


def test_noise_is_no_growth() -> None:
    rng = random.Random(1)
    assert trend([500e6 + rng.uniform(-8e6, 8e6) for _ in range(30)]).problems() == []


@pytest.mark.parametrize("per_request", [350, 4000])
def test_a_process_that_loses_some_bytes_with_each_request_is_found(per_request: int) -> None:
    rounds = 2 * (GROWTH_BYTES // per_request // 500 + 5)
    [problem] = trend([500e6 + 500 * i * per_request for i in range(rounds)]).problems()
    assert problem.startswith("engine grew by ")


def test_too_few_samples_are_a_problem_of_their_own() -> None:
    assert trend([1.0] * (LEAST_SAMPLES - 1)).problems() != []


def test_a_process_that_takes_memory_is_seen_to() -> None:
    with mmap.mmap(-1, 32 << 20) as taken:  # from the kernel: an allocator may give again what is resident
        before = resident(os.getpid())
        for page in range(0, len(taken), mmap.PAGESIZE):
            taken[page] = 1
        assert resident(os.getpid()) - before > 0.8 * len(taken)
    memory = Memory()
    memory.sample({"me": os.getpid()}, 0)
    assert any(name.startswith("me server") for name in memory.trends)


def test_what_a_worker_has_allocated_is_told_apart_from_what_its_allocator_keeps() -> None:
    libc, size, worker = ctypes.CDLL(None), 4096, TidiesMemory()
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    before = sum(worker.tidy_memory().values())
    pieces = [libc.malloc(size) for _ in range(8192)]
    for piece in pieces:
        ctypes.memset(piece, 1, size)
    assert 0.9 < (sum(worker.tidy_memory().values()) - before) / (size * len(pieces)) < 1.2
    full = resident(os.getpid())
    for number, piece in enumerate(pieces):
        if number % 16:  # what is left keeps the heap from getting shorter
            libc.free(piece)
    assert (sum(worker.tidy_memory().values()) - before) / (size * len(pieces)) < 0.2
    assert full - resident(os.getpid()) > 0.7 * size * len(pieces), "free pages go back"
    for piece in pieces[::16]:
        libc.free(piece)


def test_a_seed_asks_the_same_and_has_prompts_of_all_lengths() -> None:
    lengths = [len(prompt) for prompt in soak.asked(3)]
    assert soak.asked(3) == soak.asked(3) != soak.asked(4)
    assert min(lengths) == 1 and max(lengths) > 1000 and sorted(lengths)[len(lengths) // 2] < 100


@pytest.mark.parametrize("words", ["--seconds 59", "--requests 239", "--seconds nan"])
def test_a_run_too_short_to_judge_memory_is_a_usage_error(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        soak.main(words.split())
    assert "must be" in capsys.readouterr().err


@pytest.mark.parametrize(("requests", "seconds"), [(soak.LEAST_REQUESTS, 3600.0), (10**6, soak.LEAST_S)])
def test_the_shortest_runs_have_enough_rounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, requests: int, seconds: float
) -> None:
    clock = [0.0]
    monkeypatch.setattr(soak.time, "monotonic", lambda: clock[0])
    made = SimpleNamespace(requests=0, rounds=0, sample=lambda: None)

    def round_of(most: int, longest: float) -> SimpleNamespace:
        made.rounds += 1
        made.requests += min(most, round(100 * longest))
        clock[0] += longest
        return SimpleNamespace(seconds=longest, ends={}, sentences=[], record=dict)

    made.round = round_of
    soak.run(made, requests, seconds, tmp_path / "results.jsonl")
    assert made.rounds >= soak.ROUNDS == 2 * LEAST_SAMPLES


def test_a_round_ends_when_enough_was_asked_and_one_refusal_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nobody(World):
        def __init__(self) -> None:
            pass

        def dead(self) -> list[str]:
            return []

        def leaks(self, seconds: float = 0.0) -> list[str]:
            return ["d holds 3 blocks"]

    run = soak.Soak(Nobody(), 1)
    answers = iter([soak.Outcome(soak.End.REFUSED, "no"), *[soak.Outcome(soak.End.RIGHT)] * 100])
    monkeypatch.setattr(run, "_ask", lambda rng: next(answers))
    result = run.round(40, 60.0)
    assert run.requests == result.touched == 40
    assert result.problems["no recovery"] == ["refused: no"] and result.problems["leaked"] == ["d holds 3 blocks"]

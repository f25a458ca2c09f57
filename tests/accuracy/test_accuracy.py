"""The accuracy benchmark measures what it says: its task, its two scores, and the switch that corrupts a cache.

lm-eval itself runs here, against stand-ins that answer the recall task by looking the value up. What a real pair scores
is measured by `benchmarks/accuracy/recall.py`.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer
from hypothesis import given
from hypothesis import strategies as st
from pd_test_plugins.corrupt import exchanged

from benchmarks.accuracy.compare import RECALL_PAIRS, STATES_PAIRS, Received
from benchmarks.accuracy.recall_task import END, KEYS, VALUES, VOCAB_SIZE, WORD_IDS, WORDS, samples
from benchmarks.accuracy.train_recall import ATTENTION, COURSES, STATES, batch
from tests.support.proxy.stand_ins import exposition, info
from vllm_pd_connector.geometry.runs import Runs

COMPARE = Path(__file__).resolve().parents[2] / "benchmarks" / "accuracy" / "compare.py"
QUESTIONS = 12
TP_SIZE = 2
INFO = exposition(info(tp_size=str(TP_SIZE)))


@given(st.integers(0, 1000), st.sampled_from([1, 8, 240]))
def test_a_question_has_exactly_one_answer_in_its_prompt(seed: int, pairs: int) -> None:
    for sample in samples(seed, 3, pairs):
        words = sample.prompt.split()
        assert len(words) == 2 * pairs + 2 and set(words) <= set(WORDS)
        asked_at = [i for i, word in enumerate(words[:-1]) if word == words[-1]]
        assert [words[i + 1] for i in asked_at] == [sample.answer]
    assert samples(seed, 3, pairs) == samples(seed, 3, pairs)


def test_training_teaches_the_same_task() -> None:
    tokens, positions = batch(torch.Generator().manual_seed(1), pairs=20, asked=5, rows=4)
    assert tokens.shape == (4, 2 * 20 + 4 * 5) and int(tokens.max()) < VOCAB_SIZE
    for row in tokens:
        words = [WORDS[token] for token in row.tolist()]
        told = dict(zip(words[:40:2], words[1:40:2], strict=True))
        assert len(told) == 20
        for position in positions[:5].tolist():
            assert words[position + 1] == told[words[position]] and words[position + 2] == END
    assert max(WORD_IDS.values()) < VOCAB_SIZE and len(WORDS) == KEYS + VALUES + 4
    for model, asked in ((ATTENTION, RECALL_PAIRS), (STATES, STATES_PAIRS)):
        assert max(asked) == COURSES[model].lengths[-1] <= KEYS


@given(st.lists(st.sampled_from([16, 64, 256]), min_size=1, max_size=30))
def test_the_switch_exchanges_bytes_of_runs_and_moves_as_many(lengths: list[int]) -> None:
    count = len(lengths)
    runs = Runs(np.arange(count) * 1000, np.arange(count) * 1000 + 7, np.array(lengths))
    changed = exchanged(runs)
    assert np.array_equal(changed.destination, runs.destination) and np.array_equal(changed.length, runs.length)
    assert sorted(zip(changed.source, changed.length, strict=True)) == sorted(
        zip(runs.source, runs.length, strict=True)
    )
    for length in set(lengths):
        same = runs.length == length
        assert same.sum() == 1 or not np.any(changed.source[same] == runs.source[same])


def looks_up(wrong_every: int = 0, salts: set[str] | None = None, counted: float = 1.0) -> TestServer:
    """A completions API that knows the answers, except for one question in `wrong_every`. It says that it received
    `counted` caches for each."""
    asked = 0

    async def metrics(_request: web.Request) -> web.Response:
        ended = int(asked * counted) * TP_SIZE  # each rank counts
        return web.Response(text=f'{INFO}vllm:pd_receives_total{{engine="0"}} {ended}\n')

    async def complete(request: web.Request) -> web.Response:
        nonlocal asked
        asked += 1
        body: dict[str, Any] = await request.json()
        if salts is not None:
            salts.add(body["cache_salt"])
        words = body["prompt"].split()
        right = words[words.index(words[-1]) + 1]
        text = " v_" if wrong_every and asked % wrong_every == 0 else f" {right} "
        return web.json_response({"choices": [{"index": 0, "text": text}]})

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    app.router.add_get("/metrics", metrics)
    return TestServer(app)


async def compared(tmp_path: Path, plain: TestServer, pd: TestServer) -> tuple[int, str, str]:
    """The command's status, output and errors."""
    for server in (plain, pd):
        await server.start_server()
    command = [sys.executable, str(COMPARE), "--recall", "--limit", str(QUESTIONS), "--json", tmp_path / "found"]
    command += ["--plain", str(plain.make_url("/")), "--pd", str(pd.make_url("/")), "--decode", str(pd.make_url("/"))]
    process = await asyncio.create_subprocess_exec(
        *map(str, command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    output, errors = await process.communicate()
    for server in (plain, pd):
        await server.close()
    assert process.returncode is not None
    return process.returncode, output.decode(), errors.decode()


def test_both_scores_their_difference_and_identical_answers(tmp_path: Path) -> None:
    of_plain, of_pd = set[str](), set[str]()
    status, output, errors = asyncio.run(
        compared(tmp_path, looks_up(salts=of_plain), looks_up(wrong_every=3, salts=of_pd))
    )
    assert status == 0, errors
    assert len(of_plain) == len(of_pd) == 1 and of_plain != of_pd, "neither has a cache of what was asked before"
    [found] = json.loads((tmp_path / "found").read_text())
    assert (found["plain"], found["answers"]) == (1.0, QUESTIONS)
    assert found["pd"] == found["identical"] == pytest.approx(2 / 3)
    assert "-0.333" in output


def test_answers_without_as_many_caches_prove_nothing(tmp_path: Path) -> None:
    status, output, errors = asyncio.run(compared(tmp_path, looks_up(), looks_up(counted=0.5)))
    assert status == 1 and "1.000" in output
    assert (
        f"nothing is proved: {QUESTIONS // 2} caches were received for {QUESTIONS} requests, and 0 receives" in errors
    )


def test_an_instance_is_not_compared_with_itself() -> None:
    command = [sys.executable, str(COMPARE), "--plain", "http://a:1/", "--pd", "http://a:1"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "it would be compared with itself" in done.stderr


def test_a_failed_receive_and_one_of_another_run_are_told_apart() -> None:
    before = Received(10, 3)
    assert Received(30, 3).lacks(20, before) == ""
    assert "1 receives failed" in Received(30, 4).lacks(20, before)
    assert "19 caches were received for 20 requests" in Received(29, 3).lacks(20, before)

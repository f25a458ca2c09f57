"""Answers of one vLLM engine to lists of prompts, and when two answers of a bfloat16 model are the same.

Each call starts an engine in a process of its own (`generate.py`) and ends it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from examples.launch import CPU_ENVIRONMENT, CPU_FLAGS
from examples.make_models import MODELS, make

PROGRAM = Path(__file__).with_name("generate.py")
CACHE_BYTES = 256 * 1024 * 1024
TIMEOUT = 600.0

NEAR_TIE = 0.06
"""In bfloat16 a token counts as another's equal when its log-probability is no further from the best than this: two of
the steps in which a logit of the models here is rounded. float32 models get no such leave."""


@dataclass(frozen=True, slots=True)
class Request:
    """Greedy, runs to its full length; `logprobs` is how many of the best tokens are reported per step."""

    prompt: tuple[int, ...]
    max_tokens: int = 1
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Tokens, per step the log-probabilities of the best tokens, and how many prompt tokens the prefix cache had."""

    tokens: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    cached: int


def generate(
    family: str,
    rounds: Sequence[Sequence[Request]],
    *,
    flags: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> list[list[Answer]]:
    """Answers to each round, whose requests run together; rounds run one after the other in one engine."""
    model = MODELS[family]
    cache = ("--kv-cache-memory-bytes", str(CACHE_BYTES))
    job = {
        "flags": ["--model", str(make(model)), *CPU_FLAGS, *cache, *model.flags, *flags],
        "rounds": [
            [{"prompt": r.prompt, "max_tokens": r.max_tokens, "logprobs": r.logprobs} for r in requests]
            for requests in rounds
        ],
    }
    # The engine core runs in the program itself, so that there is one process less to start.
    own = {**CPU_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    with TemporaryDirectory() as directory:
        output, log = Path(directory) / "answers.json", Path(directory) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, PROGRAM, output],
                env={**os.environ, **own, **model.environment, **(environment or {})},
                stdin=subprocess.PIPE,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                process.communicate(json.dumps(job).encode(), TIMEOUT)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-40:])
        assert process.returncode == 0, f"{family} with {' '.join(flags)} failed; its log ends with:\n{tail}"
        return [[_answer(answer) for answer in answers] for answers in json.loads(output.read_text())]


def _answer(raw: Mapping[str, Any]) -> Answer:
    logprobs = tuple({int(token): value for token, value in step.items()} for step in raw["logprobs"])
    return Answer(tuple(raw["tokens"]), logprobs, raw["cached"] or 0)


def rounds_to_bfloat16(family: str) -> bool:
    """Whether a family's logits are too coarse for exact comparison."""
    return "bfloat16" in MODELS[family].flags


def could_be(token: int, answer: Answer, step: int = 0) -> bool:
    """Whether `token` is what `answer` says at `step`, or so close to it that rounding decides."""
    if answer.tokens[step] == token:
        return True
    if not answer.logprobs:
        return False
    best = answer.logprobs[step]
    return token in best and max(best.values()) - best[token] <= NEAR_TIE


def could_be_all(expected: Answer, answer: Answer) -> bool:
    """Whether two answers are the same up to the first step where rounding decides; after it they have parted."""
    for step, token in enumerate(expected.tokens):
        if answer.tokens[step] != token:
            return could_be(token, answer, step)
    return len(answer.tokens) == len(expected.tokens)

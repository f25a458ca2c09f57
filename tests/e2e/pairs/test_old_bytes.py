"""What a block held before, and what a group has lost of a prefix, reaches no answer: pairs in which it would show.

Each pair here is made for one thing and is asked a few prompts, so it has no row in the matrix.
"""

from __future__ import annotations

import random
import re
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from examples.launch import Server, Servers, vllm_spec
from examples.make_models import MODELS, WINDOW, WINDOWED_HYBRID, Model, make
from tests.support.ports import free_port
from tests.support.servers import digests
from tests.support.servers.agreement import disagreement
from tests.support.servers.cluster import extras
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import Answer, Prompt, Refused, ask, completion, series

pytestmark = pytest.mark.e2e

REFERENCE = {"PD_TEST_REFERENCE_ATTENTION": "1"}


@dataclass(frozen=True)
class Side:
    """How one instance of a pair is started, beyond what its model needs."""

    flags: Sequence[str] = ()
    environment: Mapping[str, str] | None = None

    @staticmethod
    def pages(layout: str, block: int = 0) -> Side:
        flags = ("--block-size", str(block)) if block else ()
        return Side(flags, REFERENCE | {"VLLM_KV_CACHE_LAYOUT": layout})

    def with_(self, *flags: str, **environment: str) -> Side:
        return Side((*self.flags, *flags), {**(self.environment or {}), **environment})


class Pair:
    """A prefill and a decode instance of one model. The first also answers alone, which is what is right."""

    def __init__(self, servers: Servers, model: Model, name: str, p: Side, d: Side, extra: Mapping[str, Any]):
        self._model = model
        self._extras = extras("qwen3next") if "bfloat16" in model.flags else {}

        def spec(side: str, start: Side, role: str) -> Any:
            transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": dict(extra)}
            return vllm_spec(
                f"{name}-{side}",
                make(model),
                flags=(*model.flags, *start.flags),
                transfer=transfer,
                environment={
                    "PD_TEST_POLITE": "1",
                    "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(free_port()),
                    **model.environment,
                    **(start.environment or {}),
                },
            )

        self.prefill, self.decode = servers.start(spec("prefill", p, "kv_producer"), spec("decode", d, "kv_consumer"))

    def alone(self, prompt: Prompt) -> Answer:
        return ask(self.prefill.url, completion(self._model.name, prompt, **self._extras))

    def handed_over(self, prompt: Prompt) -> Answer:
        body = completion(self._model.name, prompt, max_tokens=1)
        params = {"do_remote_decode": True, "do_remote_prefill": False}
        params = ask(self.prefill.url, body | {"kv_transfer_params": params}).kv_transfer_params
        assert params, "the prefill instance handed nothing over"
        fields = {**self._extras, "kv_transfer_params": params}
        return ask(self.decode.url, completion(self._model.name, prompt, **fields))

    def wrong(self, prompts: Sequence[Prompt]) -> list[str]:
        """How the answers of both differ from those of the prefill instance alone."""
        found = []
        for prompt in prompts:
            try:
                answer = self.handed_over(prompt)
                said = disagreement(self.alone(prompt), answer, exact=not self._extras)
            except Refused as error:
                said = str(error)
            if said:
                found.append(f"prompt of {len(prompt)} tokens: {said}")
        return found


@contextmanager
def pair_of(pairs: Pairs, *arguments: Any) -> Iterator[Pair]:
    pairs.end()
    running = Pair(pairs.servers, *arguments)
    try:
        yield running
    finally:
        pairs.servers.stop(running.prefill, running.decode)


def prompts(name: str, *lengths: int) -> list[Prompt]:
    generator = random.Random(name)
    return [tuple(generator.randrange(256) for _ in range(length)) for length in lengths]


@pytest.mark.parametrize(
    ("family", "p", "d", "mode"),
    [
        pytest.param("qwen3next", Side.pages("NHD"), Side.pages("HND"), "pull", id="states-pull"),
        pytest.param(
            "swa", Side.pages("HND", 32), Side.pages("NHD", 96), "push", id="window-push", marks=pytest.mark.matrix
        ),
    ],
)
def test_a_block_s_old_bytes_reach_no_answer(pairs: Pairs, family: str, p: Side, d: Side, mode: str) -> None:
    """All that decode's caches held before is NaN, and its attention multiplies what it masks by zero. Its pages are
    unlike prefill's, so that only tokens move; and its windows begin with tokens that prefill has let go of."""
    d = d.with_(PD_TEST_POISON="1")
    with pair_of(pairs, MODELS[family], f"old-{family}-{mode}", p, d, {"mode": mode}) as running:
        asked = prompts("old bytes", 33, 95, 130, 200, 301, 530)
        wrong = running.wrong(asked)
        assert series(running.decode, "pd_receives_total") == len(asked)
        assert "all caches are filled with NaN" in running.decode.log.read_text(errors="replace")
    assert not wrong, "answers differ from those of one instance:\n" + "\n".join(wrong)


@pytest.mark.matrix
def test_a_group_s_lost_part_of_a_prefix_is_fetched_again(pairs: Pairs, tmp_path: Path) -> None:
    """Requests share a prefix. Long ones keep its full-attention blocks in decode's cache, and do without those of the
    window, which go to others; a short one then looks at what was lost."""
    few = Side(("--num-gpu-blocks-override", "32", "--enable-prefix-caching"))
    trace = tmp_path / "digests"
    with pair_of(pairs, WINDOWED_HYBRID, "lost-prefix", Side(), few, {"digest_dir": str(trace)}) as running:
        block = block_tokens(running.decode)
        [prefix, *ends] = prompts("lost prefix", 2 * block, 18, *[1500 - 2 * block] * 20, 20, 24, 30)
        for end in ends[:-3]:
            running.handed_over((*prefix, *end))
        for record in digests.load(trace):
            record.path.unlink()
        wrong = running.wrong([(*prefix, *end) for end in ends[-3:]])
    assert not wrong, "answers differ from those of one instance:\n" + "\n".join(wrong)
    first = min(digests.received(digests.load(trace)), key=lambda record: record.stop)
    full, window = (of_layer(first, layer) for layer in (3, 1))
    assert not full[: 2 * block].any(), "the case is meant in which the full group's part of the prefix was found"
    assert window[first.stop + 1 - WINDOW : first.stop].all(), "all that the next position looks at came"


def of_layer(record: digests.Record, layer: int) -> Any:
    """The digests of a layer's first key head."""
    [key] = [key for key in record.tensors if f".layers.{layer}." in key and key.endswith("|key|0")]
    return record.tensors[key]


def block_tokens(server: Server) -> int:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        [size] = set(
            re.findall(r'^vllm:cache_config_info\{.*\bblock_size="(\d+)"', answer.read().decode(), re.MULTILINE)
        )
    return int(size)

"""A pair that can never work is refused at its handshake with both values, and both instances go on serving.

Prefill has a model of 4 KV heads, decode one of 6, under one `model_id`, as if a name had been used for two models.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from e2e.pairs import Pairs
from e2e.workload import Answer, Refused, ask, completion, prompts
from launch import Server, vllm_spec
from make_models import MODELS, make

PROMPT, ANOTHER = prompts("impossible pair", (200, 70))
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
PATIENCE_S = 5.0
"""A refusal takes milliseconds; deadlines of a request's phases begin at 10 s."""


@pytest.fixture(scope="module")
def instances(pairs: Pairs) -> Iterator[tuple[Server, Server]]:
    pairs.end()
    specs = []
    for family, role in (("gqa", "kv_producer"), ("gqa6", "kv_consumer")):
        extra = {"model_id": "one name"}
        transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
        polite = {"PD_TEST_POLITE": "1"}
        specs.append(vllm_spec(f"impossible-{family}", make(MODELS[family]), transfer=transfer, environment=polite))
    prefill, decode = pairs.servers.start(*specs)
    yield prefill, decode
    pairs.servers.stop(prefill, decode)


def decode_with(server: Server, prompt: tuple[int, ...], params: object) -> Answer:
    return ask(server.url, completion("gqa6", prompt, kv_transfer_params=params))


@pytest.mark.e2e
@pytest.mark.matrix
def test_a_pair_of_two_models_is_refused_at_once_with_both_values(instances: tuple[Server, Server]) -> None:
    prefill, decode = instances
    alone = ask(decode.url, completion("gqa6", ANOTHER))
    for attempt in ("handshake", "remembered refusal"):
        params = ask(prefill.url, completion("gqa", PROMPT, max_tokens=1, kv_transfer_params=KEEP)).kv_transfer_params
        began, before = time.monotonic(), decode.log.stat().st_size
        with pytest.raises(Refused) as refused:
            decode_with(decode, PROMPT, params)
        assert refused.value.status == 500, attempt
        assert time.monotonic() - began < PATIENCE_S, attempt
        said = decode.log.read_text(errors="replace")[before:]
        assert "cannot read from prefill engine" in said, attempt
        assert "num_kv_heads: 6 here, 4 there" in said, attempt
        assert "extents of model.layers.0" in said, attempt
    assert ask(decode.url, completion("gqa6", ANOTHER)).tokens == alone.tokens
    assert ask(prefill.url, completion("gqa", ANOTHER)).tokens

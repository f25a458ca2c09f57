"""A pair that can never work is refused at its handshake with both values, and both instances go on serving.

Under one `model_id` prefill has a model of 4 KV heads, and decode one of 6, as if a name had been used for two models,
or one of the same sizes and other weights, as if the name had come to mean another version.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from examples.launch import Server, Spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import Refused, ask, completion, prompts

PROMPT, ANOTHER = prompts("impossible pair", (200, 70))
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
PATIENCE_S = 5.0
"""A refusal takes milliseconds; deadlines of a request's phases begin at 10 s."""


@pytest.fixture(scope="module")
def prefill(pairs: Pairs) -> Iterator[Server]:
    pairs.end()
    [server] = pairs.servers.start(spec(make(MODELS["gqa"]), "kv_producer"))
    yield server
    pairs.servers.stop(server)


def trained(model: Path, into: Path) -> Path:
    """A copy of a checkpoint that was trained on."""
    copy = shutil.copytree(model, into / "trained")
    weights = load_file(copy / "model.safetensors")
    weights = {name: tensor * 1.05 if "_proj" in name else tensor for name, tensor in weights.items()}
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    return copy


def spec(model: Path, role: str) -> Spec:
    extra = {"model_id": "one name"}
    transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
    return vllm_spec(f"impossible-{model.name}", model, transfer=transfer, environment={"PD_TEST_POLITE": "1"})


@pytest.mark.e2e
@pytest.mark.matrix
@pytest.mark.parametrize(
    ("kind", "differences"),
    [
        ("of other sizes", ["num_kv_heads: 6 here, 4 there", "extents of model.layers.0", "weights: 'content "]),
        ("of other weights", ["weights: 'content "]),
    ],
)
def test_a_pair_of_two_models_is_refused_at_once_with_both_values(
    pairs: Pairs, prefill: Server, tmp_path: Path, kind: str, differences: list[str]
) -> None:
    model = make(MODELS["gqa6"]) if kind == "of other sizes" else trained(make(MODELS["gqa"]), tmp_path)
    [decode] = pairs.servers.start(spec(model, "kv_consumer"))
    try:
        refused_for(prefill, decode, model.name, differences)
    finally:
        pairs.servers.stop(decode)


def refused_for(prefill: Server, decode: Server, name: str, differences: list[str]) -> None:
    """Hand a prompt over twice; both fail for these differences, and both instances still answer."""
    alone = ask(decode.url, completion(name, ANOTHER))
    for attempt in ("handshake", "remembered refusal"):
        params = ask(prefill.url, completion("gqa", PROMPT, max_tokens=1, kv_transfer_params=KEEP)).kv_transfer_params
        began, before = time.monotonic(), decode.log.stat().st_size
        with pytest.raises(Refused) as refused:
            ask(decode.url, completion(name, PROMPT, kv_transfer_params=params))
        assert refused.value.status == 500, attempt
        assert time.monotonic() - began < PATIENCE_S, attempt
        said = decode.log.read_text(errors="replace")[before:]
        assert "cannot read from prefill engine" in said, attempt
        assert [one for one in differences if one not in said] == [], attempt
    assert ask(decode.url, completion(name, ANOTHER)).tokens == alone.tokens
    assert ask(prefill.url, completion("gqa", ANOTHER)).tokens

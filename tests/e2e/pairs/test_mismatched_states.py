"""Instances whose recurrent states differ: refused when they meet, with both values, and both keep serving.

The decode instances here run the prefill instance's model with something changed. Where that changes the shapes of the
weights they are made up; nothing is ever computed from a cache that does not fit.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from examples.launch import Server, vllm_spec
from examples.make_models import MODELS, make
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import Prompt, Refused, ask, completion, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

MODEL = MODELS["kimi"]
AT_ONCE_S = 5.0
PROMPTS = prompts("mismatched states", (40, 300))


def reshaped(changes: Mapping[str, int]) -> tuple[str, ...]:
    """Flags with which the model's recurrent layers have other sizes."""
    own = json.loads((make(MODEL) / "config.json").read_text())["linear_attn_config"]
    return ("--load-format", "dummy", "--hf-overrides", json.dumps({"linear_attn_config": own | changes}))


@dataclass(frozen=True, slots=True)
class Case:
    """What differs on the decode side (flags, or sizes of the recurrent layers), and how both values are shown."""

    name: str
    here: str
    there: str
    flags: tuple[str, ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)


DRAFTS = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}
CASES = [
    Case("state dtype", "float16 here", "float32 there", flags=("--mamba-cache-dtype", "float16")),
    Case("convolution width", "tap 2 here", "tap 3 there", sizes={"short_conv_kernel_size": 3}),
    Case("head count", "head 8", "head 4", sizes={"num_heads": 8}),
    Case("speculative rows", "tap 5 here", "tap 3 there", flags=("--speculative-config", json.dumps(DRAFTS))),
]


def start(pairs: Pairs, name: str, role: str, flags: tuple[str, ...] = ()) -> Server:
    spec = vllm_spec(
        f"mismatched-{name}",
        make(MODEL),
        flags=(*MODEL.flags, "--no-enable-prefix-caching", *flags),
        transfer={"kv_connector": "PDConnector", "kv_role": role},
        environment={"PD_TEST_POLITE": "1", **MODEL.environment},
    )
    [server] = pairs.servers.start(spec)
    return server


@pytest.fixture(scope="module")
def prefill(pairs: Pairs) -> Iterator[Server]:
    pairs.end()
    server = start(pairs, "prefill", "kv_producer")
    yield server
    pairs.servers.stop(server)


def answers(server: Server, prompt: Prompt) -> bool:
    return len(ask(server.url, completion(MODEL.name, prompt, max_tokens=1)).tokens) == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_other_states_are_refused_at_once_with_both_values(pairs: Pairs, prefill: Server, case: Case) -> None:
    flags = (*case.flags, *(reshaped(case.sizes) if case.sizes else ()))
    decode = start(pairs, case.name.replace(" ", "-"), "kv_consumer", flags)
    try:
        assert answers(decode, PROMPTS[0])
        for prompt in PROMPTS:
            keep = {"do_remote_decode": True, "do_remote_prefill": False}
            params = ask(prefill.url, completion(MODEL.name, prompt, max_tokens=1, kv_transfer_params=keep))
            before, began = decode.log.stat().st_size, time.monotonic()
            with pytest.raises(Refused) as refused:
                ask(decode.url, completion(MODEL.name, prompt, kv_transfer_params=params.kv_transfer_params))
            seconds = time.monotonic() - began
            said = refused.value.body + decode.log.read_text(errors="replace")[before:]
            assert case.here in said and case.there in said, said
            assert seconds < AT_ONCE_S, f"refused after {seconds:.2f} s"
            print(f"{case.name}: refused after {seconds:.2f} s")
        assert answers(decode, PROMPTS[1])
        assert answers(prefill, PROMPTS[1])
    finally:
        pairs.servers.stop(decode)

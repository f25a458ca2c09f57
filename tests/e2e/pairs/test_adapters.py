"""LoRA adapters: a pair answers with an adapter as one instance does, and refuses where one name means two adapters.

Decode has adapter `same` in a copy, at another path than prefill, and loads other weights as `other`. What `moving` is
changes while the instances run.
"""

from __future__ import annotations

import json
import re
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.launch import Server, Spec, post, router_spec, vllm_spec
from examples.make_models import ADAPTER_RANK, MODELS, make, make_adapter
from tests.support.servers.cluster import PATIENCE, until
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import Answer, Prompt, Refused, ask, completion, prompts

MODEL = MODELS["gqa"]
ASKED = prompts("adapters", (20, 100, 300, 700))
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
RECEIVES = re.compile(r"^vllm:pd_receives_total\{[^}]*\} (\S+)$", re.MULTILINE)

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]


@dataclass(frozen=True, slots=True)
class Pair:
    prefill: Server
    decode: Server
    router: Server

    def received(self) -> float:
        """Receives of the decode instance until now."""
        with urllib.request.urlopen(f"{self.decode.url}/metrics", timeout=30) as answer:
            return sum(map(float, RECEIVES.findall(answer.read().decode())))

    def by_router(self, model: str, prompt: Prompt) -> Answer:
        """Both legs at once: prefill sees that they do not fit."""
        return ask(self.router.url, completion(model, prompt))

    def by_hand(self, model: str, prompt: Prompt) -> Answer:
        """One leg after the other: decode sees it."""
        first = ask(self.prefill.url, completion(model, prompt, max_tokens=1, kv_transfer_params=KEEP))
        return ask(self.decode.url, completion(model, prompt, kv_transfer_params=first.kv_transfer_params))


WAYS: list[Callable[[Pair, str, Prompt], Answer]] = [Pair.by_router, Pair.by_hand]


def instance(side: str, adapters: dict[str, Path]) -> Spec:
    transfer = {
        "kv_connector": "PDConnector",
        "kv_role": "kv_producer" if side == "prefill" else "kv_consumer",
        "kv_connector_extra_config": {"mode": "push", **PATIENCE},
    }
    flags = ["--block-size", str(MODEL.block_size), "--no-enable-prefix-caching"]
    flags += ["--enable-lora", "--max-lora-rank", str(ADAPTER_RANK), "--max-loras", str(len(adapters) + 1)]
    flags += ["--lora-modules", *(f"{name}={path}" for name, path in adapters.items())]
    flags += ["--enable-log-requests"]
    environment = {"PD_TEST_POLITE": "1", "VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"}
    return vllm_spec(f"adapters-{side}", make(MODEL), flags=flags, transfer=transfer, environment=environment)


def load(server: Server, path: Path) -> None:
    """Load `moving`, in place if it is there."""
    body = json.dumps({"lora_name": "moving", "lora_path": str(path), "load_inplace": True}).encode()
    asked = urllib.request.Request(f"{server.url}/v1/load_lora_adapter", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=120) as answer:
        assert answer.status == 200


def came(server: Server, request_id: str) -> bool:
    log = server.log.read_text(errors="replace")
    return any("Added request" in line and request_id in line for line in log.splitlines())


@pytest.fixture(scope="module")
def adapted(pairs: Pairs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    pairs.end()
    one, another = (make_adapter(MODEL, number) for number in (1, 2))
    copy = shutil.copytree(one, tmp_path_factory.mktemp("adapters") / "copy")
    prefill, decode = pairs.servers.start(
        instance("prefill", {"same": one, "other": one}), instance("decode", {"same": copy, "other": another})
    )
    [router] = pairs.servers.start(router_spec("adapters-router", [prefill.url], [decode.url]))
    yield Pair(prefill, decode, router)
    pairs.servers.stop(router, prefill, decode)


def test_answers_with_an_adapter_are_those_of_one_instance(adapted: Pair) -> None:
    plain = {
        name: [ask(adapted.decode.url, completion(name, prompt)).tokens for prompt in ASKED]
        for name in ("same", MODEL.name)
    }
    assert all(one != other for one, other in zip(*plain.values(), strict=True)), "the adapter changes nothing"
    before = adapted.received()
    for name, expected in plain.items():
        for way in WAYS:
            assert [way(adapted, name, prompt).tokens for prompt in ASKED] == expected
    assert adapted.received() == before + len(plain) * len(WAYS) * len(ASKED)


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_one_name_for_two_adapters_is_refused(adapted: Pair, way: Callable[[Pair, str, Prompt], Answer]) -> None:
    prompt = ASKED[1]
    before = adapted.decode.log.stat().st_size
    with pytest.raises(Refused) as refused:
        way(adapted, "other", prompt)
    assert refused.value.status >= 500
    said = adapted.decode.log.read_text(errors="replace")[before:]
    assert "the same LoRA adapter, if any: equal files on both sides, or one id for it in adapter_ids" in said
    plain = ask(adapted.decode.url, completion("same", prompt))
    assert way(adapted, "same", prompt).tokens == plain.tokens, "both go on"


def test_an_adapter_that_is_loaded_again_in_place_is_another_for_the_pair(adapted: Pair) -> None:
    one, another = (make_adapter(MODEL, number) for number in (1, 2))
    plain = {
        name: [ask(adapted.decode.url, completion(name, prompt)).tokens for prompt in ASKED]
        for name in ("same", "other")
    }
    for server in (adapted.prefill, adapted.decode):
        load(server, one)
    for way in WAYS:
        assert [way(adapted, "moving", prompt).tokens for prompt in ASKED] == plain["same"]
    load(adapted.prefill, another)
    for way in WAYS:
        with pytest.raises(Refused):
            way(adapted, "moving", ASKED[1])
    load(adapted.decode, another)
    for way in WAYS:
        assert [way(adapted, "moving", prompt).tokens for prompt in ASKED] == plain["other"]

    post(f"{adapted.prefill.url}/pause?mode=keep&clear_cache=false", {})
    with ThreadPoolExecutor(1) as pool:
        body = completion("moving", ASKED[1], max_tokens=1, kv_transfer_params=KEEP)
        waiting = pool.submit(ask, adapted.prefill.url, body, request_id="waits")
        until(lambda: came(adapted.prefill, "waits"), "the request at the engine")
        load(adapted.prefill, one)
        post(f"{adapted.prefill.url}/resume", {})
        assert waiting.result().kv_transfer_params is None, "it came for the former one"
    assert "lora_request: " in adapted.prefill.log.read_text(errors="replace")

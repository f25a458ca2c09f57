"""Weights that change in running instances, and pauses while requests are handed over.

What is changed, and how, goes to a plain instance as well, which says what is right. One way is a worker extension of
the test plugins, named afterwards; the other is vLLM's own `reload_weights`.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import pytest

from examples.launch import Server, Spec, post, router_spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.servers.cluster import PATIENCE, until
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import Answer, Prompt, Refused, ask, completion, forgets, prompts

MODEL = MODELS["gqa"]
ASKED = prompts("new weights", (20, 100, 300, 700))
AT_ONCE = prompts("paused", (40, 200, 400, 700, 900, 1100, 1300, 1500))
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1", "PD_TEST_POLITE": "1"}

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]


def call(server: Server, path: str, **body: object) -> dict[str, object]:
    answer: dict[str, object] = post(f"{server.url}/{path}", body)
    return answer


@dataclass(frozen=True, slots=True)
class Trio:
    """A pair, its router, and an instance alone."""

    prefill: Server
    decode: Server
    plain: Server
    router: Server

    @property
    def all(self) -> tuple[Server, ...]:
        return self.prefill, self.decode, self.plain

    def held(self, prompt: Prompt) -> dict[str, object]:
        """The parameters of a prefill that was handed over."""
        params = ask(self.prefill.url, completion(MODEL.name, prompt, max_tokens=1, kv_transfer_params=KEEP))
        assert params.kv_transfer_params is not None
        return params.kv_transfer_params

    def refused(self, prompt: Prompt, params: object, *said: str) -> None:
        """Decode fails a request with these parameters, and says so."""
        before = self.decode.log.stat().st_size
        with pytest.raises(Refused) as refused:
            ask(self.decode.url, completion(MODEL.name, prompt, kv_transfer_params=params))
        assert refused.value.status >= 500
        text = self.decode.log.read_bytes()[before:].decode(errors="replace")
        assert [words for words in said if words not in text] == [], text[-3000:]

    def right(self) -> list[tuple[int, ...]]:
        """Asked over the router, the pair says what the instance alone says, which is returned."""
        expected = [ask(self.plain.url, completion(MODEL.name, prompt)).tokens for prompt in ASKED]
        found = [ask(self.router.url, completion(MODEL.name, prompt)).tokens for prompt in ASKED]
        assert found == expected
        return expected


def change(server: Server, version: str, method: str, *args: str, **kwargs: str) -> None:
    """As a trainer does it."""
    call(server, "pause?mode=abort")
    call(server, "collective_rpc", method=method, args=args, kwargs=kwargs)
    call(server, "update_weight_version", new_version=version)
    call(server, "resume")


def instance(side: str, mode: str, role: str | None) -> Spec:
    extra = {"mode": mode, **PATIENCE}
    transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra} if role else None
    flags = ["--block-size", str(MODEL.block_size), "--worker-extension-cls", "pd_test_plugins.weights.ChangesWeights"]
    return vllm_spec(f"weights-{mode}-{side}", make(MODEL), flags=flags, transfer=transfer, environment=DEV_MODE)


@pytest.fixture(scope="module", params=["pull", "push"])
def trio(pairs: Pairs, request: pytest.FixtureRequest) -> Iterator[Trio]:
    pairs.end()
    mode = request.param
    sides = {"prefill": "kv_producer", "decode": "kv_consumer", "plain": None}
    servers = pairs.servers.start(*(instance(side, mode, role) for side, role in sides.items()))
    [router] = pairs.servers.start(router_spec(f"weights-{mode}-router", [servers[0].url], [servers[1].url]))
    yield Trio(*servers, router)
    pairs.servers.stop(router, *servers)


def test_caches_of_other_weights_are_refused_and_those_of_the_same_are_used(trio: Trio) -> None:
    first = trio.right()
    old = trio.held(ASKED[3])
    change(trio.prefill, "v2", "scale_norms", "1.5")
    # Who reads asks whether the lease is held; who is written to is told first whose weights are others.
    pushed = "-push-" in trio.prefill.spec.name
    trio.refused(ASKED[3], old, "weights: 'version v2' there, 'content " if pushed else "the lease")
    trio.refused(ASKED[2], trio.held(ASKED[2]), "weights: 'version v2' there, 'content ")
    change(trio.decode, "v2", "scale_norms", "1.5")
    change(trio.plain, "v2", "scale_norms", "1.5")
    second = trio.right()
    assert all(one != other for one, other in zip(first, second, strict=True)), "the weights changed nothing"

    back = {"weights_path": str(make(MODEL))}
    for server in (trio.decode, trio.plain):
        change(server, "v1", "reload_weights", **back)
    trio.refused(ASKED[1], trio.held(ASKED[1]), "weights: 'version v2' there, 'version v1' here")
    call(trio.prefill, "collective_rpc", method="reload_weights", kwargs=back)
    nameless = ask(trio.prefill.url, completion(MODEL.name, ASKED[0], max_tokens=1, kv_transfer_params=KEEP))
    assert nameless.kv_transfer_params is None, "nobody said which weights these are"
    call(trio.prefill, "reset_prefix_cache?reset_external=true")
    call(trio.prefill, "update_weight_version", new_version="v1")
    assert trio.right() == first


@pytest.mark.parametrize("clear", [True, False], ids=["cleared", "not cleared"])
@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
def test_a_pause_with_requests_under_way_ends_and_leaves_nothing_wrong(trio: Trio, mode: str, clear: bool) -> None:
    expected = [ask(trio.plain.url, completion(MODEL.name, prompt)).tokens for prompt in AT_ONCE]
    for server in (trio.decode, trio.prefill):
        with ThreadPoolExecutor(len(AT_ONCE)) as pool:
            under_way = [pool.submit(ask, trio.router.url, completion(MODEL.name, prompt)) for prompt in AT_ONCE]
            until(partial(some_done, under_way), "requests to be under way")
            assert call(server, f"pause?mode={mode}&clear_cache={str(clear).lower()}") == {"status": "paused"}
            assert call(server, "resume") == {"status": "resumed"}
            # What a prefill instance held is gone when it forgets its caches; decode fails who reads it.
            may_fail = mode == "abort" or (mode == "keep" and clear and server is trio.prefill)
            wrong = list(
                filter(None, (disagreement(*each, may_fail) for each in zip(under_way, expected, strict=True)))
            )
        assert wrong == []
    trio.right()
    for server in (trio.prefill, trio.decode):
        until(partial(forgets, server), "a pool without blocks in use")


def some_done(answers: list[Future[Answer]]) -> bool:
    return any(answer.done() for answer in answers)


def disagreement(answer: Future[Answer], right: tuple[int, ...], may_fail: bool) -> str:
    """What is wrong with an answer; aborted ones are as long as they came, and from 0.33 on who comes while an instance
    is paused may be told so."""
    try:
        tokens = answer.result().tokens
    except (Refused, OSError) as error:
        return "" if may_fail or "is paused" in str(error) else str(error)
    return "" if tokens == (right[: len(tokens)] if may_fail else right) else f"{tokens} instead of {right}"

"""Beside a connector that stores what is computed: what it gives that is not what was computed is not handed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.support.scheduler.beside import among_others, beside
from tests.support.scheduler.cores import Core
from tests.support.scheduler.engines import BLOCK, KEEP, Engine, loading, prefilled, transfer

PREFIX = list(range(6 * BLOCK))


def prefilled_by(prefill: Engine, name: str) -> Any:
    """What a prefill with this prefix answers its router."""
    prefill.add(name, PREFIX, KEEP, max_tokens=1)
    for _ in range(3):
        prefill.step()
    prefill.step(sent={name})
    return prefill.ended(name).kv_transfer_params


@pytest.mark.parametrize("resets", [False, True], ids=["it keeps all", "it can be reset"])
def test_what_a_store_keeps_of_former_weights_is_not_handed_over(
    engine: Callable[..., Engine], resets: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM asks it to forget, takes no answer for yes, and says that everything was reset."""
    core = Core(lambda: engine(beside("kv_producer"), wrap=among_others))
    store = core.engine.connector._connectors[1]
    held = 0
    monkeypatch.setattr(store, "get_num_new_matched_tokens", lambda request, computed: (max(held - computed, 0), False))
    if resets:
        monkeypatch.setattr(type(store), "reset_cache", lambda self: True)
    assert prefilled_by(core.engine, "old") is not None
    held = 4 * BLOCK
    core.wait(core.pause_scheduler("abort"))
    core.collective_rpc("update_weights")
    core.set_weight_version("v2")
    core.resume_scheduler()
    assert (prefilled_by(core.engine, "new") is not None) == resets
    assert ("but for those of KeepingConnector" in caplog.text) != resets


def test_a_block_that_others_have_keeps_its_hash_when_what_came_for_a_request_is_not_used(
    engine: Callable[..., Engine],
) -> None:
    """SimpleCPUOffloadConnector copies such blocks, and ends the engine over one whose hash is gone when it has."""
    prefill, decode = engine(transfer("kv_producer")), engine(transfer("kv_consumer"), blocks=16, watermark=0.55)
    shared = list(range(4 * BLOCK))
    decode.add("runs", [*shared, 5000], max_tokens=50)
    decode.step()
    prompt = [*shared, *range(600, 600 + 2 * BLOCK)]
    waits = loading(decode, "waits", prompt, prefilled(prefill, "p-1", prompt))
    theirs, came = decode.blocks_of("waits")[:4], decode.blocks_of("waits")[4:]
    decode.pool.touch(theirs)
    decode.pool.get_new_blocks(2)  # others took some meanwhile, and it is passed over
    decode.step(received={"waits"})
    decode.step()
    assert waits.status is RequestStatus.WAITING and waits.num_computed_tokens and came[0].block_hash is not None
    decode.connector.scheduler.operations.weights_changing("update_weights")
    assert waits.num_computed_tokens == 0
    assert all(block.block_hash is not None for block in theirs) and all(block.block_hash is None for block in came)


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_what_a_step_in_flight_computed_from_blocks_that_did_not_come_is_not_handed_over(mode: str) -> None:
    """vLLM has a request that shares them go on from there, since another computes them again; but the step that is
    under way has read what lay there before."""
    prefill = Engine(transfer("kv_producer", mode=mode), overlapping=True, policy="recompute", step_tokens=512)
    connector = prefill.connector
    matched = connector.get_num_new_matched_tokens

    def loads(request: Any, computed: int) -> tuple[int | None, bool]:
        return (4 * BLOCK, False) if (request.request_id, computed) == ("first", 0) else matched(request, computed)

    connector.get_num_new_matched_tokens = loads
    first = prefill.add("first", [*PREFIX, 9001, 9002], KEEP, max_tokens=1)
    prefill.step()
    missing = prefill.blocks_of("first")[2].block_id
    second = prefill.add("second", [*PREFIX, *range(700, 700 + 2 * BLOCK)], KEEP, max_tokens=1)
    prefill.step(invalid={missing})
    assert (first.num_computed_tokens, second.num_in_flight_tokens) == (2 * BLOCK, 2 * BLOCK)
    for _ in range(8):
        prefill.step()
    assert prefill.ended("first").kv_transfer_params is not None
    assert prefill.ended("second").kv_transfer_params is None
    if mode == "push":
        pushed = connector.scheduler.producer._server.pushes._table.running(["second"])
        assert all("another connector" in prefill.failure for prefill in pushed)
    connector.shutdown()

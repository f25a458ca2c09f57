"""What a later vLLM may do otherwise than those that were read, and requests that vLLM itself does not tell apart."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from tests.support.scheduler.halves import (
    BLOCK,
    TOKEN,
    freed,
    hand_over,
    make_half,
    make_request,
    receive_of,
    serving_half,
)
from vllm_pd_connector.errors import PDConnectorError
from vllm_pd_connector.metadata import BadParameters
from vllm_pd_connector.scheduler import half as module
from vllm_pd_connector.scheduler.half import SchedulerHalf


@pytest.fixture
def untold(monkeypatch: pytest.MonkeyPatch) -> SchedulerHalf:
    """A half that was told of no block pool."""
    with monkeypatch.context() as patch:
        patch.setattr(SchedulerHalf, "bind_block_pool", lambda half, pool: None)
        return make_half("kv_producer")[0]


def manager_of(pool: BlockPool) -> Any:
    """vLLM's cache manager, as far as it is looked at when it is bound."""
    return SimpleNamespace(block_pool=pool, coordinator=SimpleNamespace(scheduler_block_size=BLOCK))


def test_a_pool_that_only_the_manager_names_is_bound_once(
    untold: SchedulerHalf, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("fails_over_unequal_hits", "spare_lookups"):
        monkeypatch.setattr(module, name, lambda *_: False)
    pool = BlockPool(num_gpu_blocks=32, enable_caching=False, hash_block_size=BLOCK)
    untold.bind_cache_manager(manager_of(pool))
    quarantine = untold._quarantine
    untold.bind_block_pool(pool)
    assert quarantine is not None and untold._quarantine is quarantine
    untold.serve([b"manifest"], [TOKEN])
    free = pool.get_num_free_blocks()
    hand_over(untold)
    assert pool.get_num_free_blocks() == free - 3
    with pytest.raises(PDConnectorError, match="two block pools"):
        untold.bind_block_pool(BlockPool(num_gpu_blocks=32, enable_caching=False, hash_block_size=BLOCK))


def test_without_a_pool_an_instance_does_not_begin_to_serve(untold: SchedulerHalf) -> None:
    with pytest.raises(PDConnectorError, match="vLLM has told of no block pool"):
        untold.serve([b"manifest"], [TOKEN])
    assert untold.producer.home is None


def test_fields_that_a_later_vllm_adds_to_an_answer_fail_no_request_and_are_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    params = [hand_over(serving_half("kv_producer")[0], f"p-{i}") | {"num_cached_tokens": i} for i in range(2)]
    half, pool = make_half("kv_consumer")
    caplog.set_level(logging.WARNING, logger="vllm_pd_connector")
    for name, brought in zip(("d-1", "d-2"), params, strict=True):
        assert not isinstance(receive_of(half, pool, make_request(name, brought)).source, BadParameters)
    assert len([line for line in caplog.messages if "num_cached_tokens" in line]) == 1
    for number in range(200):  # users can write them
        half.consumer.sources._tell_ignored({f"made up {number}": 1})
    assert len(half.consumer.sources._ignored) == 64


def test_chats_of_a_batch_are_held_like_chats_of_clients_that_number_theirs() -> None:
    """vLLM puts _0, _1, ... behind the ids of a batch, as clients do behind theirs, whose leases must last."""
    producer, blocks = serving_half("kv_producer", kv_lease_duration=600.0)
    consumer, pool = make_half("kv_consumer")
    free = blocks.get_num_free_blocks()
    for number in range(3):
        params = hand_over(producer, f"chatcmpl-a_{number}-0123abcd")
        chat = make_request(f"chatcmpl-a_{number}-89abcdef", params)
        assert receive_of(consumer, pool, chat).read is not None
    assert producer.producer.num_leases == 3 and not freed(producer) and blocks.get_num_free_blocks() < free

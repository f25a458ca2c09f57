"""What is shared of received caches, and what is fetched behind prefix hits, through vLLM's own scheduler.

What vLLM's tests of hybrid hits and of pollution intend: after hits of any length, of groups that have lost different
parts of a prefix, the request is scheduled with a cache that is whole for every group, and nobody finds a block that is
not. `tests/scheduler/test_unequal_hits.py` has every case of a hit; here vLLM schedules around it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from tests.support.scheduler.engines import (
    BLOCK,
    FULL,
    KEEP,
    SAMPLED,
    STATES,
    WINDOWED,
    given_back,
    loading,
    prefilled,
    read,
)
from vllm_pd_connector.metadata import WorkerReport

PROMPT = list(range(200))
GROUPS = pytest.mark.parametrize(
    "groups", [(FULL,), (FULL, WINDOWED), (FULL, STATES)], ids=["full", "window", "states"]
)


def received(decode: Any, name: str, prompt: list[int], params: Any, report: WorkerReport | None = None) -> Any:
    """Load a prompt and answer it; what the workers were told to receive."""
    loading(decode, name, prompt, params)
    receive = decode.receive_of(name)
    assert read(receive)
    decode.step()
    decode.step(received={name}, report=report)
    decode.run(name)
    assert decode.ended(name).finish_reason is FinishReason.LENGTH
    return receive


@GROUPS
@pytest.mark.parametrize("hit", [1, 3, 12])
def test_only_what_lies_behind_a_hit_is_received(engine: Any, groups: Any, hit: int) -> None:
    """A request with the first blocks of the prompt went before."""
    prefill, decode = engine("kv_producer", groups=groups), engine("kv_consumer", groups=groups)
    before = [*PROMPT[: hit * BLOCK], 999]
    received(decode, "d-0", before, prefilled(prefill, "p-0", before))
    found = decode.shared(PROMPT)
    receive = received(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    assert receive.start == found and (found == hit * BLOCK or groups != (FULL,))
    decode.check_empty()
    given_back(prefill)


@GROUPS
@pytest.mark.parametrize("lost", [0, 1], ids=["the first group's", "the second group's"])
def test_a_group_that_has_lost_a_part_of_a_hit_gets_it_again(engine: Any, groups: Any, lost: int) -> None:
    prefill, decode = engine("kv_producer", groups=groups), engine("kv_consumer", groups=groups)
    lost = min(lost, len(groups) - 1)
    loading(decode, "d-0", PROMPT, prefilled(prefill, "p-0", PROMPT))
    assert read(decode.receive_of("d-0"))
    decode.step()
    decode.step(received={"d-0"})
    decode.step()
    kept = [block for block in decode.blocks_of("d-0", lost) if not block.is_null and block.block_hash is not None]
    decode.run("d-0")
    decode.rest()
    decode.pool.evict_blocks({block.block_id for block in kept[len(kept) // 2 :]})
    receive = received(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    assert receive.stop >= len(PROMPT) - 1
    tables = receive.blocks[lost]
    assert len(tables.ids) and 0 not in tables.ids, "real blocks, from the first that is missing on"
    if groups[lost] is STATES:
        assert len(tables.ids) == 1, "the state at the end"
    else:
        assert tables.first_block + len(tables.ids) == -(-receive.stop // BLOCK)
    decode.check_empty()
    given_back(prefill)


@pytest.mark.parametrize("groups", [(FULL, WINDOWED), (FULL, STATES)], ids=["window", "states"])
@pytest.mark.parametrize("length", [1, 40], ids=["one token", "with log-probabilities"])
def test_a_longer_prompt_goes_on_from_the_state_of_the_prefilled_one(engine: Any, groups: Any, length: int) -> None:
    """Which is not that of the tokens that the prefill's client had asked for besides."""
    prefill, decode = engine("kv_producer", groups=groups), engine("kv_consumer", groups=groups)
    prefill.add("p-1", PROMPT[:length], KEEP, max_tokens=30, prompt_logprobs=1 if length > 1 else None)
    prefill.run("p-1")
    assert sum(step.get("p-1", 0) for step in prefill.scheduled) == length, "nothing behind the prompt"
    params = prefill.ended("p-1").kv_transfer_params
    assert received(decode, "d-1", PROMPT, params).stop == length
    decode.check_empty()
    given_back(prefill)


def test_a_prompt_that_is_all_there_is_not_received_and_its_prefill_is_given_back(engine: Any) -> None:
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    prompt = PROMPT[: 2 * BLOCK + 1]
    received(decode, "d-0", prompt, prefilled(prefill, "p-0", prompt))
    decode.add("d-1", prompt, prefilled(prefill, "p-1", prompt))
    assert decode.step().num_scheduled_tokens == {"d-1": 1}
    decode.run("d-1")
    decode.check_empty()
    given_back(prefill)


@pytest.mark.parametrize("last", [0, 4])
def test_blocks_that_came_in_part_are_found_by_nobody(engine: Any, last: int) -> None:
    prefill, decode = engine("kv_producer"), engine("kv_consumer")
    params = prefilled(prefill, "p-1", PROMPT)
    received(decode, "d-1", PROMPT, params, WorkerReport(unshareable={"d-1": {0: last}}))
    assert decode.shared([*PROMPT, 0]) == 0, "a prefix begins with its first block"
    assert sum(block.block_hash is not None for block in decode.pool.blocks) == len(PROMPT) // BLOCK - last - 1
    decode.check_empty()


@pytest.mark.parametrize("length", [85, 90, 100])
def test_a_prompt_that_came_before_comes_again_where_hits_end_inside_of_blocks(engine: Any, length: int) -> None:
    """States in larger blocks have vLLM look for hits in units of the smallest one; it then cuts a hit that is deeper
    in one group than in another, and failed where a window had let go of what is left."""
    groups = (replace(FULL, block_size=32), WINDOWED, replace(STATES, block_size=32))
    sizes = {"groups": groups, "block": 32, "hash_block": BLOCK}
    prefill, decode = engine("kv_producer", **sizes), engine("kv_consumer", **sizes)
    assert decode.scheduler.kv_cache_manager.coordinator.enable_partial_hash_hits
    prompt = list(range(length))
    for name in ("d-1", "d-2"):
        loading(decode, name, prompt, prefilled(prefill, f"p-{name}", prompt))
        assert read(decode.receive_of(name))
        decode.step(received={name})
        decode.run(name)
    decode.check_empty()


def test_a_state_inside_a_block_is_never_found_as_that_of_the_whole_block(engine: Any) -> None:
    """Where a layer leaves a checkpoint vLLM computes on, and does not stop at the end of the block that has it."""
    states = replace(STATES, block_size=32, num_prefill_checkpoint_blocks=1, prefill_checkpoint_alignment=1)
    sizes = {"groups": (replace(FULL, block_size=32), states), "block": 32, "hash_block": BLOCK}
    prefill, decode = engine("kv_producer", **sizes), engine("kv_consumer", **sizes)
    decode.scheduler.need_mamba_block_aligned_split = True  # as with such a model, in mamba_cache_mode align
    decode.scheduler.mamba_partial_cache_hit = True
    assert received(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT[:49])).stop == 48
    assert len(PROMPT) - 48 in [step.get("d-1") for step in decode.scheduled], "in one go"
    assert decode.shared([*PROMPT[:64], 999]) == 0
    assert decode.shared([*PROMPT, 999]) > 64, "the end of the prompt is found"
    decode.check_empty()


@pytest.mark.parametrize("length", [49, 50])
def test_a_state_that_decode_brings_to_its_blocks_end_is_found(engine: Any, length: int) -> None:
    """Also where vLLM finds no hit at what was received: 49 tokens are no multiple of what it hashes."""
    sizes = {"groups": (replace(FULL, block_size=32), replace(STATES, block_size=32)), "block": 32, "hash_block": BLOCK}
    prefill, decode = engine("kv_producer", **sizes), engine("kv_consumer", **sizes)
    prompt = PROMPT[:length]
    decode.add("d-1", prompt, prefilled(prefill, "p-1", prompt), max_tokens=40)
    decode.step()
    assert read(decode.receive_of("d-1"))
    decode.step(received={"d-1"})
    decode.run("d-1")
    answered = [*prompt, *[SAMPLED] * 40]
    assert decode.shared([*answered[:64], 999]) == 64
    decode.check_empty()

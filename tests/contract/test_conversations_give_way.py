"""What is kept of conversations is only what nobody else needs, through vLLM's own schedulers."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.support.scheduler.engines import (
    BLOCK,
    FULL,
    STATES,
    WINDOWED,
    Engine,
    given_back,
    loading,
    prefilled,
    read,
    transfer,
)
from tests.support.scheduler.talks import ON, PROMPT, decoded, first_turn

CHUNK = 2


@pytest.mark.parametrize("after", range(5, 10), ids="begun after {} steps".format)
def test_nobody_who_runs_is_preempted_for_a_conversation(engine: Any, after: int) -> None:
    """A prompt's later chunks, and four answers that each begin a block in the same step."""
    prefill = engine(transfer("kv_producer", **ON))
    decode = engine(transfer("kv_consumer", **ON), blocks=5 + 4 + 7 + 1, step_tokens=CHUNK * BLOCK + 4)
    kept = list(range(500, 500 + 4 * BLOCK))
    decoded(decode, "d-1", kept, prefilled(prefill, "p-1", kept))
    assert decode.held() == 5
    answers = [f"answer-{number}" for number in range(4)]
    for number, name in enumerate(answers):
        decode.add(name, [900 + number] * (BLOCK // 2), max_tokens=BLOCK // 2 + 3)
    for _ in range(after):
        decode.step()
    decode.add("long", list(range(6 * BLOCK)), max_tokens=2)
    requests = [decode.scheduler.requests[name] for name in (*answers, "long")]
    decode.run(*answers, "long")
    assert [request.num_preemptions for request in requests] == [0] * 5
    given_back(decode)


def test_who_runs_misses_no_step_for_a_conversation(engine: Any) -> None:
    """One conversation is not enough for the next piece of its prompt, and another request waits for blocks, too."""
    prefill = engine(transfer("kv_producer", **ON))
    decode = engine(transfer("kv_consumer", **ON, conversation_share=1.0), blocks=24, step_tokens=8 * BLOCK)
    for number in range(5):
        kept = list(range(500 * number, 500 * number + BLOCK + 2))
        decoded(decode, f"d-{number}", kept, prefilled(prefill, f"p-{number}", kept))
    assert decode.held() == 10
    decode.scheduler.scheduler_config.long_prefill_token_threshold = 3 * BLOCK
    for name in ("first", "second"):
        decode.add(name, [ord(name[0])] * (9 * BLOCK), max_tokens=1)
    for number in range(3):
        decode.step()
        decode.add(f"small-{number}", [900 + number] * 10, max_tokens=2)
    decode.run("first", "second", *(f"small-{number}" for number in range(3)))
    for name in ("first", "second"):
        steps = [number for number, step in enumerate(decode.scheduled) if name in step]
        assert steps == list(range(steps[0], steps[0] + 3)), name


def test_a_new_request_gets_what_vllm_keeps_back_for_others_too(engine: Any) -> None:
    """With a watermark it needs more free blocks than its own."""
    prefill = engine(transfer("kv_producer", **ON))
    decode = engine(transfer("kv_consumer", **ON), blocks=3 + 1 + 4 + 1, watermark=0.3)
    first_turn(prefill, decode)
    decode.add("runs", [900, 901], max_tokens=2 * BLOCK)
    decode.step()
    new = decode.add("new", list(range(3 * BLOCK)), max_tokens=2)
    for _ in range(4):
        decode.step()
        if new.status is RequestStatus.RUNNING:
            break
    assert new.status is RequestStatus.RUNNING
    assert not decode.connector.scheduler.producer.lending.num_held
    decode.run("runs", "new")


@pytest.mark.parametrize("answer", [20, 41, 44])
def test_a_load_that_has_come_and_needs_one_more_block_gets_a_conversation_s(engine: Any, answer: int) -> None:
    """vLLM asks nobody about it any more, and who stands behind it waits, too."""
    groups = (FULL, WINDOWED)
    prefill = engine(transfer("kv_producer", **ON), groups=groups, blocks=200)
    decode = engine(transfer("kv_consumer", **ON), groups=groups, blocks=15)
    kept, prompt = list(range(2 * BLOCK + 1)), list(range(1000, 1000 + 4 * BLOCK + 1))
    talks = decode.add("talks", kept, prefilled(prefill, "p-1", kept), max_tokens=answer)
    decode.step()
    read(decode.receive_of("talks"))
    decode.step(received={"talks"})
    decode.step()
    waits = decode.add("waits", prompt, prefilled(prefill, "p-2", prompt), max_tokens=3)
    decode.step()
    assert waits.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    for _ in range(answer + 3):
        decode.step()
    assert talks.is_finished() and decode.connector.scheduler.producer.lending.num_held == 1
    read(decode.receive_of("waits"))
    decode.step(received={"waits"})
    decode.add("behind", [1, 2, 3], max_tokens=1)
    decode.run("waits", "behind")
    assert not decode.connector.scheduler.producer.lending.holds("talks")


def test_a_request_that_vllm_puts_off_by_a_step_costs_no_conversation(engine: Any) -> None:
    """It begins with a recurrent state that has just come: vLLM says that no blocks are left, and there are."""
    groups = (FULL, STATES)
    prefill = engine(transfer("kv_producer", **ON), groups=groups)
    decode = engine(transfer("kv_consumer", **ON), groups=groups)
    first_turn(prefill, decode)
    prompt = list(range(1000, 1001 + 3 * BLOCK))
    loading(decode, "loads", prompt, prefilled(prefill, "p-2", prompt))
    assert read(decode.receive_of("loads"))
    decode.step(received={"loads"})
    decode.add("begins alike", prompt, max_tokens=2)
    decode.run("loads", "begins alike")
    first = next(step for step in decode.scheduled if "loads" in step)
    assert "begins alike" not in first, "it was put off"
    assert decode.connector.scheduler.producer.lending.holds("d-1")


def test_what_conversations_have_in_common_counts_once(engine: Any) -> None:
    """A system prompt, say, of which vLLM's prefix cache gives all of them the same blocks."""
    prefill = engine(transfer("kv_producer", **ON))
    decode = engine(transfer("kv_consumer", **ON, conversation_share=0.4))
    common = list(range(200, 200 + 12 * BLOCK))
    for number in range(4):
        prompt = [*common, *[300 + number] * BLOCK]
        assert decoded(decode, f"d-{number}", prompt, prefilled(prefill, f"p-{number}", prompt)) is not None
    lending = decode.connector.scheduler.producer.lending
    assert lending.num_held == 4 and decode.held() < 0.4 * 64 < 4 * 13
    given_back_all(decode)


def given_back_all(decode: Engine) -> None:
    """As new weights or a reset would."""
    producer = decode.connector.scheduler.producer
    producer.make_room()
    assert decode.held() == 0 and not producer.lending._holders


@pytest.mark.parametrize("engine", [True], indirect=True)
@pytest.mark.parametrize("role", ["kv_both", "kv_producer"])
def test_a_reset_that_cannot_come_about_ends_nothing(engine: Any, role: str) -> None:
    """Steps overlap, and vLLM keeps the blocks of who runs for what is under way: it says no after all was ended."""
    either = engine(transfer(role, **ON))
    prefilled(either, "p-1", PROMPT)
    assert either.held() == 3
    either.add("runs", [7] * BLOCK, max_tokens=50)
    for _ in range(3):
        either.step()
    with pytest.raises(RuntimeError, match=r"POST /pause\?mode=keep"):
        either.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert either.connector.scheduler.producer.num_leases == 1
    either.run("runs")
    assert either.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert either.held() == 0


def test_a_request_that_waits_for_something_else_costs_no_conversation(engine: Any) -> None:
    """Another connector's lookup, say: vLLM asks again in each step, and has looked for no blocks."""
    prefill, decode = engine(transfer("kv_producer", **ON)), engine(transfer("kv_consumer", **ON))
    first_turn(prefill, decode)
    half, waits = decode.connector.scheduler, decode.add("waits", list(range(100)), max_tokens=1)
    for _ in range(5):
        half.num_matched_tokens(waits, 0)
    assert half.producer.lending.num_held == 1
    decode.run("waits")

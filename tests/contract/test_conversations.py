"""Conversations through vLLM's own schedulers: what decode has kept prefill reads, all else it computes."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.support.scheduler.engines import (
    BLOCK,
    FULL,
    KEEP,
    RING,
    SAMPLED,
    STATES,
    WINDOWED,
    Engine,
    given_back,
    prefilled,
    read,
    transfer,
)
from tests.support.scheduler.halves import until
from tests.support.scheduler.talks import (
    ANSWER,
    NEXT,
    ON,
    PROMPT,
    both,
    computed,
    decoded,
    first_turn,
    next_prompt,
    told,
    turn,
)
from vllm_pd_connector.metadata import WorkerReport
from vllm_pd_connector.scheduler.half import GAUGES


@pytest.fixture
def pair(engine: Any) -> tuple[Engine, Engine]:
    return engine(transfer("kv_producer", **ON)), engine(transfer("kv_consumer", **ON))


def test_a_turn_reads_all_but_what_is_new(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    params = first_turn(prefill, decode)
    known = len(PROMPT) + ANSWER - 1
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert params["remote_num_tokens"] == known
    prompt = PROMPT + [SAMPLED] * ANSWER + NEXT
    hit = prefill.shared(prompt)
    assert hit == len(PROMPT) // BLOCK * BLOCK, "of its own prefill"
    request = turn(prefill, "p-2", prompt, params)
    receive = prefill.receive_of("p-2")
    assert (receive.start, receive.stop, receive.spare) == (hit, known, True)
    assert read(receive)
    prefill.step(received={"p-2"})
    scheduled = prefill.step()
    assert scheduled.num_scheduled_tokens == {"p-2": len(prompt) - known}
    prefill.run("p-2")
    again = told(prefill, "p-2")
    assert again is not None and again["do_remote_prefill"] and again["remote_num_tokens"] == len(prompt)
    given_back(decode)
    after = decoded(decode, "d-2", prompt, again)
    assert after is not None and after["remote_num_tokens"] == len(prompt) + ANSWER - 1
    given_back(prefill)
    assert request.num_tokens == len(prompt) + 1


def test_a_prompt_that_leaves_the_conversation_early_reads_what_is_common(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    params = first_turn(prefill, decode)
    lengths = [tokens for tokens, _ in params["pd_connector"]["prefixes"]]
    assert lengths == [16, 32, 40, 48], "every 16 tokens, the first prompt's end, and all"
    prompt = [*PROMPT, 1, 2, 3, *NEXT]
    turn(prefill, "p-2", prompt, params)
    receive = prefill.receive_of("p-2")
    assert (receive.start, receive.stop) == (32, len(PROMPT))
    assert read(receive)
    prefill.step(received={"p-2"})
    assert prefill.step().num_scheduled_tokens == {"p-2": len(prompt) - len(PROMPT)}
    prefill.run("p-2")
    given_back(decode)


def test_a_prefill_that_conversations_alone_hold_back_begins_at_once(engine: Any) -> None:
    """Nothing would ask for another step."""
    prefill, either = engine("kv_producer"), engine(transfer("kv_both", **ON), blocks=21)
    assert decoded(either, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT)) is not None
    for i in range(4):
        prefilled(either, f"p-{i}", [i, *PROMPT[1:]])
    either.rest()
    share = either.connector.scheduler.share
    assert share.num_leased == 15 < share.limit == 16
    either.add("p-5", [5, *PROMPT[1:]], KEEP, max_tokens=1)
    assert either.step().num_scheduled_tokens == {"p-5": len(PROMPT)}
    either.run("p-5")
    assert share.num_leased == 15, "the conversation made room"


@pytest.mark.parametrize("engine", [False], indirect=True)
def test_a_conversation_makes_room_for_no_more_than_a_new_prompt_takes(engine: Any) -> None:
    """A ring of the latest tokens is one block, however long the prompt is."""
    prefill, decode = both(engine, groups=(FULL, RING), blocks=21)
    first_turn(prefill, decode)
    kept, free = decode.held(), int(decode.pool.get_num_free_blocks())
    assert kept == 4, "three blocks of tokens, and a ring"
    decode.add("plain", range(500, 500 + (free - 3) * BLOCK), max_tokens=1)
    decode.run("plain")
    assert decode.held() == kept


@pytest.mark.parametrize("change", ["prompt", "blocks", "digests", "nonce"])
def test_what_is_not_this_conversation_is_computed(pair: tuple[Engine, Engine], change: str) -> None:
    prefill, decode = pair
    params = first_turn(prefill, decode)
    prompt = next_prompt()
    if change == "prompt":
        prompt = [9, *prompt[1:]]
    elif change == "blocks":
        params["remote_block_ids"][0][0] += 1
    elif change == "digests":
        params["pd_connector"]["prefixes"][0][1] = "0" * 16
    else:
        params["pd_connector"]["nonce"] = "0" * 32
    computed(prefill, "p-2", prompt, params)
    if change == "prompt":
        given_back(decode)
    else:
        assert decode.held() == 3, "who does not know its name ends no lease"


def test_a_conversation_that_is_over_is_computed(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    params = first_turn(prefill, decode)
    decode.connector.scheduler.producer.make_room(1000)
    computed(prefill, "p-2", next_prompt(), params)
    assert decode.held() == 0


def test_a_conversation_is_forgotten_with_all_that_is_cached(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    params = first_turn(prefill, decode)
    assert decode.scheduler.reset_prefix_cache(), "which vLLM refuses while blocks are held"
    computed(prefill, "p-2", next_prompt(), params)


@pytest.mark.parametrize("changed", ["prefill", "decode"])
def test_a_conversation_of_other_weights_is_computed(pair: tuple[Engine, Engine], changed: str) -> None:
    prefill, decode = pair
    params = first_turn(prefill, decode)
    engine = prefill if changed == "prefill" else decode
    engine.scheduler.reset_prefix_cache()
    engine.connector.scheduler.operations.weights_changing("a test")
    engine.connector.scheduler.operations.weights_named("two")
    computed(prefill, "p-2", next_prompt(), params)


def test_a_turn_that_began_with_other_weights_is_not_kept(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    handed = prefilled(prefill, "p-1", PROMPT)
    decode.add("d-1", PROMPT, handed, max_tokens=ANSWER)
    decode.step()
    assert read(decode.receive_of("d-1"))
    decode.step(received={"d-1"})
    decode.step()
    operations = decode.connector.scheduler.operations
    operations.weights_changing("a test")
    operations.weights_named("two")
    decode.run("d-1")
    decode.rest()
    assert told(decode, "d-1") is None


def test_a_turn_whose_decode_instance_is_gone_is_computed(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    params = first_turn(prefill, decode)
    decode.connector.shutdown()
    computed(prefill, "p-2", next_prompt(), params)


def test_a_turn_that_could_not_be_received_is_computed_whatever_the_policy(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    assert prefill.policy == "fail"
    params = first_turn(prefill, decode)
    request = turn(prefill, "p-2", next_prompt(), params)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    hit = prefill.shared(next_prompt())
    prefill.step(report=WorkerReport(spared={"p-2"}))
    prefill.step(received={"p-2"})
    prefill.run("p-2")
    assert sum(step.get("p-2", 0) for step in prefill.scheduled) == len(next_prompt()) - hit
    handed = told(prefill, "p-2")
    assert handed is not None and handed["remote_num_tokens"] == len(next_prompt())


def test_an_abort_while_a_turn_loads_leaves_nothing(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    turn(prefill, "p-2", next_prompt(), first_turn(prefill, decode))
    prefill.scheduler.finish_requests("p-2", RequestStatus.FINISHED_ABORTED)
    assert prefill.step().num_scheduled_tokens == {}
    assert prefill.told[-1].aborts == ["p-2"]
    prefill.step(received={"p-2"}, report=WorkerReport(spared={"p-2"}))
    prefill.check_empty()


def test_windows_serve_prefixes_that_end_behind_them(engine: Any) -> None:
    prefill, decode = both(engine, groups=(FULL, WINDOWED))
    params = first_turn(prefill, decode)
    known = len(PROMPT) + ANSWER - 1
    [_, windowed] = params["remote_block_ids"]
    first = params["pd_connector"]["first_blocks"][1]
    assert len(windowed) == 2 and first == 1, "the window of 24 tokens behind 48 begins in the second block"
    assert [tokens for tokens, _ in params["pd_connector"]["prefixes"]] == [39, 40, known][1:]
    turn(prefill, "p-2", next_prompt(), params)
    assert prefill.receive_of("p-2").stop == known


def test_a_state_serves_the_prefix_at_whose_end_it_stands(engine: Any) -> None:
    prefill, decode = both(engine, groups=(FULL, STATES))
    params = first_turn(prefill, decode)
    known = len(PROMPT) + ANSWER - 1
    assert [tokens for tokens, _ in params["pd_connector"]["prefixes"]] == [known]
    turn(prefill, "p-2", next_prompt(), params)
    receive = prefill.receive_of("p-2")
    assert receive.stop == known and receive.read is not None
    assert list(receive.read.blocks[1].ids) == [params["remote_block_ids"][1][0]]
    assert read(receive)
    prefill.step(received={"p-2"})
    left = len(next_prompt()) - 1 - known
    assert sum(prefill.step().num_scheduled_tokens.values()) <= left
    prefill.run("p-2")


@pytest.mark.parametrize("groups", [(FULL,), (FULL, STATES)], ids=["attention", "states"])
def test_what_a_step_under_way_computes_is_not_offered(
    engine: Any, groups: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = both(engine, groups=groups)
    with caplog.at_level(logging.INFO):
        params = decoded(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT), stop=SAMPLED)
        if decode.overlapping and len(groups) > 1:
            assert params is None, "the state stands where the step has taken it"
            again = [1, *PROMPT]
            assert decoded(decode, "d-2", again, prefilled(prefill, "p-2", again), stop=SAMPLED) is None
            assert caplog.text.count("--no-async-scheduling") == 1, "what is to be done about it, once"
            return
    assert "not kept" not in caplog.text
    assert params is not None and params["remote_num_tokens"] == len(PROMPT)


def test_a_request_that_needs_the_blocks_gets_them(engine: Any) -> None:
    prefill = engine(transfer("kv_producer", **ON))
    decode = engine(transfer("kv_consumer", **ON), blocks=9)
    first_turn(prefill, decode)
    assert decode.held() == 3
    decode.add("large", list(range(7 * BLOCK)), max_tokens=2)
    assert decode.step().num_scheduled_tokens.keys() == {"large"}, "at once"
    decode.run("large")
    given_back(decode)


def test_the_oldest_conversation_gives_way_to_the_newest(engine: Any) -> None:
    prefill = engine(transfer("kv_producer", **ON))
    decode = engine(transfer("kv_consumer", conversation_share=0.3, **ON), blocks=32)
    kept = []
    for number in range(4):
        prompt = [number, *PROMPT]
        kept.append((prompt, decoded(decode, f"d-{number}", prompt, prefilled(prefill, f"p-{number}", prompt))))
        assert decode.held() == 4 * min(number + 1, 2)
    for number, (prompt, params) in enumerate(kept):
        request = turn(prefill, f"next-{number}", [*prompt, *[SAMPLED] * ANSWER, *NEXT], params)
        assert (request.status is RequestStatus.WAITING_FOR_REMOTE_KVS) == (number >= 2), f"conversation {number}"


def test_a_conversation_that_never_comes_back_costs_one_lease(engine: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Of its own length, which is no prefill's; nobody had to come for it."""
    prefill = engine(transfer("kv_producer", **ON))
    decode = engine(transfer("kv_consumer", conversation_lease=0.2, kv_lease_duration=600.0, **ON))
    params = first_turn(prefill, decode)
    assert params["pd_connector"]["lease_seconds"] == 0.2
    with caplog.at_level(logging.WARNING):
        given_back(decode)
    assert "its lease" not in caplog.text
    computed(prefill, "p-2", next_prompt(), params)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_instance_takes_part_only_where_it_is_allowed(engine: Any, side: str) -> None:
    prefill = engine(transfer("kv_producer", **(ON if side == "decode" else {})))
    decode = engine(transfer("kv_consumer", **(ON if side == "prefill" else {})))
    params = decoded(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    assert (params is None) == (side == "decode")
    if params is not None:
        computed(prefill, "p-2", next_prompt(), params)


def test_what_is_kept_for_a_next_turn_is_told_apart_from_leases_that_a_drain_waits_for(
    pair: tuple[Engine, Engine],
) -> None:
    prefill, decode = pair
    handed = prefilled(prefill, "p-1", PROMPT)
    prefill.step()
    assert gauges(prefill) == (1, 0)
    assert decoded(decode, "d-1", PROMPT, handed) is not None
    given_back(prefill)
    decode.step()
    assert gauges(decode) == (0, 1)
    decode.scheduler.reset_prefix_cache()
    decode.step()
    assert gauges(decode) == (0, 0)


def gauges(engine: Engine) -> tuple[int, int]:
    """Leases, and conversations that are held, as an instance's metrics have them."""
    told = dict(zip(GAUGES, engine.connector.scheduler._gauges, strict=True))
    return told["leases"], told["conversations held"]


def test_a_turn_is_not_read_into_blocks_that_a_step_in_flight_may_still_write(engine: Any) -> None:
    """vLLM keeps blocks of aborted requests back for consumers alone, and a prefill instance that reads turns loads."""
    params = first_turn(*both(engine))
    prefill = engine(transfer("kv_producer", **ON), blocks=10, step_tokens=2 * BLOCK)
    prefill.add("other", range(500, 640), KEEP, max_tokens=1)
    for _ in range(3):
        prefill.step()
    asks = prefill.add("turn", next_prompt(), params, max_tokens=1)
    until(lambda: prefill.connector.scheduler.consumer._receives["turn"].answers, "decode says that it is held")
    prefill.step()
    assert asks.status is RequestStatus.WAITING, "there is no room beside the other"
    assert len(prefill.in_flight) == prefill.overlapping
    writes = {block.block_id for block in prefill.blocks_of("other")}
    prefill.scheduler.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    prefill.step()
    assert len(prefill.told[-1].receives) == (not prefill.overlapping)
    prefill.step()
    [table] = prefill.receive_of("turn").blocks
    assert writes & set(table.ids.tolist()), "no step writes them any more"
    assert read(prefill.receive_of("turn"))
    prefill.step(received={"turn"})
    prefill.run("turn")

"""Conversations through vLLM's own schedulers: what decode has kept prefill reads, all else it computes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.support.scheduler.engines import (
    BLOCK,
    FULL,
    KEEP,
    SAMPLED,
    STATES,
    WINDOWED,
    Engine,
    given_back,
    prefilled,
    read,
    transfer,
)
from tests.support.scheduler.halves import make_request, until
from vllm_pd_connector.errors import UnauthenticatedPeer
from vllm_pd_connector.metadata import WorkerReport
from vllm_pd_connector.sidechannel.net.keys import create_keys, public_key

PROMPT = list(range(100, 140))
ANSWER = 9
NEXT = [50, 51, 52, 53, 54]
"""What the client says in the next turn."""
ON = {"conversations": True}


def told(engine: Engine, name: str) -> dict[str, Any] | None:
    """The parameters of a finished request, as a router keeps them."""
    params = engine.ended(name).kv_transfer_params
    found: dict[str, Any] | None = json.loads(json.dumps(params))
    return found


def decoded(decode: Engine, name: str, prompt: list[int], params: Any, **ends: Any) -> dict[str, Any] | None:
    """A decode request from its load to its end; what it answers."""
    request = decode.add(name, prompt, params, **{"max_tokens": ANSWER, **ends})
    decode.step()
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
        assert read(decode.receive_of(name))
        decode.step(received={name})
    decode.run(name)
    decode.rest()
    return told(decode, name)


def turn(prefill: Engine, name: str, prompt: list[int], params: Any) -> Any:
    """The prefill of the next turn, until it is loading or computed."""
    request = prefill.add(name, prompt, params, max_tokens=1)

    def decided() -> bool:
        prefill.step()
        return request.status is not RequestStatus.WAITING

    until(decided, "the decode instance says what it holds")
    return request


@pytest.fixture
def pair(engine: Any) -> tuple[Engine, Engine]:
    return engine(transfer("kv_producer", **ON)), engine(transfer("kv_consumer", **ON))


def first_turn(prefill: Engine, decode: Engine) -> dict[str, Any]:
    params = decoded(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    assert params is not None
    given_back(prefill)
    return params


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


def computed(prefill: Engine, name: str, prompt: list[int], params: Any) -> None:
    """A turn that reads nothing and is computed, beside what its instance has in its own prefix cache."""
    hit = prefill.shared(prompt)
    request = turn(prefill, name, prompt, params)
    assert request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS
    prefill.run(name)
    handed = told(prefill, name)
    assert handed is not None and handed["do_remote_prefill"] and handed["remote_num_tokens"] == len(prompt)
    assert sum(step.get(name, 0) for step in prefill.scheduled) == len(prompt) - hit


def next_prompt(answer: int = ANSWER) -> list[int]:
    return PROMPT + [SAMPLED] * answer + NEXT


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


def named(decode: Engine, name: str) -> dict[str, Any]:
    """What a router sends that has seen a stream, in which vLLM tells no parameters."""
    home = decode.connector.scheduler.producer.home
    found = {"remote_engine_id": home.engine_id, "remote_host": home.host, "remote_port": home.port}
    return KEEP | found | {"remote_request_id": name}


def test_a_conversation_is_found_by_its_name(pair: tuple[Engine, Engine]) -> None:
    prefill, decode = pair
    handed = prefilled(prefill, "p-1", PROMPT) | {"transfer_id": "the first turn"}
    assert decoded(decode, "d-1", PROMPT, handed) is not None
    request = turn(prefill, "p-2", next_prompt(), named(decode, "the first turn"))
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert prefill.receive_of("p-2").stop == len(PROMPT) + ANSWER - 1
    assert read(prefill.receive_of("p-2"))
    prefill.step(received={"p-2"})
    prefill.run("p-2")
    given_back(decode)
    computed(prefill, "p-3", next_prompt(), named(decode, "the first turn"))


def keyed(directory: Path) -> dict[str, dict[str, Any]]:
    """What two instances say that know each other's key, by role; a third has a key that nobody knows."""
    for name in ("p", "d", "stranger"):
        create_keys(directory / name, name)
    shutil.copy(directory / "p" / "p.key", directory / "d")
    shutil.copy(directory / "d" / "d.key", directory / "p")
    return {role: {"side_channel_keys": str(directory / name), **ON} for role, name in
            (("kv_producer", "p"), ("kv_consumer", "d"))}  # fmt: skip


def test_with_keys_a_conversation_is_found_by_its_name_and_the_key_that_the_instance_says(
    engine: Any, tmp_path: Path
) -> None:
    told_of = keyed(tmp_path)
    prefill, decode = (engine(transfer(role, **told_of[role])) for role in told_of)
    handed = prefilled(prefill, "p-1", PROMPT) | {"transfer_id": "the first turn"}
    decode.add("d-1", PROMPT, handed, max_tokens=ANSWER)
    decode.step()
    decode.step(received={"d-1"})
    decode.run("d-1")
    decode.rest()
    own = {"pd_connector": {"server_key": decode.connector.scheduler.producer.home.server_key}}
    stranger = {"pd_connector": {"server_key": public_key(tmp_path / "stranger" / "stranger.key")}}
    for unknown, why in (({}, "no side-channel key"), (stranger, "none of the 2 public keys")):
        with pytest.raises(UnauthenticatedPeer, match=why):
            bad = make_request("p-2", named(decode, "the first turn") | unknown)
            prefill.connector.scheduler.consumer.sources.named_conversation(bad)
    computed(prefill, "p-2", [1, *next_prompt()], named(decode, "the first turn"))
    request = turn(prefill, "p-3", next_prompt(), named(decode, "the first turn") | own)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert prefill.receive_of("p-3").stop == len(PROMPT) + ANSWER - 1


@pytest.mark.parametrize("mode", ["push", "auto"])
def test_prefill_reads_what_decode_has_kept_whichever_way_prefills_go(engine: Any, mode: str) -> None:
    prefill = engine(transfer("kv_producer", mode=mode, **ON))
    decode = engine(transfer("kv_consumer", mode=mode, **ON))
    decode.add("d-1", PROMPT, prefilled(prefill, "p-1", PROMPT), max_tokens=ANSWER)
    decode.step()
    assert decode.receive_of("d-1").push is not None
    decode.step(received={"d-1"})
    decode.run("d-1")
    decode.rest()
    params = told(decode, "d-1")
    assert params is not None and params["transfer_mode"] == "push"
    request = turn(prefill, "p-2", next_prompt(), params | {"transfer_id": "both legs at once"})
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert read(prefill.receive_of("p-2"))
    prefill.step(received={"p-2"})
    known = len(PROMPT) + ANSWER - 1
    assert prefill.step().num_scheduled_tokens == {"p-2": len(next_prompt()) - known}
    prefill.run("p-2")
    handed = told(prefill, "p-2")
    assert handed is not None and handed["remote_num_tokens"] == len(next_prompt())
    given_back(decode)


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
def test_what_a_step_under_way_computes_is_not_offered(engine: Any, groups: Any) -> None:
    prefill, decode = both(engine, groups=groups)
    params = decoded(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT), stop=SAMPLED)
    if decode.overlapping and len(groups) > 1:
        assert params is None, "the state stands where the step has taken it"
        return
    assert params is not None and params["remote_num_tokens"] == len(PROMPT)


def test_a_request_that_needs_the_blocks_gets_them(engine: Any) -> None:
    prefill = engine(transfer("kv_producer", **ON))
    decode = engine(transfer("kv_consumer", **ON), blocks=9)
    first_turn(prefill, decode)
    assert decode.held() == 3
    decode.add("large", list(range(7 * BLOCK)), max_tokens=2)
    decode.run("large")
    given_back(decode)


def test_the_oldest_conversation_gives_way_to_the_newest(engine: Any) -> None:
    prefill = engine(transfer("kv_producer", **ON))
    decode = engine(transfer("kv_consumer", conversation_share=0.3, **ON), blocks=32)
    for number in range(4):
        prompt = [number, *PROMPT]
        decoded(decode, f"d-{number}", prompt, prefilled(prefill, f"p-{number}", prompt))
        assert decode.held() == 4 * min(number + 1, 2)


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_instance_takes_part_only_where_it_is_allowed(engine: Any, side: str) -> None:
    prefill = engine(transfer("kv_producer", **(ON if side == "decode" else {})))
    decode = engine(transfer("kv_consumer", **(ON if side == "prefill" else {})))
    params = decoded(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    assert (params is None) == (side == "decode")
    if params is not None:
        computed(prefill, "p-2", next_prompt(), params)


def both(engine: Any, **arguments: Any) -> tuple[Engine, Engine]:
    return engine(transfer("kv_producer", **ON), **arguments), engine(transfer("kv_consumer", **ON), **arguments)

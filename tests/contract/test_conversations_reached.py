"""Who reads a conversation, and how it is found: by its name, with keys, in each mode, by each role."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_scheduler import NixlPullConnectorScheduler
from vllm.v1.request import RequestStatus

from tests.support.scheduler.beside import among_others, beside, prefilled_beside, run_to_its_end
from tests.support.scheduler.engines import BLOCK, SAMPLED, Engine, given_back, prefilled, read, transfer
from tests.support.scheduler.halves import make_request, until
from tests.support.scheduler.talks import (
    ANSWER,
    NEXT,
    ON,
    PROMPT,
    computed,
    decoded,
    first_turn,
    named,
    next_prompt,
    told,
    turn,
)
from vllm_pd_connector.checks import port_problems
from vllm_pd_connector.errors import UnauthenticatedPeer
from vllm_pd_connector.sidechannel.net.keys import create_keys, public_key


@pytest.fixture
def pair(engine: Any) -> tuple[Engine, Engine]:
    return engine(transfer("kv_producer", **ON)), engine(transfer("kv_consumer", **ON))


def test_two_instances_of_both_roles_read_each_other_s_conversations(engine: Any) -> None:
    here, there = engine(transfer("kv_both", **ON)), engine(transfer("kv_both", **ON))
    for prefill, decode, number in ((here, there, 1), (there, here, 2)):
        prompt = [number, *PROMPT]
        kept = decoded(decode, f"d-{number}", prompt, prefilled(prefill, f"p-{number}", prompt))
        request = turn(prefill, f"p-{number}-next", [*prompt, *[SAMPLED] * ANSWER, *NEXT], kept)
        assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        assert prefill.receive_of(request.request_id).stop == len(prompt) + ANSWER - 1
        assert read(prefill.receive_of(request.request_id))
        prefill.step(received={request.request_id})
        prefill.run(request.request_id)
        assert told(prefill, request.request_id) is not None


def test_what_decode_answers_has_the_fields_of_the_in_tree_connector_s(pair: tuple[Engine, Engine]) -> None:
    """All that its prefill instances look for, by the same names and of the same types, and one key of ours."""
    params = first_turn(*pair)
    request = SimpleNamespace(
        request_id="d-1", kv_transfer_params={"do_remote_decode": False}, num_computed_tokens=48,
        status=RequestStatus.FINISHED_LENGTH_CAPPED,
    )  # fmt: skip
    theirs = NixlPullConnectorScheduler.__new__(NixlPullConnectorScheduler)
    theirs.__dict__.update(
        is_bidirectional_kv_xfer_enabled=True, _reqs_need_send={}, decoder_kv_blocks_ttl=480, _kv_lease_duration=30,
        engine_id="d", side_channel_host="127.0.0.1", side_channel_port=5600, transfer_tp_size=1,
        _registration_generation=0,
        get_exchange_clipped_blocks=lambda blocks: blocks, _stop_heartbeat=lambda name: None,
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(decode_context_parallel_size=1, pipeline_parallel_size=1)
        ),
    )  # fmt: skip
    _, told_by_theirs = theirs.request_finished(request, ([1, 2, 3],))
    # A moment of its own host's clock, which means nothing on another; 0.33's count of sleeps, 0 where it is not said.
    not_said = ("remote_blocks_expiry_time", "remote_registration_generation")
    theirs_typed = {name: type(value) for name, value in told_by_theirs.items() if name not in not_said}
    assert {name: type(params[name]) for name in theirs_typed} == {**theirs_typed, "remote_block_ids": list}
    assert params.keys() - told_by_theirs.keys() == {"pd_connector"}
    assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    assert (told_by_theirs["do_remote_decode"], told_by_theirs["do_remote_prefill"]) == (True, False)


def test_a_conversation_is_kept_and_read_beside_another_connector(engine: Any) -> None:
    """In vLLM's MultiConnector; the other one has every finished request kept, and lets go of it a step later."""
    prefill, decode = (engine(beside(role, **ON), wrap=among_others) for role in ("kv_producer", "kv_consumer"))
    decode.add("d-1", PROMPT, prefilled_beside(prefill, PROMPT), max_tokens=ANSWER)
    decode.step()
    assert read(decode.receive_of("d-1"))
    decode.step(received={"d-1"})
    run_to_its_end(decode)
    decode.rest()
    kept = told(decode, "d-1")
    assert kept is not None and decode.held() == 3
    request = turn(prefill, "p-2", next_prompt(), kept)
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert prefill.receive_of("p-2").stop == len(PROMPT) + ANSWER - 1
    assert read(prefill.receive_of("p-2"))
    prefill.step(received={"p-2"})
    scheduled = prefill.step()
    assert scheduled.num_scheduled_tokens == {"p-2": len(next_prompt()) - (len(PROMPT) + ANSWER - 1)}
    given_back(decode)


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


def test_a_conversation_is_found_by_its_name_after_a_long_time_in_the_queue(
    pair: tuple[Engine, Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its second question is asked when vLLM comes to it, and has its own time."""
    prefill, decode = pair
    handed = prefilled(prefill, "p-1", PROMPT) | {"transfer_id": "the first turn"}
    assert decoded(decode, "d-1", PROMPT, handed) is not None
    request = prefill.add("p-2", next_prompt(), named(decode, "the first turn"), max_tokens=1)
    [receive] = prefill.connector.scheduler.consumer._receives.values()
    until(lambda: bool(receive.answers), "the first answer")
    later = SimpleNamespace(monotonic=lambda: time.monotonic() + 60.0)
    monkeypatch.setattr("vllm_pd_connector.scheduler.conversations.turns.time", later)

    def decided() -> bool:
        prefill.step()
        return request.status is not RequestStatus.WAITING

    until(decided, "the decode instance says that it holds it")
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    assert read(prefill.receive_of("p-2"))
    prefill.step(received={"p-2"})
    prefill.run("p-2")
    given_back(decode)


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


@pytest.mark.parametrize("conversations", [False, True], ids=["", "conversations"])
@pytest.mark.parametrize("mode", ["pull", "push", "auto"])
@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_what_listens_at_the_side_channel(engine: Any, role: str, mode: str, conversations: bool) -> None:
    """The table of docs/configuration.md; `vllm-pd check-config` tries the same ports."""
    config = transfer(role, mode=mode, conversations=conversations)
    listens = role != "kv_consumer" or mode != "pull" or conversations
    assert (engine(config).connector.scheduler.producer.home is not None) == listens
    assert bool(port_problems(role, config["kv_connector_extra_config"], [0])) == listens, "the port is taken"


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_decode_instance_reads_no_turns(engine: Any, mode: str) -> None:
    """In mode push its workers could not; a router that got no prefill's answer may send what it has to decode."""
    prefill = engine(transfer("kv_producer", **ON))
    decode = engine(transfer("kv_consumer", **ON))
    other = engine(transfer("kv_consumer", mode=mode, **ON))
    request = other.add("d-2", next_prompt(), first_turn(prefill, decode), max_tokens=1)
    other.run("d-2")
    assert request.status is RequestStatus.FINISHED_LENGTH_CAPPED
    assert sum(step.get("d-2", 0) for step in other.scheduled) == len(next_prompt())
    assert told(other, "d-2") is None


def test_an_instance_of_both_roles_finds_its_own_conversations_in_its_prefix_cache(engine: Any) -> None:
    prefill, both_roles = engine(transfer("kv_producer", **ON)), engine(transfer("kv_both", **ON))
    params = first_turn(prefill, both_roles)
    computed(both_roles, "p-2", next_prompt(), params)
    assert not [receive for each in both_roles.told for receive in each.receives if receive.request_id == "p-2"]
    [computed_tokens] = [step["p-2"] for step in both_roles.scheduled if "p-2" in step]
    assert computed_tokens == len(next_prompt()) - (len(PROMPT) + ANSWER - 1) // BLOCK * BLOCK

    def given_up() -> bool:
        both_roles.step()
        return both_roles.connector.scheduler.producer.num_leases == 1

    until(given_up, "the lease on what it held for itself to be released")


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

"""Weights that change in place, through vLLM's own engine core and scheduler: no cache of others is used."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.request import RequestStatus

from tests.support.scheduler.cores import Core
from tests.support.scheduler.engines import BLOCK, KEEP, given_back, loading, passed_over, prefilled, read
from vllm_pd_connector.compat.base import FOLLOWS_SLEEP
from vllm_pd_connector.compat.operations import CHANGE_WEIGHTS
from vllm_pd_connector.metadata import BadParameters, Refusal

PROMPT = list(range(40))
Engines = Callable[..., Any]


def change(core: Core, version: str | None = "v2") -> None:
    """As a trainer does over vLLM's weight transfer."""
    for method in ("start_weight_update", "update_weights", "finish_weight_update"):
        core.collective_rpc(method)
    if version is not None:
        core.set_weight_version(version)


@pytest.fixture
def cores(engine: Engines) -> Callable[..., Core]:
    return lambda role, **arguments: Core(lambda: engine(role, **arguments))


def refused(decode: Core, name: str, params: Any, *words: str) -> None:
    """A request fails and its worker is told why, in these words."""
    decode.engine.add(name, PROMPT, params)
    decode.engine.step()
    receive = decode.engine.receive_of(name)
    assert isinstance(receive.source, BadParameters)
    assert [word for word in words if word not in receive.source.reason] == []
    assert receive.source.kind is Refusal.WEIGHTS and receive.stop <= BLOCK, "it takes no more than it needs to fail"
    decode.engine.step(failed={name})
    decode.engine.run(name)
    assert decode.engine.ended(name).finish_reason is FinishReason.ERROR


def served(decode: Core, name: str, params: Any) -> None:
    """A request gets its caches."""
    loading(decode.engine, name, PROMPT, params)
    assert read(decode.engine.receive_of(name))
    decode.engine.step(received={name})
    assert decode.engine.step().num_scheduled_tokens == {name: 1}
    decode.engine.run(name)


def clear(*cores: Core) -> None:
    """Pause and go on: every cache is forgotten."""
    for core in cores:
        core.wait(core.pause_scheduler("abort"))
        core.resume_scheduler()


@pytest.mark.skipif(FOLLOWS_SLEEP, reason="this vLLM tells connectors when the caches' memory goes")
def test_memory_that_transports_have_registered_is_not_given_away(cores, monkeypatch):
    """vLLM asks nobody whether sleep mode is enabled: caches of its other allocator go all the same."""
    prefill = cores("kv_producer")
    monkeypatch.setattr(prefill.vllm_config.model_config, "enable_cumem_allocator", True)
    before = prefilled(prefill.engine, "p-1", PROMPT)
    with pytest.raises(RuntimeError, match="transports have it registered; nothing was done"):
        prefill.sleep(1)
    with pytest.raises(RuntimeError, match="transports have it registered"):
        prefill.model_executor.discard(("kv_cache",))
    assert not prefill.is_scheduler_paused() and prefill.engine.held() > 0 and before is not None
    assert prefilled(prefill.engine, "p-2", [*PROMPT, 1]) is not None


def test_a_cache_of_new_weights_is_refused_where_the_old_ones_are(cores):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    served(decode, "d-1", prefilled(prefill.engine, "p-1", PROMPT))
    clear(prefill, decode)
    change(prefill)
    refused(decode, "d-2", prefilled(prefill.engine, "p-2", PROMPT), "weights: 'version v2' there, '' here")
    change(decode)
    served(decode, "d-3", prefilled(prefill.engine, "p-3", PROMPT))
    clear(decode)
    change(decode, "v3")
    refused(decode, "d-4", prefilled(prefill.engine, "p-4", PROMPT), "weights: 'version v2' there, 'version v3' here")
    given_back(prefill.engine)
    decode.engine.check_empty()


def test_what_is_held_of_old_weights_is_not_read_any_more(cores):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    params = prefilled(prefill.engine, "p-1", PROMPT)
    loading(decode.engine, "d-1", PROMPT, params)
    assert prefill.engine.held() == 3
    change(prefill)
    assert prefill.engine.held() == 0, "at once"
    assert not read(decode.engine.receive_of("d-1"))
    decode.engine.step(failed={"d-1"})
    decode.engine.run("d-1")


@pytest.mark.parametrize("method", sorted(CHANGE_WEIGHTS))
def test_weights_without_a_name_are_nobodys(cores, method):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    params = prefilled(prefill.engine, "p-1", PROMPT)
    decode.collective_rpc(method)
    refused(decode, "d-1", params, "not named yet")
    given_back(prefill.engine)
    prefill.collective_rpc(method)
    prefill.engine.add("p-2", PROMPT, KEEP, max_tokens=1)
    prefill.engine.run("p-2")
    assert prefill.engine.ended("p-2").kv_transfer_params is None
    assert method in prefill.model_executor.asked, "vLLM's own call is made"


def test_other_calls_of_workers_change_nothing(cores):
    prefill = cores("kv_producer")
    prefilled(prefill.engine, "p-1", PROMPT)
    prefill.collective_rpc("compute_weight_checksums")
    prefill.collective_rpc(lambda worker: None)
    assert prefill.engine.held() == 3


def test_a_name_alone_says_that_weights_are_others(cores):
    """What changed them was a method of a worker extension, which nobody knows here."""
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    for core in (prefill, decode):
        core.set_weight_version("v1")
    params = prefilled(prefill.engine, "p-1", PROMPT)
    decode.set_weight_version("v1")
    loading(decode.engine, "d-1", PROMPT, params)
    assert prefill.engine.held() == 3, "the same name again says nothing new"
    prefill.set_weight_version("v2")
    assert prefill.engine.held() == 0
    assert decode.get_weight_version() == "v1", "vLLM's own name is as it was set"


@pytest.mark.parametrize("ends", ["it failed", "it had ended"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_a_load_of_old_weights_is_given_up(cores, policy, ends):
    """It may have ended in the very moment: the worker knows, and the scheduler not yet."""
    prefill, decode = cores("kv_producer"), cores("kv_consumer", policy=policy)
    loading(decode.engine, "d-1", PROMPT, prefilled(prefill.engine, "p-1", PROMPT))
    change(decode)
    decode.engine.step()
    assert decode.engine.told[-1].aborts == ["d-1"]
    if ends == "it failed" and policy == "fail":
        decode.engine.step(failed={"d-1"})
        decode.engine.run("d-1")
        assert decode.engine.ended("d-1").finish_reason is FinishReason.ERROR
    else:
        decode.engine.step(**{"failed" if ends == "it failed" else "received": {"d-1"}})
        for _ in range(2):
            scheduled = decode.engine.step().num_scheduled_tokens
            if scheduled:
                break
        assert scheduled == {"d-1": len(PROMPT)}, "all of it is computed here"
        decode.engine.run("d-1")
    decode.engine.check_empty()


def test_what_came_and_did_not_go_on_is_computed_here(cores):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, prefilled(prefill.engine, "p-1", PROMPT))
    decode.engine.step(received={"d-1"})
    change(decode)
    assert decode.engine.step().num_scheduled_tokens == {"d-1": len(PROMPT)}
    decode.engine.run("d-1")
    assert decode.engine.ended("d-1").finish_reason is FinishReason.LENGTH
    decode.engine.check_empty()


@pytest.mark.parametrize("preempted", [False, True])
def test_what_came_and_was_passed_over_is_computed_here(cores, preempted, caplog):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    request = loading(decode.engine, "d-1", PROMPT, prefilled(prefill.engine, "p-1", PROMPT))
    request.num_preemptions = int(preempted)
    passed_over(decode.engine, "d-1")
    with caplog.at_level(logging.WARNING):
        change(decode)
    assert "request d-1: the caches that have come for it are not used" in caplog.text
    assert decode.engine.shared(PROMPT) == 0, "nor are they found again"
    decode.scheduler.finish_requests("other", RequestStatus.FINISHED_ABORTED)
    assert decode.engine.step().num_scheduled_tokens == {"d-1": len(PROMPT)}
    decode.engine.run("d-1")
    assert decode.engine.ended("d-1").finish_reason is FinishReason.LENGTH
    decode.engine.check_empty()


def test_what_goes_on_with_its_caches_is_left_alone(cores, caplog):
    """Of a request that was scheduled nothing is taken away; nor is it said."""
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, prefilled(prefill.engine, "p-1", PROMPT))
    decode.engine.step(received={"d-1"})
    decode.engine.step()
    with caplog.at_level(logging.WARNING):
        change(decode)
    assert "computed here" not in caplog.text
    decode.engine.run("d-1")


def test_a_request_that_waits_through_a_change_is_compared_when_it_goes_on(cores):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    clear(prefill, decode)
    change(prefill)
    params = prefilled(prefill.engine, "p-1", PROMPT)
    decode.wait(decode.pause_scheduler("keep"))
    decode.engine.add("d-1", PROMPT, params)
    decode.engine.step()
    change(decode)
    decode.resume_scheduler()
    decode.engine.step()
    assert decode.engine.receive_of("d-1").read is not None and decode.engine.receive_of("d-1").same_weights


def test_a_prefill_of_two_weights_is_not_handed_over(cores):
    prefill = cores("kv_producer", step_tokens=BLOCK)
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1)
    prefill.engine.step()
    change(prefill)
    prefill.engine.run("p-1")
    assert prefill.engine.ended("p-1").kv_transfer_params is None
    prefill.engine.check_empty()


def test_a_prefill_that_began_between_two_calls_of_one_change_is_not_handed_over(cores, caplog):
    """Nobody has paused the engine; so it is with what was put into the prefix cache between them."""
    prefill = cores("kv_producer", step_tokens=BLOCK)
    with caplog.at_level(logging.WARNING):
        prefill.collective_rpc("start_weight_update")
        prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1)
        prefill.engine.step()
        for method in ("update_weights", "finish_weight_update"):
            prefill.collective_rpc(method)
    assert caplog.text.count("until they are named") == 1
    prefill.set_weight_version("v2")
    prefill.engine.run("p-1")
    assert prefill.engine.ended("p-1").kv_transfer_params is None
    prefill.engine.add("p-2", PROMPT, KEEP, max_tokens=1)
    prefill.engine.run("p-2")
    assert prefill.engine.ended("p-2").kv_transfer_params is None, "its beginning was found in the prefix cache"
    assert prefilled(prefill.engine, "p-3", PROMPT[::-1])


def test_a_prefill_that_was_kept_and_computed_anew_is_handed_over(cores):
    prefill, decode = cores("kv_producer", step_tokens=BLOCK), cores("kv_consumer")
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1)
    prefill.engine.step()
    prefill.wait(prefill.pause_scheduler("keep"))
    clear(decode)
    for core in (prefill, decode):
        change(core)
    prefill.resume_scheduler()
    prefill.engine.run("p-1")
    served(decode, "d-1", prefill.engine.ended("p-1").kv_transfer_params)


def test_a_prefix_that_the_old_weights_computed_is_not_handed_over(cores, caplog):
    prefill = cores("kv_producer")
    prefilled(prefill.engine, "p-1", PROMPT)
    change(prefill)
    assert prefill.engine.shared(PROMPT) > 0, "vLLM keeps it: nobody had it reset"
    prefill.engine.add("p-2", PROMPT, KEEP, max_tokens=1)
    with caplog.at_level(logging.ERROR):
        prefill.engine.run("p-2")
    assert prefill.engine.ended("p-2").kv_transfer_params is None and "prefix cache reset" in caplog.text
    assert prefilled(prefill.engine, "p-3", PROMPT[::-1]), "another prompt has nothing of it"
    assert prefill.scheduler.reset_prefix_cache(False, True)
    assert prefilled(prefill.engine, "p-4", PROMPT)

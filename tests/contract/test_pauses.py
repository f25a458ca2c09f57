"""Pauses, resets of caches and sleep while caches are handed over, through vLLM's own engine core and scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.engine import FinishReason

from tests.support.scheduler.cores import Core, wake
from tests.support.scheduler.engines import BLOCK, KEEP, given_back, loading, passed_over, prefilled, read, transfer
from tests.support.scheduler.halves import make_half, until
from tests.support.scheduler.push_halves import ASK, PushPeer, digest_of
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.metadata import BadParameters, WorkerReport
from vllm_pd_connector.protocol.wire.push_messages import PushState

PROMPT = list(range(40))
MODES = ["abort", "wait", "keep"]


@pytest.fixture
def cores(engine: Callable[..., Any]) -> Callable[..., Core]:
    return lambda role, **arguments: Core(lambda: engine(role, **arguments))


def held(core: Core) -> dict[str, Any]:
    """The parameters of a prefill that is held for a decode instance."""
    params = prefilled(core.engine, "p-1", PROMPT)
    core.engine.rest()
    assert core.engine.held() == 3
    return params


@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_a_pause_that_clears_caches_ends_leases(cores, mode):
    prefill = cores("kv_producer")
    params = held(prefill)
    prefill.wait(prefill.pause_scheduler(mode))
    assert prefill.engine.held() == 0 and prefill.engine.shared(PROMPT) == 0
    prefill.resume_scheduler()
    prefilled(prefill.engine, "p-2", PROMPT)
    decode = cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, params)
    assert not read(decode.engine.receive_of("d-1"))


def test_a_pause_that_vllm_refuses_is_none(cores):
    prefill = cores("kv_producer")
    held(prefill)
    with pytest.raises(ValueError, match="Invalid pause mode: stop"):
        prefill.pause_scheduler("stop")
    assert not prefill.has_work()
    prefill.engine.rest()
    assert prefill.engine.held() == 3


def test_a_scheduler_that_is_not_vllms_is_refused(monkeypatch):
    config = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls="mine.Scheduler"))
    monkeypatch.setattr(Core, "vllm_config", config, raising=False)
    with pytest.raises(InvalidConfig, match="scheduler_cls is 'mine"):
        Core(lambda: make_half("kv_producer"))


@pytest.mark.parametrize("read_before", [True, False], ids=["read", "run out"])
def test_a_pause_that_waits_has_leases_read_or_run_out(cores, read_before):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    receive = decode.engine.receive_of("d-1")
    paused = prefill.pause_scheduler("wait")
    for _ in range(20):
        prefill.engine.step()
    assert not paused.done() and prefill.has_work() and prefill.engine.held() == 3
    if read_before:
        assert read(receive)
    else:
        prefill.scheduler.connector.scheduler.producer._server.drop("p-1")
    prefill.wait(paused)
    assert prefill.engine.held() == 0 and prefill.engine.shared(PROMPT) == 0


def test_a_pause_that_was_taken_back_before_it_came_about_ends_nothing(cores):
    """vLLM finishes it when the engine is idle, and would clear caches by force."""
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    paused = prefill.pause_scheduler("wait")
    prefill.engine.step()
    assert not paused.done()
    prefill.resume_scheduler()
    prefill.engine.rest()
    prefill._notify_idle_state_callbacks()
    assert paused.done() and prefill.engine.held() == 3
    with pytest.raises(RuntimeError, match="taken back"):  # who paused may change weights next
        paused.result()
    assert read(decode.engine.receive_of("d-1"))
    given_back(prefill.engine)


def test_a_sleep_whose_pause_was_taken_back_does_not_come(cores):
    """The hashes of caches that went would stay."""
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    asleep = prefill.sleep(1, "wait")
    prefill.resume_scheduler()
    prefill.engine.rest()
    prefill._notify_idle_state_callbacks()
    with pytest.raises(RuntimeError, match="taken back"):
        asleep.result(0)
    assert not prefill.model_executor.is_sleeping and prefill.engine.held() == 3


def test_a_pause_that_clears_nothing_behind_one_taken_back_clears_nothing(cores):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    first = prefill.pause_scheduler("wait")
    prefill.resume_scheduler()
    second = prefill.pause_scheduler("keep", clear_cache=False)
    prefill.engine.rest()
    prefill._notify_idle_state_callbacks()
    assert isinstance(first.exception(0), RuntimeError) and (second is None or second.result(0) is None)
    assert prefill.engine.held() == 3


def test_a_pause_that_clears_nothing_takes_from_another_nothing_that_it_waits_for(cores):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    first = prefill.pause_scheduler("wait")
    prefill.pause_scheduler("keep", clear_cache=False)
    for _ in range(5):
        prefill.engine.step()
    assert prefill.has_work() and prefill.engine.held() == 3 and read(decode.engine.receive_of("d-1"))
    prefill.wait(first)


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_that_keeps_caches_keeps_leases(cores, mode):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    prefill.wait(prefill.pause_scheduler(mode, clear_cache=False))
    assert prefill.engine.held() == 3
    assert read(decode.engine.receive_of("d-1")), "the side channel is not paused"
    prefill.resume_scheduler()
    given_back(prefill.engine)


def test_a_kept_request_that_loads_is_computed_after_a_pause_that_clears(cores):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    paused = decode.pause_scheduler("keep")
    for _ in range(5):
        decode.engine.step()
    assert not paused.done() and decode.has_work(), "it is not over before the load is"
    decode.engine.step(received={"d-1"})
    decode.wait(paused)
    assert decode.engine.held() == 0
    decode.resume_scheduler()
    assert decode.engine.step().num_scheduled_tokens == {"d-1": len(PROMPT)}
    decode.engine.run("d-1")
    assert decode.engine.ended("d-1").finish_reason is FinishReason.LENGTH
    decode.engine.check_empty()


def test_a_load_of_no_use_that_ends_in_a_pause_is_in_nobodys_way(cores):
    """It is computed here, and vLLM looks at it only when the pause is over."""
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    paused = decode.pause_scheduler("keep")
    decode.engine.step()
    decode.engine.connector.scheduler.consumer.outdate("others", {"d-1"})
    decode.engine.step(received={"d-1"})
    decode.wait(paused)
    assert decode.engine.held() == 0
    decode.resume_scheduler()
    decode.engine.run("d-1")
    assert decode.engine.ended("d-1").finish_reason is FinishReason.LENGTH
    decode.engine.check_empty()


def test_a_kept_request_that_was_passed_over_is_computed_after_a_pause_that_clears(cores):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    passed_over(decode.engine, "d-1")
    decode.wait(decode.pause_scheduler("keep"))
    assert decode.engine.held() == 0
    decode.abort_requests(["other"])
    decode.resume_scheduler()
    assert decode.engine.step().num_scheduled_tokens == {"d-1": len(PROMPT)}
    decode.engine.run("d-1")
    assert decode.engine.ended("d-1").finish_reason is FinishReason.LENGTH
    decode.engine.check_empty()


def test_a_kept_request_that_loads_goes_on_after_a_pause_that_clears_nothing(cores):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    decode.wait(decode.pause_scheduler("keep", clear_cache=False))
    decode.resume_scheduler()
    assert read(decode.engine.receive_of("d-1"))
    decode.engine.step(received={"d-1"})
    assert decode.engine.step().num_scheduled_tokens == {"d-1": 1}
    decode.engine.run("d-1")


def test_a_pause_waits_for_blocks_that_a_failed_read_may_write_into(cores, caplog, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.scheduler.operations._TELL_EVERY_S", 0.0)
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    paused = decode.pause_scheduler("abort")
    decode.engine.step()
    assert decode.engine.told[-1].aborts == ["d-1"], "aborted while it loads"
    decode.engine.step(failed={"d-1"}, report=WorkerReport(quarantined={"d-1": 1}))
    with caplog.at_level(logging.WARNING):
        for _ in range(5):
            decode.engine.step()
            assert decode.has_work() and not paused.done()
    assert "into. That may have no end" in caplog.text, "nothing else is in the way"
    decode.engine.step(report=WorkerReport(drained={"d-1": 1}))
    decode.wait(paused)
    assert decode.engine.held() == 0


def test_a_request_that_is_aborted_while_its_engine_is_paused_gives_its_lease_back(cores):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    params = held(prefill)
    decode.wait(decode.pause_scheduler("keep"))
    decode.engine.add("d-1", PROMPT, params)
    decode.abort_requests(["d-1"])
    given_back(prefill.engine)


def test_a_plain_reset_leaves_leases_and_says_so(cores, caplog):
    prefill = cores("kv_producer")
    held(prefill)
    with caplog.at_level(logging.ERROR):
        assert not prefill.reset_prefix_cache()
    assert "1 prefills held for decode instances" in caplog.text
    assert prefill.engine.held() == 3


@pytest.mark.parametrize("flags", [(True, False), (False, True), (True, True)], ids=["running", "connector", "both"])
def test_a_forced_reset_ends_leases(cores, flags):
    prefill = cores("kv_producer")
    held(prefill)
    assert prefill.reset_prefix_cache(*flags)
    assert prefill.engine.held() == 0 and prefill.engine.shared(PROMPT) == 0


def test_a_reset_while_requests_load_says_what_is_in_the_way(cores, caplog):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    with caplog.at_level(logging.ERROR), pytest.raises(RuntimeError, match="remote KV"):
        decode.reset_prefix_cache(True, True)
    assert "1 requests that load" in caplog.text
    decode.engine.step(received={"d-1"})
    assert decode.reset_prefix_cache(True, True), "what came is given back at once"
    decode.engine.run("d-1")
    assert decode.engine.ended("d-1").finish_reason is FinishReason.LENGTH
    decode.engine.check_empty()


def test_running_requests_are_computed_anew_after_a_forced_reset(cores):
    """vLLM's own rule; the lease of a prefill that runs meanwhile is made of what was computed anew."""
    prefill, decode = cores("kv_producer", step_tokens=16), cores("kv_consumer")
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1)
    prefill.engine.step()
    assert prefill.reset_prefix_cache(True, True)
    prefill.engine.run("p-1")
    loading(decode.engine, "d-1", PROMPT, prefill.engine.ended("p-1").kv_transfer_params)
    assert read(decode.engine.receive_of("d-1"))


@pytest.fixture
def pushing(cores: Callable[..., Core]) -> Iterator[tuple[Core, PushPeer, Callable[[], Any]]]:
    """An engine in the midst of a prefill whose first block was written for a decode worker, who waits for the rest."""
    prefill = cores(transfer("kv_producer", mode="push"), step_tokens=BLOCK)
    peer = PushPeer(prefill.engine.connector.scheduler)
    request = prefill.engine.add("p-1", PROMPT, ASK, max_tokens=1)
    answer = peer.register(digest_of(request), len(PROMPT))
    prefill.engine.step()
    assert [command.ready for command in peer.commands()] == [BLOCK]
    peer.ended()
    assert prefill.engine.held() == 1
    yield prefill, peer, answer
    peer.close()


@pytest.mark.parametrize("flags", [(True, False), (True, True)], ids=["running", "both"])
def test_a_forced_reset_ends_the_push_of_a_prefill_that_runs(pushing, flags):
    prefill, _, answer = pushing
    assert prefill.reset_prefix_cache(*flags)
    said = answer()
    assert said.state is PushState.FAILED and "caches were reset" in said.reason
    prefill.engine.run("p-1")
    prefill.engine.check_empty()


def test_a_forced_reset_waits_for_the_worker_that_writes_for_a_prefill_that_runs(pushing):
    prefill, peer, _ = pushing
    prefill.engine.step()
    assert [command.ready for command in peer.commands()] == [2 * BLOCK]
    ending = Thread(target=lambda: (peer.commands(), peer.ended(ok=False, reason="cancelled")))
    ending.start()
    assert prefill.reset_prefix_cache(True, True)
    ending.join()
    prefill.engine.run("p-1")
    prefill.engine.check_empty()


@pytest.mark.parametrize("mode", MODES)
def test_a_pause_in_the_midst_of_a_prefill_that_is_pushed_comes_about(pushing, mode):
    prefill, peer, answer = pushing

    paused = prefill.pause_scheduler(mode)
    if mode == "wait":
        prefill.engine.run("p-1")
        assert not paused.done() and [command.final for command in peer.commands()][-1]
        peer.ended()
    prefill.wait(paused)
    assert prefill.engine.held() == 0
    assert answer().state is (PushState.DONE if mode == "wait" else PushState.FAILED)


def test_an_engine_that_sleeps_leaves_and_comes_back_as_another(cores):
    """As vLLM 0.33 does it: caches are reset, the memory goes, and the workers' metadata is handed over again."""
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    before = decode.engine.receive_of("d-1").read
    prefill.wait(prefill.sleep(1, "abort"))
    assert prefill.model_executor.asked[-1] == "sleep" and prefill.engine.held() == 0
    wake(prefill)
    params = prefilled(prefill.engine, "p-2", PROMPT)
    loading(decode.engine, "d-2", PROMPT, params)
    after = decode.engine.receive_of("d-2").read
    assert before.peer.incarnation != after.peer.incarnation and before.peer.port == after.peer.port
    assert read(decode.engine.receive_of("d-2")) and not read(decode.engine.receive_of("d-1"))


@pytest.mark.parametrize("mode", ["push", "auto"])
def test_a_request_that_queues_while_its_engine_sleeps_names_it_as_it_is_afterwards(cores, mode):
    prefill, decode = cores(transfer("kv_producer", mode=mode)), cores(transfer("kv_consumer", mode=mode))
    params = held(prefill)
    before = decode.engine.connector.scheduler.producer.home
    decode.wait(decode.sleep(1, "abort"))
    decode.engine.add("d-1", PROMPT, params)
    wake(decode)
    decode.engine.step()
    receive = decode.engine.receive_of("d-1")
    source = receive.source if mode == "push" else receive.source.push
    assert source.home == decode.engine.connector.scheduler.producer.home != before


def pushed_after_sleep(prefill: Core, *before: Any) -> None:
    """A prefill that queues while its engine sleeps, behind others with these names, is pushed after the waking."""
    prefill.wait(prefill.sleep(1, "abort"))
    for number, name in enumerate(before):
        prefill.engine.add(f"before-{number}", PROMPT, {**ASK, "transfer_id": name}, max_tokens=1)
    request = prefill.engine.add("p-1", PROMPT, ASK, max_tokens=1)
    wake(prefill)
    peer = PushPeer(prefill.engine.connector.scheduler)
    answer = peer.register(digest_of(request), len(PROMPT))
    prefill.engine.run("p-1")
    until(lambda: [command.final for command in peer.commands()][-1:] == [True], "all of it is ordered")
    peer.ended()
    assert answer().state is PushState.DONE
    peer.close()


def test_a_prefill_that_queues_while_its_engine_sleeps_is_known_afterwards(cores):
    pushed_after_sleep(cores(transfer("kv_producer", mode="push")))


@pytest.mark.parametrize("name", [5, "", "x" * 513])
def test_a_prefill_with_a_bad_name_that_queues_while_its_engine_sleeps_keeps_it_from_nothing(cores, name):
    """It was met in the waking, which failed."""
    prefill = cores(transfer("kv_producer", mode="push"))
    pushed_after_sleep(prefill, name)
    assert isinstance(prefill.engine.receive_of("before-0").source, BadParameters), "it alone is refused"


def test_an_engine_that_slept_without_losing_its_caches_is_the_same(cores):
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    loading(decode.engine, "d-1", PROMPT, held(prefill))
    prefill.wait(prefill.sleep(0, "abort"))
    wake(prefill)
    assert read(decode.engine.receive_of("d-1"))


def test_weights_that_a_sleep_did_not_keep_are_nobodys(cores):
    prefill = cores("kv_producer")
    prefill.wait(prefill.sleep(2, "abort"))
    wake(prefill)
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1)
    prefill.engine.run("p-1")
    assert prefill.engine.ended("p-1").kv_transfer_params is None
    prefill.set_weight_version("v2")
    prefilled(prefill.engine, "p-2", PROMPT)

"""Adapters that are loaded again in place, through vLLM's own engine core and scheduler: none of two is handed over."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from vllm.lora.request import LoRARequest
from vllm.v1.engine import FinishReason

from tests.support.scheduler.adapters import load, lora, written
from tests.support.scheduler.cores import Core, wake
from tests.support.scheduler.engines import BLOCK, KEEP, given_back, read, transfer
from tests.support.scheduler.halves import until
from tests.support.scheduler.talks import ANSWER, NEXT, ON, PROMPT
from vllm_pd_connector.metadata import BadParameters

Engines = Callable[..., Any]
OTHER = "is not this request's"


@pytest.fixture
def cores(engine: Engines) -> Callable[..., Core]:
    return lambda role, **arguments: Core(lambda: engine(role, **arguments))


@pytest.fixture(params=["the same path", "another path"])
def places(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, Callable[[], Path]]:
    """Where an adapter lies, and what writes another of its name: over it, or elsewhere."""
    old = written(tmp_path / "old", b"old numbers")
    new = old if request.param == "the same path" else tmp_path / "new"
    return old, lambda: written(new, b"new numbers!")


def prefilled(core: Core, name: str, adapter: LoRARequest, prompt: list[int] = PROMPT) -> Any:
    core.engine.add(name, prompt, KEEP, max_tokens=1, lora=adapter)
    core.engine.run(name)
    return json.loads(json.dumps(core.engine.ended(name).kv_transfer_params))


def refused(core: Core, name: str, adapter: LoRARequest, params: Any, words: str) -> None:
    """A request of either side fails, and its worker is told why."""
    core.engine.add(name, PROMPT, params, lora=adapter)
    core.engine.step()
    receive = core.engine.receive_of(name)
    assert isinstance(receive.source, BadParameters) and words in receive.source.reason
    core.engine.step(failed={name})
    core.engine.run(name)
    assert core.engine.ended(name).finish_reason is FinishReason.ERROR


def served(decode: Core, name: str, adapter: LoRARequest, params: Any) -> None:
    decode.engine.add(name, PROMPT, params, lora=adapter)
    decode.engine.step()
    assert read(decode.engine.receive_of(name))
    decode.engine.step(received={name})
    assert decode.engine.step().num_scheduled_tokens == {name: 1}
    decode.engine.run(name)


def test_what_was_computed_under_an_adapter_is_named_for_it_and_for_no_other(cores, places):
    old, renew = places
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    before = load(prefill, old, in_place=False)
    held = [prefilled(prefill, name, before) for name in ("p-1", "p-2")]
    load(decode, old, in_place=False)
    served(decode, "d-1", before, held[0])
    leased = prefill.engine.held()
    there = load(prefill, renew())
    assert prefill.engine.held() == leased, "its content is what it was"
    assert decode.scheduler.reset_prefix_cache(False, False)
    here = load(decode, Path(there.lora_path))
    refused(decode, "d-2", here, held[1], OTHER)
    given_back(prefill.engine)
    assert prefill.scheduler.reset_prefix_cache(False, False)
    served(decode, "d-3", here, prefilled(prefill, "p-3", there))


@pytest.mark.parametrize("mode", ["pull", "push"])
@pytest.mark.parametrize("begun", [True, False])
def test_a_prefill_that_came_before_is_not_handed_over(cores, places, mode, begun, caplog):
    """Also one that only queued: what waits for it was promised the former numbers."""
    old, renew = places
    prefill = cores(transfer("kv_producer", mode=mode), step_tokens=BLOCK)
    before = load(prefill, old, in_place=False)
    if not begun:
        prefill.wait(prefill.pause_scheduler("keep", False))
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1, lora=before)
    prefill.engine.step()
    load(prefill, renew())
    prefill.resume_scheduler()
    prefill.engine.run("p-1")
    assert prefill.engine.ended("p-1").kv_transfer_params is None
    assert "request p-1: nothing of it is held: lora_request" in caplog.text
    prefill.engine.check_empty()


def test_a_request_of_the_former_adapter_that_comes_late_is_refused(cores, places):
    """The API server had looked its adapter up before; it is computed with what is loaded now."""
    old, renew = places
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    before = load(decode, old, in_place=False)
    load(prefill, old, in_place=False)
    params = prefilled(prefill, "p-1", before)
    load(decode, renew())
    refused(decode, "d-1", before, params, "since it was loaded in place")
    load(prefill, renew())
    refused(prefill, "p-2", before, KEEP, "since it was loaded in place")


@pytest.mark.parametrize("when", ["waits", "loads", "has come"])
def test_what_decode_came_for_before_is_not_used(cores, places, when):
    old, renew = places
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    before = load(decode, old, in_place=False)
    params = prefilled(prefill, "p-1", load(prefill, old, in_place=False))
    if when == "waits":
        decode.wait(decode.pause_scheduler("keep", False))
    decode.engine.add("d-1", PROMPT, params, lora=before)
    decode.engine.step()
    if when == "has come":
        decode.engine.step(received={"d-1"})
    load(decode, renew())
    decode.resume_scheduler()
    if when == "has come":
        assert decode.engine.step().num_scheduled_tokens == {"d-1": len(PROMPT)}, "computed here"
        decode.engine.run("d-1")
        return
    decode.engine.step()
    if when == "waits":
        source = decode.engine.receive_of("d-1").source
        assert isinstance(source, BadParameters) and "was loaded in place from" in source.reason
    else:
        assert decode.engine.told[-1].aborts == ["d-1"]
    decode.engine.step(failed={"d-1"})
    decode.engine.run("d-1")
    assert decode.engine.ended("d-1").finish_reason is FinishReason.ERROR
    decode.engine.check_empty()


def test_others_go_on(cores, places):
    """Those without an adapter, and with another."""
    old, renew = places
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    beside = written(old.parent / "beside", b"of another name")
    for core in (prefill, decode):
        load(core, old, in_place=False)
        load(core, beside, 2, in_place=False)
    adapters = {"plain": None, "beside": lora(beside, 2)}
    params = {name: prefilled(prefill, f"p-{name}", adapter) for name, adapter in adapters.items()}
    for name, adapter in adapters.items():
        decode.engine.add(name, PROMPT, params[name], lora=adapter)
    decode.engine.step()
    for core in (prefill, decode):
        load(core, renew())
    for name in adapters:
        assert read(decode.engine.receive_of(name))
    decode.engine.step(received=set(adapters))
    assert decode.engine.step().num_scheduled_tokens == dict.fromkeys(adapters, 1)
    decode.engine.run(*adapters)


def test_the_same_numbers_again_are_no_change(cores, tmp_path):
    prefill = cores("kv_producer", step_tokens=BLOCK)
    path = written(tmp_path / "a", b"numbers")
    adapter = load(prefill, path)
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1, lora=adapter)
    prefill.engine.step()
    load(prefill, written(path, b"numbers"))
    prefill.engine.run("p-1")
    assert prefill.engine.ended("p-1").kv_transfer_params is not None


def test_the_same_numbers_again_are_no_change_where_another_adapter_has_changed(cores, tmp_path):
    prefill = cores("kv_producer", step_tokens=BLOCK)
    path, other = written(tmp_path / "a", b"numbers"), written(tmp_path / "b", b"others")
    adapter = load(prefill, path)
    load(prefill, other, 2)
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1, lora=adapter)
    prefill.engine.step()
    load(prefill, written(other, b"others, trained"), 2)
    load(prefill, path)
    prefill.engine.run("p-1")
    assert prefill.engine.ended("p-1").kv_transfer_params is not None


@pytest.mark.parametrize("in_place", [False, True])
def test_an_adapter_that_is_downloaded_when_it_is_loaded_goes_by_its_content(cores, tmp_path, monkeypatch, in_place):
    """On one side it may have been there before."""
    on_disk: dict[str, Path] = {}

    def snapshot_download(where: str, **_: Any) -> str:
        if where not in on_disk:
            raise LocalEntryNotFoundError(where)
        return str(on_disk[where])

    def there(core: Core, path: str | Path) -> LoRARequest:
        ask = core.model_executor.collective_rpc

        def rpc(method: Any, *args: Any, **kwargs: Any) -> Any:
            on_disk["a-hub/sql"] = written(tmp_path / "snapshot", b"numbers")
            return ask(method, *args, **kwargs)

        monkeypatch.setattr(core.model_executor, "collective_rpc", rpc)
        return load(core, Path(path), in_place=in_place)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    prefill, decode = cores("kv_producer"), cores("kv_consumer")
    downloaded = there(prefill, "a-hub/sql")
    params = prefilled(prefill, "p-1", downloaded)
    served(decode, "d-1", there(decode, on_disk["a-hub/sql"]), params)


def test_a_prefix_that_the_former_adapter_computed_is_not_handed_over(cores, tmp_path, caplog):
    """vLLM finds blocks by an adapter's name and path, whatever it computed them with."""
    prefill = cores("kv_producer")
    path = written(tmp_path / "a", b"old numbers")
    prefilled(prefill, "p-1", load(prefill, path))
    adapter = load(prefill, written(path, b"new numbers!"))
    assert prefilled(prefill, "p-2", adapter) is None
    assert "POST /reset_prefix_cache" in caplog.text
    assert prefilled(prefill, "p-3", adapter, PROMPT[::-1]), "another prompt has nothing of it"
    elsewhere = load(prefill, written(tmp_path / "b", b"newer numbers"))
    assert prefilled(prefill, "p-4", elsewhere), "nor has another path"
    assert prefilled(prefill, "p-5", elsewhere), "whose own prefix is found"
    assert prefilled(prefill, "p-6", load(prefill, path)) is None, "back again"
    assert prefill.scheduler.reset_prefix_cache(False, True)
    assert all(prefilled(prefill, name, adapter) for name in ("p-7", "p-8"))


@pytest.mark.parametrize("reset", [False, True])
def test_a_prefix_that_the_former_adapter_has_yet_to_compute_is_not_handed_over(cores, tmp_path, reset):
    """What waits, or is run anew by a reset, will fill the prefix cache again under the name and path of both."""
    prefill = cores("kv_producer")
    path = written(tmp_path / "a", b"old numbers")
    before = load(prefill, path, in_place=False)
    prefill.wait(prefill.pause_scheduler("keep", True))
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1, lora=before)
    adapter = load(prefill, written(path, b"new numbers!"), 2, in_place=False)
    if reset:
        assert prefill.scheduler.reset_prefix_cache(True, False)
    prefill.engine.add("p-2", PROMPT, KEEP, max_tokens=1, lora=adapter)
    prefill.resume_scheduler()
    prefill.engine.run("p-1", "p-2")
    assert prefill.engine.ended("p-1").kv_transfer_params is not None
    assert prefill.engine.ended("p-2").kv_transfer_params is None
    assert prefilled(prefill, "p-3", adapter, PROMPT[::-1])


def test_an_adapter_that_was_taken_away_and_loaded_anew_has_no_prefix_of_its_former_self(cores, tmp_path):
    """Under another number, so vLLM's own books have nothing to do with it but the prefix cache."""
    prefill = cores("kv_producer")
    path = written(tmp_path / "a", b"old numbers")
    prefilled(prefill, "p-1", load(prefill, path, in_place=False))
    adapter = load(prefill, written(path, b"new numbers!"), 2, in_place=False)
    assert prefilled(prefill, "p-2", adapter) is None
    assert prefilled(prefill, "p-3", adapter, PROMPT[::-1])


def test_files_that_are_overwritten_under_an_adapter_of_requests_in_place_are_a_change(cores, tmp_path):
    """vLLM reads them in every step of such a request, whoever has called it or not."""
    prefill, decode = cores("kv_producer", step_tokens=BLOCK), cores("kv_consumer")
    path = written(tmp_path / "a", b"old numbers")
    adapter = load(prefill, path)
    load(decode, path)
    params = prefilled(prefill, "p-1", adapter)
    decode.engine.add("d-1", PROMPT, params, lora=adapter)
    decode.engine.step()
    prefill.engine.add("p-2", PROMPT[::-1], KEEP, max_tokens=1, lora=adapter)
    prefill.engine.step()
    written(path, b"new numbers!")
    prefill.engine.run("p-2")
    assert prefill.engine.ended("p-2").kv_transfer_params is None
    decode.engine.add("another", PROMPT[::-1], lora=adapter)
    decode.engine.step()
    assert "d-1" in [name for told in decode.engine.told for name in told.aborts], "what it loads is of the former"
    decode.engine.step(failed={"d-1"})
    decode.engine.run("d-1", "another")


def test_of_two_paths_that_are_read_in_turn_nothing_is_handed_over(cores, tmp_path):
    """For each request that has an adapter in place vLLM loads it from its path, in each step."""
    prefill = cores("kv_producer", step_tokens=BLOCK)
    first = load(prefill, written(tmp_path / "a", b"one"))
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1, lora=first)
    prefill.engine.step()
    second = load(prefill, written(tmp_path / "b", b"another"))
    prefill.engine.add("p-2", PROMPT[::-1], KEEP, max_tokens=1, lora=second)
    prefill.engine.run("p-1", "p-2")
    assert [prefill.engine.ended(name).kv_transfer_params for name in ("p-1", "p-2")] == [None, None]
    assert prefilled(prefill, "p-3", second, list(range(200, 240)))


def test_two_paths_with_the_same_numbers_are_no_two_adapters(cores, tmp_path):
    prefill = cores("kv_producer", step_tokens=BLOCK)
    path = written(tmp_path / "a", b"one")
    load(prefill, path)
    first = load(prefill, written(path, b"another"))
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1, lora=first)
    prefill.engine.step()
    second = load(prefill, written(tmp_path / "b", b"another"))
    prefill.engine.add("p-2", PROMPT[::-1], KEEP, max_tokens=1, lora=second)
    prefill.engine.run("p-1", "p-2")
    assert None not in [prefill.engine.ended(name).kv_transfer_params for name in ("p-1", "p-2")]


def test_an_adapter_that_could_not_be_loaded_is_nobodys_until_it_is(cores, places):
    old, renew = places
    prefill = cores("kv_producer")
    before = load(prefill, old, in_place=False)
    prefill.model_executor.fails.add("add_lora")
    with pytest.raises(RuntimeError, match="add_lora failed"):
        load(prefill, renew())
    refused(prefill, "p-1", before, KEEP, "which failed")  # some workers may have the new one
    prefill.model_executor.fails.clear()
    assert prefilled(prefill, "p-2", load(prefill, renew()), PROMPT[::-1])


@pytest.mark.parametrize("ids", [{}, {"sql": "2024-11"}])
def test_an_adapter_loaded_in_place_goes_by_its_content_alone(cores, tmp_path, ids):
    """A path, and what an operator calls it, are the same for the former one."""
    prefill = cores(transfer("kv_producer", adapter_ids=ids))
    before = load(prefill, tmp_path / "nowhere", in_place=False)
    assert prefilled(prefill, "p-1", before), "by its path, or what it is called"
    adapter = load(prefill, tmp_path / "nowhere")
    refused(prefill, "p-2", adapter, KEEP, "nobody can tell its content")
    assert prefilled(prefill, "p-3", load(prefill, written(tmp_path / "somewhere", b"numbers")))


def test_one_that_the_workers_have_given_away_is_read_again(cores, tmp_path):
    prefill = cores("kv_producer", step_tokens=BLOCK)
    path = written(tmp_path / "a", b"old numbers")
    adapter = load(prefill, path, in_place=False)
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1, lora=adapter)
    prefill.engine.step()
    written(path, b"new numbers!")
    prefill.remove_lora(1)
    prefill.engine.run("p-1")
    assert prefill.engine.ended("p-1").kv_transfer_params is None
    assert prefilled(prefill, "p-2", adapter, PROMPT[::-1])


def test_a_prefill_whose_adapter_is_replaced_while_its_engine_sleeps_keeps_it_from_nothing(cores, places):
    old, renew = places
    prefill = cores(transfer("kv_producer", mode="push"))
    before = load(prefill, old, in_place=False)
    prefill.wait(prefill.sleep(1, "abort"))
    prefill.engine.add("p-1", PROMPT, KEEP, max_tokens=1, lora=before)
    adapter = load(prefill, renew())
    prefill.engine.add("p-2", PROMPT[::-1], KEEP, max_tokens=1, lora=adapter)
    wake(prefill)
    prefill.engine.run("p-1", "p-2")
    assert prefill.engine.ended("p-1").kv_transfer_params is None
    assert prefill.engine.ended("p-2").kv_transfer_params is not None


def test_a_turn_of_two_adapters_is_not_kept_and_one_that_waits_is_computed(cores, places):
    old, renew = places
    prefill, decode = cores(transfer("kv_producer", **ON)), cores(transfer("kv_consumer", **ON))
    before = load(prefill, old, in_place=False)
    load(decode, old, in_place=False)
    kept = {}
    for name in ("1", "2"):
        decode.engine.add(f"d-{name}", PROMPT, prefilled(prefill, f"p-{name}", before), max_tokens=ANSWER, lora=before)
        decode.engine.step()
        read(decode.engine.receive_of(f"d-{name}"))
        decode.engine.step(received={f"d-{name}"})
        decode.engine.step()
        if name == "2":
            load(decode, renew())
        decode.engine.run(f"d-{name}")
        kept[name] = decode.engine.ended(f"d-{name}").kv_transfer_params
    assert kept["1"] is not None and kept["2"] is None
    prefill.engine.add("p-3", PROMPT + NEXT, json.loads(json.dumps(kept["1"])), max_tokens=1, lora=before)
    load(prefill, renew())

    def over() -> bool:
        prefill.engine.step()
        return "p-3" not in prefill.scheduler.requests

    until(over, "the decode instance says what it holds")
    assert [told.receives for told in prefill.engine.told if told.receives] == []
    assert prefill.engine.ended("p-3").kv_transfer_params is None, "it came before"

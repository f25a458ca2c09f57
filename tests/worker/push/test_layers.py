"""Pushes that are written layer by layer, between workers: what goes out when, and what is said where nothing does."""

from __future__ import annotations

import threading
from collections import Counter

import msgspec
import pytest

from tests.support.geometry.numbers import write
from tests.support.geometry.world import table
from tests.support.worker.decode_instance import D_BLOCKS, D_SIDE, set_faults, until
from tests.support.worker.prefill_instance import MODEL, P_BLOCKS, TOKENS
from tests.support.worker.writer import CONFIG, SOURCE, TINY, ask_early, freed, whole, writes
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.bind import pair
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import GroupKind
from vllm_pd_connector.geometry.plan import Edge
from vllm_pd_connector.worker.push import link, waves
from vllm_pd_connector.worker.push.active import ActivePush


@pytest.fixture(params=[0, TINY], ids=["direct", "by way of the slab"])
def config(request: pytest.FixtureRequest) -> Config:
    return msgspec.structs.replace(CONFIG, staging_bytes=request.param, push_when="layers")


def has_growing(edge: Edge) -> bool:
    return any(pairing.kind is GroupKind.FULL for pairing in edge.pairings)


@pytest.mark.parametrize("ready", [TOKENS - 1, TOKENS], ids=["tokens are missing", "the whole prompt"])
def test_layers_go_out_while_their_own_step_computes_the_next(writer, target, ready):
    ask_early(writer, target)
    writer.server.pushes.progressed([("p-a", SOURCE, ready)], 1)
    [page] = {tensor.page_tokens for tensor in target.worker.manifest.tensors}
    complete = ready if ready == TOKENS else ready // page * page
    expected, layers = target.before.copy(), [wave for waves in writer.waves for wave in waves]
    assert len(layers) > 1
    for wave in range(max(map(len, writer.waves))):
        computed = {layer for waves in writer.waves for layer in waves[wave : wave + 1] for layer in layer}
        writer.compute(0, TOKENS, computed)
        writer.wait_for_orders()
        assert whole(target.worker.memory, expected), "before its forward is done"
        writer.waves_done(1, wave + 1)
        write(MODEL, D_SIDE, target.worker, [table(*D_BLOCKS)], expected, 0, complete, computed)
        target.until(lambda: whole(target.worker.memory, expected), "what is complete of these layers, and no others")
    writer.step_done(1)
    assert not target.finished
    writer.finish(step=1)
    assert target.wait_for("d") == [True]
    assert whole(target.worker.memory, target.expected(0))
    freed(writer, "a")


def test_a_prompt_that_is_wanted_late_is_paired_once_and_not_for_each_wave(writer, target, monkeypatch):
    """Half a million tokens take milliseconds to be paired."""
    paired = []
    monkeypatch.setattr(link, "pair", lambda edge, *given, **also: (paired.append(edge), pair(edge, *given, **also))[1])
    writer.compute(0, TOKENS)
    writer.step_done(1)
    ask_early(writer, target)
    writer.server.pushes.progressed([("p-a", SOURCE, TOKENS)], 1)
    writer.finish(step=1)
    assert target.wait_for("d") == [True]
    assert whole(target.worker.memory, target.expected(0))
    often = Counter((edge.source, edge.destination) for edge in paired if has_growing(edge))
    assert len(writer.waves[0]) > 1 and often and set(often.values()) == {1}


def test_a_wave_wakes_no_thread_that_looks_at_what_it_writes_anyway(writer, target, monkeypatch):
    """Waking it holds up the thread that launches the forward."""
    ask_early(writer, target)
    writer.server.pushes.progressed([("p-a", SOURCE, TOKENS)], 1)
    until(lambda: all(loop._pushes.waiting for loop in writer.loops), "the order")
    set_faults(writer.transports, held=True)
    writer.compute(0, TOKENS)
    writer.waves_done(1, 1)
    until(lambda: all(writes(loop) and not loop._pushes.waiting for loop in writer.loops), "the first wave")
    pushes = [push for part in writer.pushes() for push in part]
    with monkeypatch.context() as patch:
        for loop in writer.loops:
            patch.setattr(loop._wake, "set", lambda: pytest.fail("the thread was woken"))
        writer.waves_done(1, 2)
        until(lambda: all(push.ahead.waves == 2 for push in pushes), "the second wave")
    set_faults(writer.transports, held=False)
    until(lambda: all(loop._pushes.waiting for loop in writer.loops), "what was written to arrive")
    writer.step_done(1)
    writer.finish(step=1)
    assert target.wait_for("d") == [True]
    assert whole(target.worker.memory, target.expected(0))


def test_layers_that_a_device_computes_later_wake_the_thread_once(writer, target, monkeypatch):
    """From then on it looks by itself whether the first of them is done."""
    ask_early(writer, target)
    writer.server.pushes.progressed([("p-a", SOURCE, TOKENS)], 1)
    until(lambda: all(loop._pushes.waiting for loop in writer.loops), "the order")
    writer.compute(0, TOKENS)
    done = 0
    for loop in writer.loops:
        loop.step_launched(1, lambda: done >= 1, 1)
        assert loop._forwards._ident == threading.get_ident(), "steps are told of in the thread that launches them"
    with monkeypatch.context() as patch:
        for loop in writer.loops:
            patch.setattr(loop._wake, "set", lambda: pytest.fail("the thread was woken"))
            loop.step_launched(1, lambda: done >= 2, 2)
            loop.step_launched(1, lambda: done >= 3)
    pushes = [push for part in writer.pushes() for push in part]
    done = 2
    until(lambda: all(push.ahead.waves == 2 for push in pushes), "two waves")
    done = 3
    writer.finish(step=1)
    assert target.wait_for("d") == [True]
    assert whole(target.worker.memory, target.expected(0))


def test_a_push_that_moves_spares_waking_the_thread_for_others_and_one_that_has_failed_does_not(writer, target):
    for step, name in ((1, "a"), (2, "b")):
        ask_early(writer, target, name, name)
        writer.server.pushes.progressed([(f"p-{name}", SOURCE, TOKENS)], step)
    until(lambda: all(len(loop._pushes._pushes) == 2 and loop._pushes.waiting for loop in writer.loops), "both orders")
    set_faults(writer.transports, held=True)
    writer.compute(0, TOKENS)
    writer.waves_done(1, 1)
    until(lambda: not any(loop._pushes.waiting for loop in writer.loops), "the first layers to be on their way")
    writer.server.pushes.failed("p-a", "for the test")
    until(lambda: all(loop._pushes.waiting for loop in writer.loops), "b alone, which nobody looks at soon")
    set_faults(writer.transports, held=False)
    writer.step_done(2)
    writer.finish("b", step=2)
    assert target.wait_for("b") == [True]


@pytest.mark.parametrize("known", ["when it is scheduled", "while it is computed"])
def test_who_asks_in_the_midst_of_a_step_gets_at_once_what_is_computed_and_the_rest_in_its_course(
    writer, target, known
):
    """Both legs of a request are sent at once: the only step of the prefill has begun when decode asks, and may be
    half done."""
    writer.begin()
    writer.server.pushes.progressed([("p-a", SOURCE, TOKENS)], 1)
    expected, layers = target.before.copy(), [layer for waves in writer.waves for wave in waves for layer in wave]
    first = {layer for waves in writer.waves for layer in waves[0]}
    assert 0 < len(first) < len(layers)
    if known == "when it is scheduled":
        target.loop.submit([target.request(writer, start=0)], [])
    writer.compute(0, TOKENS, first)
    writer.waves_done(1, 1)
    if known == "while it is computed":
        target.loop.submit([target.request(writer, start=0)], [])
    write(MODEL, D_SIDE, target.worker, [table(*D_BLOCKS)], expected, 0, TOKENS, first)
    target.until(lambda: whole(target.worker.memory, expected), "these layers, and no others")
    writer.compute(0, TOKENS)
    writer.step_done(1)
    write(MODEL, D_SIDE, target.worker, [table(*D_BLOCKS)], expected, 0, TOKENS)
    target.until(lambda: whole(target.worker.memory, expected), "the other layers, while vLLM ends the step")
    assert not target.finished, "the prefill has not ended"
    writer.finish(step=1)
    assert target.wait_for("d") == [True]
    assert whole(target.worker.memory, target.expected(0))
    freed(writer, "a")


def began(pushes: list[ActivePush]) -> bool:
    return bool(pushes) and all(push.cursor for push in pushes)


@pytest.mark.parametrize("before", [False, True], ids=["as none does", "as steps of one token do"])
def test_a_step_that_announces_no_layers_is_written_when_it_has_ended(writer, target, caplog, monkeypatch, before):
    monkeypatch.setattr(waves, "_SAID", threading.Lock())
    if before:
        writer.waves_done(1, 1)
    for name in ("a", "b"):
        ask_early(writer, target, name, name)
        writer.compute(0, 6)
        step = 1 if name == "a" else 3
        writer.server.pushes.progressed([(f"p-{name}", (BlockTable.of(0, P_BLOCKS[:2]),), 6)], step)
        writer.step_done(step)
        # Else the end of the prefill may come first, and all of it is written at once.
        until(lambda: all(map(began, writer.pushes())), "the step to be written")
        writer.compute(6, TOKENS)
        writer.finish(name, step=step + 1)
        writer.step_done(step + 1)
        assert target.wait_for(name) == [True]
        assert whole(target.worker.memory, target.expected(0))
    assert caplog.text.count("announced no layers") == (0 if before else 1), "once, where no step ever announces any"

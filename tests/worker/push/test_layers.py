"""Pushes that are written layer by layer, between workers: what goes out when, and what is said where nothing does."""

from __future__ import annotations

import msgspec
import pytest

from tests.support.geometry.world import table, write
from tests.support.worker.decode_instance import D_BLOCKS, D_SIDE, until
from tests.support.worker.prefill_instance import MODEL, P_BLOCKS, TOKENS
from tests.support.worker.writer import CONFIG, SOURCE, TINY, freed, whole
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.worker.push.waves import say_that_a_step_announced_none


@pytest.fixture(params=[0, TINY], ids=["direct", "by way of the slab"])
def config(request: pytest.FixtureRequest) -> Config:
    return msgspec.structs.replace(CONFIG, staging_bytes=request.param, push_when="layers")


def test_layers_go_out_while_their_own_step_computes_the_next(writer, target):
    target.loop.submit([target.request(writer, start=0)], [])
    writer.begin()
    until(lambda: writer.server.pushes.wanted(["p-a"]), "the registration")
    writer.server.pushes.progressed([("p-a", SOURCE, TOKENS)], 1)
    [page] = {tensor.page_tokens for tensor in target.worker.manifest.tensors}
    complete = TOKENS // page * page
    expected, layers = target.before.copy(), [wave for waves in writer.waves for wave in waves]
    assert len(layers) > 1
    for wave in range(max(map(len, writer.waves))):
        computed = {layer for waves in writer.waves for layer in waves[wave : wave + 1] for layer in layer}
        writer.compute(0, TOKENS, computed)
        assert whole(target.worker.memory, expected), "before its forward is done"
        writer.waves_done(1, wave + 1)
        write(MODEL, D_SIDE, target.worker, [table(*D_BLOCKS)], expected, 0, complete, computed)
        target.until(lambda: whole(target.worker.memory, expected), "whole pages of these layers, and no others")
    writer.step_done(1)
    assert not target.finished
    writer.finish(step=1)
    assert target.wait_for("d") == [True]
    assert whole(target.worker.memory, target.expected(0))
    freed(writer, "a")


def test_a_step_that_announces_no_layers_is_written_when_it_has_ended(writer, target, caplog):
    say_that_a_step_announced_none.cache_clear()
    for name in ("a", "b"):
        target.loop.submit([target.request(writer, name, name=name, start=0)], [])
        writer.begin(name)
        until(lambda name=name: writer.server.pushes.wanted([f"p-{name}"]), "the registration")
        writer.compute(0, 6)
        step = 1 if name == "a" else 3
        writer.server.pushes.progressed([(f"p-{name}", (BlockTable.of(0, P_BLOCKS[:2]),), 6)], step)
        writer.step_done(step)
        writer.compute(6, TOKENS)
        writer.finish(name, step=step + 1)
        writer.step_done(step + 1)
        assert target.wait_for(name) == [True]
        assert whole(target.worker.memory, target.expected(0))
    assert caplog.text.count("announced no layers") == 1, "once"

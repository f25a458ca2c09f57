"""A record is moved again: every pair of layouts and sizes comes right, and what is wrong is found."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from tests.support.effort import examples
from tests.support.geometry.moves import moves, windows
from tests.support.geometry.request import Move, make_move
from tests.support.geometry.world import Model, Side
from tests.support.records import records
from vllm_pd_connector.cli.output import CommandError
from vllm_pd_connector.cli.trace.replay import MAX_TOUCHED, replay
from vllm_pd_connector.errors import PDConnectorError
from vllm_pd_connector.geometry import spans
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.explain import explain_request
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.observability.record import Record

GQA, MLA, HYBRID = Model(layers=3, heads=8, key=16, value=16), Model(3, 0, 24), Model(3, 4, 20, 20, states=2)
PAIRS = {
    "equal": (GQA, Side(), Side()),
    "two ranks to three": (Model(3, 6), Side(tp=2, layout="HND"), Side(tp=3, layout="NHD")),
    "fewer heads than ranks": (Model(3, 2), Side(tp=4, pp=2), Side(tp=2, layout="HND", block_tokens=6)),
    "other blocks": (GQA, Side(layout="HND", block_tokens=6), Side(layout="NHD", block_tokens=16)),
    "transposed K": (Model(3, 4, 2, 2), Side(layout="CPU", block_tokens=16), Side(layout="LHBNC")),
    "MLA": (MLA, Side(tp=2, block_tokens=6), Side(tp=4, block_tokens=4)),
    "hybrid": (HYBRID, Side(tp=2, layout="BLHNC", conv="SD"), Side(tp=1, block_tokens=6)),
    "context parallel": (Model(2, 0, 8), Side(tp=2, dcp=2, block_tokens=8), Side(block_tokens=6)),
}


def move(pair: str, stop: int = 37) -> Move:
    model, source, destination = PAIRS[pair]
    return make_move(model, source, destination, 0, stop)


@pytest.mark.parametrize("chunk_bytes", [0, 1 << 12], ids=["direct", "staged"])
@pytest.mark.parametrize("way", ["pull", "push"])
@pytest.mark.parametrize("pair", PAIRS)
def test_every_element_comes_where_it_belongs(pair: str, way: str, chunk_bytes: int) -> None:
    for record in records(move(pair), way=way, chunk_bytes=chunk_bytes):
        found = replay(record)
        assert found.wrong == () and found.moved.bytes > 0
        explained = explain_request(
            record.sources, record.destination, record.source_blocks, record.blocks, range(0, 37), chunk_bytes,
            push=way == "push",
        )  # fmt: skip
        assert found.moved.bytes == sum(m.read_bytes for m in explained.movements)


@settings(max_examples=examples(45), deadline=None)
@given(moves() | windows())
def test_any_move_comes_right(any_move: Move) -> None:
    for record in records(any_move):
        assert replay(record).wrong == ()


def test_blocks_that_only_the_prefill_side_knows_are_made_up() -> None:
    [record] = records(move("other blocks"), way="push", source_blocks=None)
    assert replay(record).wrong == ()


def wrong(pair: str, **changes: Any) -> tuple[str, ...]:
    return replay(records(move(pair), **changes)[0]).wrong


def test_a_run_that_goes_astray_is_found_with_its_layer_and_token(monkeypatch: pytest.MonkeyPatch) -> None:
    concatenate = spans.concatenate

    def shifted(parts: Any) -> Runs:
        runs = concatenate(parts)
        return Runs(runs.source, runs.destination, np.where(np.arange(len(runs)) == 1, 2, runs.length))

    monkeypatch.setattr(spans, "concatenate", shifted)
    line, *_ = wrong("equal", chunk_bytes=0)
    assert "layers." in line and "tokens are wrong, the first is " in line


def test_a_write_beside_the_requests_blocks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    concatenate = spans.concatenate

    def longer(parts: Any) -> Runs:
        runs = concatenate(parts)
        return Runs(runs.source, runs.destination, runs.length + (np.arange(len(runs)) == 0) * 64)

    monkeypatch.setattr(spans, "concatenate", longer)
    [record] = records(make_move(GQA, Side(), Side(), 0, 4), chunk_bytes=0)
    assert any("which is not the request's, was written into" in line for line in replay(record).wrong)


def test_copies_that_are_not_made_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_pd_connector.worker.staging.copiers.CpuCopier.copy", lambda *_, **__: None)
    assert "37 of 37 tokens are wrong, the first is 0" in wrong("other blocks", chunk_bytes=1 << 12)[0]


def test_a_token_without_a_block_on_the_prefill_side_is_refused_as_it_was() -> None:
    short = move("equal")
    tables = (BlockTable.of(0, short.source_tables[0].ids[:-1].tolist()),)
    with pytest.raises(PDConnectorError, match="source group 0"):
        replay(records(short, source_blocks=tables)[0])


def test_what_would_be_refused_by_a_worker_is_refused() -> None:
    [record] = records(move("equal"))
    other = msgspec.structs.replace(
        record.destination, model=msgspec.structs.replace(record.destination.model, dtype="float16")
    )
    with pytest.raises(CommandError, match=r"refused as it is recorded.*dtype"):
        replay(msgspec.structs.replace(record, destination=other))
    weights = msgspec.structs.replace(
        record.destination, model=msgspec.structs.replace(record.destination.model, weights="others")
    )
    changed = msgspec.structs.replace(record, destination=weights)
    with pytest.raises(CommandError, match="weights"):
        replay(changed)
    assert replay(msgspec.structs.replace(changed, same_weights=True)).wrong == ()


def large(record: Record, num_blocks: int) -> Record:
    """The same in caches of so many blocks."""

    def grown(manifest: Any) -> Any:
        [group], [segment] = manifest.groups, manifest.segments
        tensors = tuple(msgspec.structs.replace(t, pages=num_blocks) for t in manifest.tensors)
        last = tensors[-1].offset + num_blocks * tensors[-1].page_stride
        return msgspec.structs.replace(
            manifest,
            groups=(msgspec.structs.replace(group, num_blocks=num_blocks),),
            segments=(Segment(segment.address, last, "cuda", 0),),
            tensors=tensors,
        )

    return msgspec.structs.replace(
        record, destination=grown(record.destination), sources=tuple(map(grown, record.sources))
    )


def test_caches_of_a_gpu_take_no_more_memory_than_is_touched() -> None:
    nhd, hnd = Side(layout="BLNHC"), Side(layout="BLHNC")
    record = large(records(make_move(Model(layers=1, heads=8, key=128, value=128), nhd, hnd, 0, 30))[0], 1 << 21)
    assert record.destination.segments[0].length > 32 << 30
    assert replay(record).wrong == ()


def test_a_strangers_record_cannot_ask_for_more_than_there_may_be() -> None:
    side = Side(layout="BLNHC")
    [record] = records(make_move(Model(layers=3, heads=8, key=128, value=128), side, side, 0, 30))
    with pytest.raises(CommandError, match="chunk_bytes"):
        replay(msgspec.structs.replace(record, chunk_bytes=MAX_TOUCHED + 1))
    with pytest.raises(CommandError, match="3 block tables for 1 groups"):
        replay(msgspec.structs.replace(record, blocks=record.blocks * 3))
    with pytest.raises(CommandError, match="no address space"):
        replay(large(record, 1 << 45))
    blocks = (BlockTable.of(0, range(1, 131073)),)
    with pytest.raises(CommandError, match=f"at most {MAX_TOUCHED} are moved"):
        replay(msgspec.structs.replace(large(record, 1 << 18), blocks=blocks, source_blocks=blocks))

"""A worker records a receive that was marked: good ones and failed ones, read and written, and what replay makes of
them."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from tests.support.worker.decode_instance import D_BLOCKS, START, Decode, Prefill, changed_model, request_of
from tests.support.worker.prefill_instance import P_BLOCKS, TOKENS
from tests.support.worker.writer import CONFIG, Target, Writer
from vllm_pd_connector.cli.trace.replay import replay
from vllm_pd_connector.config import Config
from vllm_pd_connector.metadata import ReceiveRequest, RecordInto
from vllm_pd_connector.observability.record import read


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace-a.jsonl"


@pytest.fixture
def decode(tmp_path: Path) -> Iterator[Decode]:
    made = Decode(Config(transport="loopback", trace_dir=str(tmp_path), handshake_timeout=10.0))
    yield made
    made.loop.close()


def marked(request: ReceiveRequest, path: Path, *, failures: bool = False) -> ReceiveRequest:
    return replace(request, record=RecordInto(str(path), failures))


def test_a_good_receive_is_recorded_and_moves_the_same_again(decode: Decode, path: Path) -> None:
    with contextlib.closing(Prefill()) as prefill:
        assert decode.received(marked(prefill.request("a"), path)) == [True]
        port = prefill.server.port
    [record] = read(path)
    assert (record.ok, record.reason, record.kind, record.way) == (True, "", "", "pull")
    assert (record.request, record.prefill, record.peer) == ("a", "p-a", f"127.0.0.1:{port}")
    assert (record.start, record.stop, record.blocks[0].ids.tolist()) == (START, TOKENS, list(D_BLOCKS[1:]))
    assert record.source_blocks is not None and record.source_blocks[0].ids.tolist() == list(P_BLOCKS)
    assert {stage.name for stage in record.stages} == {"handshake", "queue", "transfer", "confirm"}
    assert all(0 <= stage.began <= stage.ended <= record.seconds for stage in record.stages)
    assert (record.moved.bytes, record.moved.runs) == (decode.bytes, decode.runs)
    again = replay(record)
    assert again.wrong == () and again.moved == record.moved


def test_nothing_that_is_not_to_be_handed_on_is_in_the_file(decode: Decode, path: Path) -> None:
    with contextlib.closing(Prefill()) as prefill:
        request = marked(prefill.request("a"), path)
        assert decode.received(request) == [True] and request.lease is not None
    content = path.read_bytes()
    [record] = read(path)
    for manifest in (record.destination, *record.sources):
        assert (manifest.endpoint, manifest.scratch, manifest.life) == (b"", None, None)
    for secret in (request.lease.nonce, request.attempt):
        assert secret.hex().encode() not in content and msgspec.json.encode(secret)[1:-1] not in content
    for transport in prefill.transports:
        assert transport._name.encode() not in content
    for life in prefill.lives:
        assert life.own.name.encode() not in content


def test_an_unmarked_receive_is_not_recorded(decode: Decode, path: Path) -> None:
    with contextlib.closing(Prefill()) as prefill:
        assert decode.received(prefill.request("a")) == [True]
        assert decode.received(marked(prefill.request("b"), path, failures=True)) == [True]
    assert not path.exists()


def test_a_lost_lease_is_recorded_with_its_reason(decode: Decode, path: Path) -> None:
    with contextlib.closing(Prefill()) as prefill:
        assert decode.received(marked(prefill.request("a", hold=False), path, failures=True)) == [False]
    [record] = read(path)
    assert not record.ok and record.kind == "lease_lost" and "no longer vouches" in record.reason
    assert replay(record).wrong == (), "the plan was right"


def test_a_push_is_recorded_as_one(tmp_path: Path, path: Path) -> None:
    config = msgspec.structs.replace(CONFIG, trace_dir=str(tmp_path))
    with contextlib.closing(Writer(CONFIG)) as writer, contextlib.closing(Target(config)) as target:
        writer.whole()
        assert target.received(marked(target.request(writer), path)) == [True]
        moved = target.bytes, target.runs
    [record] = read(path)
    assert (record.ok, record.way, record.source_blocks) == (True, "push", None)
    assert (record.moved.bytes, record.moved.runs) == moved
    assert replay(record).wrong == ()


def test_a_refused_pair_is_recorded_with_the_manifests_that_differ(decode: Decode, path: Path) -> None:
    with contextlib.closing(Prefill(model=changed_model(dtype="float16"))) as prefill:
        assert decode.received(marked(prefill.request("a"), path)) == [False]
    [record] = read(path)
    assert record.kind == "incompatible_peer" and "dtype" in record.reason
    assert {manifest.model.dtype for manifest in record.sources} == {"float16"}


def test_a_peer_that_was_never_heard_is_recorded_without_manifests(decode: Decode, path: Path) -> None:
    with contextlib.closing(Prefill()) as prefill:
        remote = prefill.hand_over("a")
    assert decode.received(marked(request_of("a", remote), path)) == [False]
    [record] = read(path)
    assert record.sources == () and record.kind == "peer_unreachable" and not record.stages


def test_a_disk_that_is_full_costs_a_line_and_not_the_request(
    decode: Decode, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    with contextlib.closing(Prefill()) as prefill, caplog.at_level(logging.ERROR):
        assert decode.received(marked(prefill.request("a"), tmp_path / "file" / "trace-a.jsonl")) == [True]
    [line] = [one.getMessage() for one in caplog.records if "cannot be recorded" in one.getMessage()]
    assert line.startswith("request a: its receive cannot be recorded: ") and "file" in line


def test_manifests_are_kept_only_where_receives_may_be_recorded(decode: Decode) -> None:
    plain = Decode(Config(transport="loopback"))
    with contextlib.closing(plain.loop), contextlib.closing(Prefill()) as prefill:
        assert plain.received(prefill.request("a")) == decode.received(prefill.request("b")) == [True]
        kept = [[len(link.met) for link in one.loop._receives._links._links.values()] for one in (plain, decode)]
    assert kept == [[0], [2]]

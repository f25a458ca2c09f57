"""Records and orders as files: private, bounded, whole, and nothing in them that is not to be handed on."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import msgspec
import pytest

from tests.support.geometry.request import make_move
from tests.support.geometry.world import Model, Side
from tests.support.records import records
from vllm_pd_connector.geometry.manifest import LivenessAddress, Segment
from vllm_pd_connector.observability import record as record_module
from vllm_pd_connector.observability.record import (
    MAX_FILES,
    ORDER,
    Order,
    Unreadable,
    append,
    file_of,
    place_order,
    read,
    shareable,
    take_order,
)

BOTH = records(make_move(Model(), Side(tp=2), Side(tp=2), 0, 10))


def test_the_workers_of_a_request_share_one_private_file(tmp_path: Path) -> None:
    path = tmp_path / "made" / "trace-a.jsonl"
    for record in BOTH:
        append(path, record)
    assert read(path) == BOTH
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_nothing_that_opens_memory_or_finds_a_process_is_in_it() -> None:
    [manifest, _] = (record.destination for record in BOTH)
    told = msgspec.structs.replace(
        manifest, endpoint=b"a key", scratch=Segment(1, 2, "cpu", 0), life=LivenessAddress("10.0.0.1", 7, "a word")
    )
    assert shareable(told) == manifest and (manifest.endpoint, manifest.scratch, manifest.life) == (b"", None, None)


def test_a_clients_request_id_does_not_choose_the_file(tmp_path: Path) -> None:
    for name in ("../../etc/passwd", "-x", "a\0b", "ü" * 500, ""):
        path = file_of(tmp_path, name, "0a1b")
        assert path.parent == tmp_path and path.name.startswith("trace-") and len(path.name) < 120
        append(path, BOTH[0])


def test_a_link_in_the_place_of_a_file_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "trace-a.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic"):
        append(tmp_path / "trace-a.jsonl", BOTH[0])
    assert not (tmp_path / "elsewhere").exists()


def test_a_directory_takes_so_many_files_and_each_all_of_its_ranks(tmp_path: Path) -> None:
    for i in range(MAX_FILES):
        append(tmp_path / f"trace-{i}.jsonl", BOTH[0])
    with pytest.raises(Unreadable, match="64 files"):
        append(tmp_path / "trace-more.jsonl", BOTH[0])
    append(tmp_path / "trace-0.jsonl", BOTH[1])
    assert len(read(tmp_path / "trace-0.jsonl")) == 2


def test_a_disk_that_takes_a_part_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record_module.os, "write", lambda _, line: len(line) - 1)
    with pytest.raises(OSError, match="is the disk full"):
        append(tmp_path / "trace-a.jsonl", BOTH[0])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b"", "no record in it"),
        (b"not json", "no record of a receive"),
        (b'{"version": 2, "more": []}', "version 2; this release reads version 1"),
        (b'{"version": 1}', "missing required field"),
        (b"[" * 100_000, "no record of a receive"),
        (b"\xff\xfe", "no record of a receive"),
    ],
)
def test_what_is_no_record_is_refused_with_its_line(tmp_path: Path, line: bytes, said: str) -> None:
    path = tmp_path / "x"
    path.write_bytes(line)
    with pytest.raises(Unreadable, match=said):
        read(path)


@pytest.mark.parametrize(
    ("field", "value"),
    [("start", -1), ("stop", 1 << 25), ("way", "sideways"), ("extra", 1), ("run_cost", 0), ("blocks", [{"ids": "A"}]),
     ("at", 1e300), ("destination", {})],
)  # fmt: skip
def test_a_field_out_of_bounds_is_refused(tmp_path: Path, field: str, value: object) -> None:
    path = tmp_path / "x"
    path.write_text(json.dumps(json.loads(msgspec.json.encode(BOTH[0])) | {field: value}))
    with pytest.raises(Unreadable, match="line 1: no record of a receive"):
        read(path)


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unreadable, match="No such file"):
        read(tmp_path / "absent")
    monkeypatch.setattr(record_module, "MAX_FILE_BYTES", 10)
    append(tmp_path / "trace-a.jsonl", BOTH[0])
    with pytest.raises(Unreadable, match="more than 10 bytes"):
        read(tmp_path / "trace-a.jsonl")


def test_an_order_is_taken_once(tmp_path: Path) -> None:
    assert take_order(tmp_path) is None
    place_order(tmp_path, Order(requests=9))
    place_order(tmp_path, Order(requests=3, failures=True))
    assert take_order(tmp_path) == Order(requests=3, failures=True)
    assert take_order(tmp_path) is None and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"{}x", b'{"version": 2}', b'{"requests": 0}', b'{"requests": 1e9}'])
def test_an_order_that_is_none_is_thrown_away(tmp_path: Path, content: bytes) -> None:
    (tmp_path / ORDER).write_bytes(content)
    with pytest.raises(Unreadable, match="vllm-pd trace next"):
        take_order(tmp_path)
    assert take_order(tmp_path) is None


def test_an_order_can_be_read_by_an_instance_of_another_user(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        path = place_order(tmp_path, Order(requests=9))
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644

"""`vllm-pd trace`: words, text, JSON and exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.geometry.request import make_move
from tests.support.geometry.world import Model, Side
from tests.support.records import records
from vllm_pd_connector.cli import main
from vllm_pd_connector.cli.output import Exit
from vllm_pd_connector.cli.trace.replay import replay
from vllm_pd_connector.observability.record import Moved, Order, Record, append, take_order

GQA = make_move(Model(layers=3, heads=8), Side(tp=2, layout="HND"), Side(tp=2, block_tokens=6), 0, 37)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "trace-a.jsonl"


def write(path: Path, *written: Record) -> list[str]:
    for record in written:
        append(path, record)
    return [str(path)]


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    code = main(["trace", *words, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["schema"], found["command"]) == (1, "trace")
    return code, found


def test_an_order_is_placed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "next", str(tmp_path)]) == Exit.OK
    assert "order.json: of the next 1 requests each is recorded" in capsys.readouterr().out
    assert take_order(tmp_path) == Order()
    code, found = ask(capsys, "next", str(tmp_path), "--requests", "500", "--failures")
    assert (code, found["requests"], found["failures"]) == (Exit.OK, 500, True)
    assert take_order(tmp_path) == Order(requests=500, failures=True)


@pytest.mark.parametrize("words", [["next", "/nowhere"], ["show", "/nowhere"], ["replay", "/nowhere"]])
def test_what_is_not_there_is_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *words]) == Exit.UNREADABLE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-pd trace: /nowhere: ") and "No such file" in line
    code, found = ask(capsys, *words)
    assert (code, found["error"]["kind"]) == (Exit.UNREADABLE, "unreadable")


@pytest.mark.parametrize("words", [[], ["shw"], ["next"], ["next", ".", "--requests", "0"]])
def test_wrong_words_are_one_line(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *words]) == Exit.USAGE
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-pd trace: ")


def test_a_record_is_shown_with_its_stages_blocks_and_plan(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "show", *write(path, *records(GQA))]) == Exit.OK
    said = capsys.readouterr().out
    for words in (
        "request cmpl-7, decode pp0 tp1: done after 0.500 s, 2027-01-15 08:00:00 UTC",
        "prefill cmpl-7-prefill at 10.0.0.7:5600, read by decode, waited 0.250 s before",
        "tokens [0, 37), 640 bytes in 4 runs moved",
        "queue: 0.000 to 0.125 s",
        "decode group 0: 7 blocks from logical block 0 on: ",
        "verdict: allow_heterogeneous",
        "A request of 37 tokens from and into the blocks above, pulled by decode:",
        "pp0 tp1  pp0 tp1",
    ):
        assert words in said


def test_what_is_shown_as_json_has_no_manifests(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = ask(capsys, "show", *write(path, *records(GQA, source_blocks=None, way="push")))
    assert code == Exit.OK and [one["rank"] for one in found["records"]] == ["pp0 tp0", "pp0 tp1"]
    [first, _] = found["records"]
    assert first["blocks"] == [{"first": 0, "ids": GQA.destination_tables[0].ids.tolist()}]
    assert first["source_blocks"] is None and first["plan"]["mode"] == "push" and first["plan"]["movements"]
    assert not {"destination", "sources"} & first.keys()


def test_a_failure_is_shown_with_its_reason(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reason = "deadline: reading took longer than 60 s"
    failed = records(GQA, ok=False, reason=reason, kind="deadline", quarantined=True, sources=())
    assert main(["trace", "show", *write(path, failed[0])]) == Exit.OK
    said = capsys.readouterr().out
    assert "failed after 0.500 s (deadline)" in said and f"  {reason}; blocks were left in quarantine" in said
    assert "verdict: invalid_remote" in said, "nothing is known of the prefill side"


def test_replay_says_what_came_right(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = write(path, *records(GQA))
    assert main(["trace", "replay", *words]) == Exit.OK
    said = capsys.readouterr().out
    assert (
        said.count("every element came where it belongs") == 2
        and "recorded: 640 bytes in 4 runs: this release plans it otherwise" in said
    )
    code, found = ask(capsys, "replay", *words)
    assert code == Exit.OK and found["good"] and [one["wrong"] for one in found["replays"]] == [[], []]
    assert found["replays"][0]["moved"]["bytes"] > 0


def test_replay_of_what_moved_as_it_does_now_says_no_more(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [first, _] = records(GQA)
    again = replay(first).moved
    assert main(["trace", "replay", *write(path, msgspec.structs.replace(first, moved=again))]) == Exit.OK
    assert f"recorded: {again.bytes} bytes in {again.runs} runs\n" in capsys.readouterr().out


def test_replay_of_a_failure_says_that_the_plan_was_right(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    failed = records(GQA, ok=False, reason="the lease ended", kind="lease_lost", moved=Moved())[0]
    assert main(["trace", "replay", *write(path, failed)]) == Exit.OK
    said = capsys.readouterr().out
    assert "it failed: the lease ended" in said and "what failed was not the plan" in said


def test_what_is_wrong_ends_with_1(
    path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_pd_connector.worker.staging.copiers.CpuCopier.copy", lambda *_, **__: None)
    words = write(path, *records(GQA, chunk_bytes=1 << 12))
    assert main(["trace", "replay", *words]) == Exit.REFUSED
    assert "  wrong: layers.0.attn key: 37 of 37 tokens are wrong" in capsys.readouterr().out
    code, found = ask(capsys, "replay", *words)
    assert code == Exit.REFUSED and not found["good"] and found["replays"][0]["wrong"]


def test_what_cannot_be_replayed_ends_with_1_and_says_why(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [first, other] = records(GQA)
    model = msgspec.structs.replace(other.destination.model, dtype="float16")
    refused = msgspec.structs.replace(other, destination=msgspec.structs.replace(other.destination, model=model))
    words = write(path, msgspec.structs.replace(first, sources=()), refused)
    assert main(["trace", "replay", *words]) == Exit.REFUSED
    said = capsys.readouterr().out
    assert "not replayed: the record has no manifests of the prefill side" in said
    assert "not replayed: the pair is refused as it is recorded: deny" in said and "dtype" in said


def test_a_strangers_words_do_not_reach_the_terminal_as_commands(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\r\u202e"
    named = records(GQA, request=hostile, prefill=hostile, peer=hostile, ok=False, reason=hostile, kind=hostile)[0]
    for command in ("show", "replay"):
        main(["trace", command, *write(path, named)])
        said = capsys.readouterr().out
        assert "\\x1b]0;owned\\x07" in said and not {"\x1b", "\x07", "\r", "\u202e"} & set(said)

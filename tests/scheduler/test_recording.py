"""Which requests the scheduler half has recorded: those that come after an order, and no others."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from tests.support.scheduler.halves import EMPTY_STEP, TOKEN, allocate, hand_over, make_half, make_request
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.metadata import BadParameters, ReadFrom, ReceiveRequest, RecordInto
from vllm_pd_connector.observability.record import ORDER, Order, place_order
from vllm_pd_connector.protocol.peer import PeerKey
from vllm_pd_connector.protocol.wire.fields import LeaseRef
from vllm_pd_connector.scheduler.recording import Recording

SOURCE = ReadFrom(PeerKey("h", 1, ""), "p-0", LeaseRef("p", bytes(16)), ())


def mark_of(recording: Recording, name: str) -> RecordInto | None:
    [marked] = recording.marked([ReceiveRequest(name, SOURCE, (), 0, 1)])
    return marked.record


def test_without_a_directory_nothing_is_recorded() -> None:
    assert mark_of(Recording(None), "a") is None


def test_the_requests_after_an_order_are_recorded_each_into_a_file_of_its_own(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path / "made"))
    assert mark_of(recording, "a") is None
    place_order(tmp_path / "made", Order(requests=2))
    marks = [mark_of(recording, "b"), mark_of(recording, "b"), mark_of(recording, "c")]
    assert marks[0] is not None and marks[1] is not None and marks[2] is None
    assert marks[0].path != marks[1].path and Path(marks[0].path).parent == tmp_path / "made"
    place_order(tmp_path / "made", Order(failures=True))
    mark = mark_of(recording, "d")
    assert mark is not None and mark.failures and not marks[0].failures


def test_the_latest_order_holds_also_while_one_is_carried_out(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path))
    place_order(tmp_path, Order(requests=10_000, failures=True))
    first = mark_of(recording, "a")
    assert first is not None and first.failures
    place_order(tmp_path, Order(requests=1))
    marks = [mark_of(recording, "b"), mark_of(recording, "c")]
    assert marks[0] is not None and not marks[0].failures and marks[1] is None
    assert not (tmp_path / ORDER).exists()


def test_what_cannot_be_taken_while_an_order_is_carried_out_ends_that(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recording = Recording(str(tmp_path))
    place_order(tmp_path, Order(requests=10))
    assert mark_of(recording, "a") is not None
    (tmp_path / ORDER).mkdir()
    with caplog.at_level(logging.ERROR, logger="vllm_pd_connector"):
        assert mark_of(recording, "b") is None and mark_of(recording, "c") is None
    assert len([one for one in caplog.records if one.levelno == logging.ERROR]) == 1


def test_refused_parameters_do_not_count(tmp_path: Path) -> None:
    recording = Recording(str(tmp_path))
    place_order(tmp_path, Order())
    refused = ReceiveRequest("a", BadParameters("remote_port"), (), 0, 1)
    assert recording.marked([refused]) == [refused]
    assert mark_of(recording, "b") is not None


def test_of_two_engines_one_takes_the_order(tmp_path: Path) -> None:
    one, other = Recording(str(tmp_path)), Recording(str(tmp_path))
    place_order(tmp_path, Order())
    assert mark_of(one, "a") is not None and mark_of(other, "b") is None


def test_nonsense_is_told_once_and_the_next_order_counts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording(str(tmp_path))
    (tmp_path / ORDER).write_text("nonsense")
    with caplog.at_level(logging.ERROR, logger="vllm_pd_connector"):
        assert mark_of(recording, "a") is None and mark_of(recording, "b") is None
    assert len(caplog.records) == 1 and "vllm-pd trace next" in caplog.text
    place_order(tmp_path, Order())
    assert mark_of(recording, "c") is not None


def test_what_cannot_be_taken_is_told_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    recording = Recording(str(tmp_path))
    (tmp_path / ORDER).mkdir()
    with caplog.at_level(logging.ERROR, logger="vllm_pd_connector"):
        assert mark_of(recording, "a") is None and mark_of(recording, "b") is None
    assert len(caplog.records) == 1 and "until this engine starts again" in caplog.text


def test_a_directory_that_others_write_into_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(InvalidConfig, match="chmod 700"):
        Recording(str(tmp_path))


def test_the_workers_of_a_decode_instance_are_told_of_an_order(tmp_path: Path) -> None:
    producer, _ = make_half("kv_producer")
    producer.serve([b"manifest"], [TOKEN])
    consumer, pool = make_half("kv_consumer", trace_dir=str(tmp_path))
    told = []
    for name in ("d-1", "d-2", "d-3"):
        if name == "d-2":
            place_order(tmp_path, Order())
        request = make_request(name, hand_over(producer, f"p-{name}"))
        consumer.consumer.add(request)
        allocate(consumer, pool, request)
        [receive] = consumer.build_metadata(EMPTY_STEP).receives
        told.append(receive.record)
    assert told[0] is None and told[2] is None
    assert told[1] is not None and Path(told[1].path).name.startswith("trace-d-2-")

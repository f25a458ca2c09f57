"""The comparison of digests finds what it is there to find."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.servers import digests

TOKENS = 40
KEYS = ("layer.0|key|0", "layer.0|key|1", "layer.0|value|0")


def write(directory: Path, name: str, arrays: dict[str, np.ndarray], start: int, remote: str | None = None) -> None:
    extra = {} if remote is None else {"remote_request_id": np.array(remote)}
    np.savez(directory / name, start=np.array(start), stop=np.array(TOKENS), **extra, **arrays)


def tensors(start: int = 0) -> dict[str, np.ndarray]:
    arrays = {key: np.arange(TOKENS, dtype=np.uint64) + 1 + 1000 * index for index, key in enumerate(KEYS)}
    for values in arrays.values():
        values[:start] = 0
    return arrays


@pytest.fixture
def sent(tmp_path: Path) -> Path:
    """Two prefill workers, each with one of the key heads, both with the value head."""
    everything = tensors()
    write(tmp_path, "sent-cmpl-a-0-1f-tp0-pp0.npz", {key: everything[key] for key in KEYS[::2]}, 0)
    write(tmp_path, "sent-cmpl-a-0-1f-tp1-pp0.npz", {key: everything[key] for key in KEYS[1:]}, 0)
    return tmp_path


def found(directory: Path, window: int | None = None) -> list[str]:
    return digests.differences(digests.load(directory), lambda layer: window)


def test_equal_elements_from_several_workers_are_no_difference(sent: Path) -> None:
    write(sent, "received-cmpl-b-0-2e-tp0-pp0.npz", tensors(), 0, "cmpl-a-0-1f")
    assert found(sent) == []


def test_only_the_received_range_is_compared(sent: Path) -> None:
    write(sent, "received-cmpl-b-0-2e-tp0-pp0.npz", tensors(start=16), 16, "cmpl-a-0-1f")
    assert found(sent) == []


@pytest.mark.parametrize("position", [16, 20, TOKENS - 1])
def test_one_wrong_element_is_found_and_named(sent: Path, position: int) -> None:
    arrays = tensors(start=16)
    arrays[KEYS[1]][position] += 1
    write(sent, "received-cmpl-b-0-2e-tp0-pp0.npz", arrays, 16, "cmpl-a-0-1f")
    [line] = found(sent)
    assert KEYS[1] in line
    assert f"first at {position}" in line


def test_every_replica_on_the_prefill_side_must_agree(sent: Path) -> None:
    everything = tensors()
    everything[KEYS[2]][5] += 1
    write(sent, "sent-cmpl-a-0-1f-tp1-pp0.npz", {key: everything[key] for key in KEYS[1:]}, 0)
    write(sent, "received-cmpl-b-0-2e-tp0-pp0.npz", tensors(), 0, "cmpl-a-0-1f")
    [line] = found(sent)
    assert KEYS[2] in line
    assert "first at 5" in line


def test_fewer_positions_on_the_prefill_side_are_a_difference(sent: Path) -> None:
    short = {key: values[:30] for key, values in tensors().items()}
    write(sent, "sent-cmpl-c-0-3d-tp0-pp0.npz", short, 0)
    write(sent, "received-cmpl-b-0-2e-tp0-pp0.npz", tensors(), 0, "cmpl-c-0-3d")
    assert len(found(sent)) == len(KEYS)


def test_a_received_tensor_that_nobody_sent_is_a_difference(sent: Path) -> None:
    write(sent, "received-cmpl-b-0-2e-tp0-pp0.npz", tensors(), 0, "cmpl-nobody")
    assert len(found(sent)) == len(KEYS)


def test_an_empty_record_is_a_difference(sent: Path) -> None:
    write(sent, "received-cmpl-b-0-2e-tp0-pp0.npz", {}, 0, "cmpl-a-0-1f")
    assert "holds no tensor" in found(sent)[0]


@pytest.mark.parametrize(("window", "lacking"), [(None, len(KEYS)), (10, len(KEYS)), (9, 0)])
def test_a_decode_worker_may_lack_only_what_lies_before_the_window(
    sent: Path, window: int | None, lacking: int
) -> None:
    write(sent, "received-cmpl-b-0-2e-tp0-pp0.npz", tensors(start=TOKENS - 8), 0, "cmpl-a-0-1f")
    assert len(found(sent, window)) == lacking

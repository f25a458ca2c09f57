"""Conversion on a GPU, over the stand-in: the kernel, interpreted, and torch's copies move the bytes that numpy moves;
streams, events and memory are used as they must be."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.gpu.stand_in import Gpus, stand_in
from tests.worker.staging.test_stager import copies
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.geometry.staging.strided_copy import Copy
from vllm_pd_connector.worker.staging import cuda
from vllm_pd_connector.worker.staging.copiers import CpuCopier
from vllm_pd_connector.worker.staging.cuda import CudaCopier, by_torch
from vllm_pd_connector.worker.staging.stager import Stager

pytestmark = pytest.mark.libraries
LAYS = 1 << 14


def with_kernel() -> CudaCopier:
    from vllm_pd_connector.worker.staging.kernel import by_kernel

    made = CudaCopier(0)
    assert made._launch is by_kernel
    return made


@pytest.fixture(scope="module")
def gpus() -> Iterator[Gpus]:
    with stand_in() as made:
        yield made


def run(copier: CudaCopier, base: int, work: list[Copy], *, gather: bool) -> None:
    copying = copier.begin(base, work, gather=gather)
    while not copying.advance(time.monotonic() + 1):
        assert copying.launched


@settings(max_examples=examples(60), deadline=None)
@given(work=st.lists(copies(), min_size=1, max_size=4), gather=st.booleans())
def test_the_kernel_and_torch_move_the_bytes_that_numpy_moves(gpus: Gpus, work: list[Copy], gather: bool) -> None:
    found = []
    for make in (CpuCopier, with_kernel, lambda: CudaCopier(0, by_torch)):
        memory = np.random.default_rng(1).integers(0, 255, (2, 4, LAYS), dtype=np.uint8)
        staging, cache = (memory[side].ctypes.data for side in (0, 1))
        placed = [
            replace(copy, staging=copy.staging + i * LAYS, cache=cache + 3 + i * LAYS) for i, copy in enumerate(work)
        ]
        copying = make().begin(staging, placed, gather=gather)
        while not copying.advance(time.monotonic() + 1):
            pass
        found.append(memory)
    assert (found[0] == found[1]).all(), "the kernel"
    assert (found[0] == found[2]).all(), "torch"


def test_many_elements_are_many_programs(gpus: Gpus) -> None:
    from vllm_pd_connector.worker.staging.kernel import BLOCK, tables

    table, programs = tables([[0, 0, 3 * BLOCK + 1, 0], [0, 0, 1, 2, 9, 9, 9], [0, 0, 0, 0]])
    assert table.shape == (3, 7)
    assert programs.tolist() == [[0, 0], [0, BLOCK], [0, 2 * BLOCK], [0, 3 * BLOCK], [1, 0], [2, 0]]
    memory = np.random.default_rng(1).integers(0, 255, (2, 16 * BLOCK), dtype=np.uint8)
    source, into = memory[0].ctypes.data, memory[1].ctypes.data
    work = [Copy(0, into, 8 * BLOCK, ()), Copy(8 * BLOCK, into + 8 * BLOCK, 8, ((BLOCK, 8, 8),))]
    run(with_kernel(), source, work, gather=False)
    assert (memory[0] == memory[1]).all()


def test_who_converts_nothing_compiles_nothing(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A prefill instance that is read from has no staging buffer, and its image may have no compiler."""
    from vllm_pd_connector.worker.staging import kernel

    compiled: list[object] = []
    monkeypatch.setattr(kernel, "compile_all", compiled.append)
    monkeypatch.setattr(cuda, "flusher", lambda *device: lambda: None)  # which says once that it knows no GPU here
    segments = [Segment(1 << 20, 1 << 20, "cuda", 0)]
    Stager(SimpleNamespace(), segments, 0)  # type: ignore[arg-type]
    assert not compiled and not caplog.records
    Stager(SimpleNamespace(), segments, 1 << 20)  # type: ignore[arg-type]
    assert compiled


@pytest.mark.parametrize("wide", [False, True])
def test_indices_of_either_width_find_the_same_elements(gpus: Gpus, wide: bool) -> None:
    from vllm_pd_connector.worker.staging import kernel

    memory = np.arange(2 * 64, dtype=np.int64).reshape(2, 8, 8)
    expected = memory[0].T.copy()
    rows = [[memory[0].ctypes.data, memory[1].ctypes.data, 64, 2, 8, 8, 64, 8, 64, 8]]
    kernel._launch(8, rows, "cuda:0", wide=wide)
    assert (memory[1] == expected).all()


def test_no_table_of_a_chunk_needs_another_compilation(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import JITFunction, create_function_from_signature

    from vllm_pd_connector.worker.staging import kernel

    compiled = JITFunction(kernel._move.fn, **{k: v for k, v in kernel._move.kwargs.items() if k.startswith("do_not")})
    backend = make_backend(GPUTarget("cuda", 90, 32))
    variant = create_function_from_signature(compiled.signature, compiled.params, backend)
    seen: set[str] = set()

    class Launches:
        def __getitem__(self, grid: tuple[int]) -> object:
            return lambda *tables, **constants: seen.add(str(variant(*tables, **constants)[1]))

    monkeypatch.setattr(kernel, "_move", Launches())
    kernel.compile_all("cuda:0")
    ready = set(seen)
    for axes in range(8):
        for count in (1, 2, 4):  # the second table begins where 16 divides its address, or not
            kernel._launch(2, [[0, 0, 5, axes, *[1] * 3 * axes]] * count, "cuda:0")
    assert seen == ready


def test_nothing_runs_on_the_forwards_stream_and_nobody_waits_for_one(gpus: Gpus) -> None:
    memory = np.zeros(4096, dtype=np.uint8)
    copier = with_kernel()
    gpus.launches.clear()
    gpus.synchronized = 0
    run(copier, memory.ctypes.data, [Copy(0, memory.ctypes.data + 2048, 512, ())], gather=False)
    assert gpus.launches and set(gpus.launches) == {copier._stream}
    assert not gpus.synchronized, "a chunk's end is an event"
    copier.blank([Copy(0, memory.ctypes.data, 512, ())])
    cuda.device_rows(memory.ctypes.data, 512, 16, np.array([1, 0]), 0)
    assert None not in gpus.launches, "the stream that nobody chose is the forward's"


def test_zeroing_that_fails_half_way_leaves_none_of_it_running(gpus: Gpus) -> None:
    """Its receive fails, and its blocks go to others."""
    memory = np.ones(1024, dtype=np.uint8)
    copier = CudaCopier(0, by_torch)
    gpus.launches.clear()
    gpus.synchronized = 0

    def broken() -> Iterator[Copy]:
        yield Copy(0, memory.ctypes.data, 512, ())
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="a defect"):
        copier.blank(broken())
    assert gpus.launches[copier._blanks] == gpus.synchronized == 1


def test_a_worker_that_wakes_up_takes_no_new_streams(gpus: Gpus) -> None:
    """PyTorch has 32 of a GPU, and hands out vLLM's own again behind them."""
    first, second = CudaCopier(0), CudaCopier(0)
    assert first._stream is second._stream and first._blanks is second._blanks
    assert first._stream is not first._blanks, "blanks are waited for"


@pytest.mark.parametrize("launch", [None, by_torch], ids=["kernel", "torch"])
def test_copies_are_done_when_their_event_has_passed(gpus: Gpus, monkeypatch: pytest.MonkeyPatch, launch) -> None:  # type: ignore[no-untyped-def]
    memory = np.zeros(4096, dtype=np.uint8)
    copier = CudaCopier(0, launch)
    monkeypatch.setattr(gpus, "looks", 2)
    copying = copier.begin(memory.ctypes.data, [Copy(0, memory.ctypes.data + 2048, 512, ())])
    assert not copying.launched
    assert [copying.advance(time.monotonic() + 1) for _ in range(3)] == [False, False, True]
    assert copying.launched and not gpus.pending


def test_what_is_given_up_has_ended(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = np.arange(4096, dtype=np.int64).view(np.uint8)
    before = memory.copy()
    monkeypatch.setattr(gpus, "looks", 99)
    begun, new = (CudaCopier(0, by_torch).begin(memory.ctypes.data, [Copy(0, memory.ctypes.data + 2048, 512, ())] * 2)
                  for _ in range(2))  # fmt: skip
    new.stop()
    assert (memory == before).all()
    begun.advance(0)
    assert not begun.launched, "the time was over after one of two"
    begun.stop()
    assert not gpus.pending


def test_without_a_compiler_torch_copies_and_says_so(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from vllm_pd_connector.worker.staging import kernel

    def broken(device: object) -> None:
        raise RuntimeError("Failed to find C compiler")

    monkeypatch.setattr(kernel, "compile_all", broken)
    assert CudaCopier(0)._launch is by_torch
    assert "cannot be compiled (RuntimeError: Failed to find C compiler)" in caplog.text


def test_memory_that_is_not_there_is_named_with_what_was_taken_before(
    gpus: Gpus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    copier = CudaCopier(0)
    with caplog.at_level("INFO"):
        assert copier.allocate(64 << 10, "the staging buffer (staging_bytes)").segment.length == 64 << 10
    assert "65536 bytes on cuda:0 beside what vLLM has counted: the staging buffer" in caplog.text
    monkeypatch.setattr(gpus, "free", 1000)
    said = (
        r"self-test: 8388608 bytes do not fit on cuda:0, beside 65536 for the staging .* 1000 of 1073741824 bytes are "
        r"free .* lower --gpu-memory-utilization, or staging_bytes"
    )
    with pytest.raises(TransferError, match=said):
        copier.allocate(8 << 20, "the self-test")

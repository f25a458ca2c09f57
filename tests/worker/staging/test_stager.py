"""Staged receives through the transfer loop: bytes, back-pressure, and what a frozen or dead peer may hold."""

from __future__ import annotations

import contextlib
import itertools
import resource
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.worker.decode_instance import Decode, Prefill, in_its_thread, lacking, set_faults, until
from vllm_pd_connector.config import Config, parse_config
from vllm_pd_connector.errors import InvalidConfig, TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.geometry.staging.strided_copy import Copy
from vllm_pd_connector.metadata import ReceiveRequest
from vllm_pd_connector.worker.peers.pool import IDLE_LINK_S
from vllm_pd_connector.worker.staging import stager as stager_module
from vllm_pd_connector.worker.staging.copiers import CpuCopier
from vllm_pd_connector.worker.staging.views import cache_array, element_arrays

# Of the small worlds of test_loop, one page of one layer of one rank has 64 bytes: the smallest chunk there is.
TINY = 512
A, B = (2, 6, 4), (1, 3, 7)


@pytest.fixture
def decode(request: pytest.FixtureRequest) -> Iterator[Decode]:
    made = Decode(Config(transport="loopback", **({"staging_bytes": TINY} | getattr(request, "param", {}))))
    yield made
    made.loop.close()


def into(request: ReceiveRequest, blocks: tuple[int, ...]) -> ReceiveRequest:
    return replace(request, blocks=(lacking(blocks),))


def free(decode: Decode) -> int:
    return decode.loop._stager.staging.free


def expected(decode: Decode, *blocks: tuple[int, ...]) -> np.ndarray:
    memory = decode.before.copy()
    for ids in blocks:
        decode.receive(memory, ids)
    return memory


@pytest.mark.parametrize("decode", [{"staging_bytes": size} for size in (0, TINY, 1 << 20)], indirect=True)
def test_a_receive_is_exact_with_any_staging_buffer(prefill, decode):
    assert decode.received(prefill.request("a")) == [True]
    assert (decode.worker.memory == decode.expected()).all()
    assert free(decode) == decode.loop._config.staging_bytes
    wanted = 6 * 4 * 8 * 2  # the bytes of tokens 4 to 10
    assert wanted <= decode.bytes <= wanted * 4 / 3, "more was read than gaps that cost less than a run"


def test_the_staging_buffer_is_known_to_the_transport_and_to_nobody_else(decode):
    [staging] = decode.loop._stager.segments
    assert staging.length == TINY and staging not in decode.loop._manifest.segments
    ranges = decode.transport._ranges
    assert staging.address in ranges.start


def test_chunks_are_never_larger_than_their_share_of_the_staging_buffer(prefill, decode, monkeypatch):
    sizes = []
    read = decode.transport.read
    monkeypatch.setattr(decode.transport, "read", lambda peer, runs: sizes.append(runs.total_bytes) or read(peer, runs))
    assert decode.received(prefill.request("a")) == [True]
    assert len(sizes) > 4 and max(sizes) <= TINY // 8


def test_who_comes_when_nothing_is_staged_begins_a_round(decode, monkeypatch):
    stager = decode.loop._stager
    monkeypatch.setattr(stager_module, "SLICE_S", 0.0)  # a turn is one kind of work
    assert (
        in_its_thread(decode.loop, lambda now: [(stager.poll(), stager.converting)[1] for _ in range(3)]) == [False] * 3
    )


def test_a_round_whose_streams_were_given_up_in_its_midst_keeps_nobody_awake(decode):
    def left(now: float) -> float | None:
        stager = decode.loop._stager
        stager._work, stager._posted = stager_module._Work.MAKE, True
        assert stager.poll() == []
        return stager.pause()

    assert in_its_thread(decode.loop, left) is None


def test_a_turn_that_one_kind_of_work_has_taken_all_of_leaves_the_next_kind_to_the_next_turn(
    prefill, decode, monkeypatch
):
    assert decode.received(prefill.request("warm")) == [True]
    decode.collect()
    did: list[str] = []
    stager, read = decode.loop._stager, decode.transport.read
    convert, make, poll = stager._convert, stager._make, stager.poll
    monkeypatch.setattr(stager_module, "SLICE_S", 0.0)
    monkeypatch.setattr(decode.transport, "read", lambda *given: (did.append("post"), read(*given))[1])
    monkeypatch.setattr(stager, "_convert", lambda *given: (did.append("convert"), convert(*given))[1])

    def makes(stream, failed):
        make(stream, failed)
        did.extend(["make"] * (stream.waiting is not None))

    monkeypatch.setattr(stager, "_make", makes)
    monkeypatch.setattr(stager, "poll", lambda: (did.append("turn"), poll())[1])
    assert decode.received(prefill.request("a")) == [True]
    assert (decode.worker.memory == decode.expected()).all() and free(decode) == TINY
    turns = [one.split() for one in " ".join(did).split("turn")]
    assert sum("post" in turn for turn in turns) > 4
    assert not any("post" in turn and {"convert", "make"} & set(turn) for turn in turns), turns


def test_a_turn_makes_a_chunk_of_as_many_streams_as_it_has_time_for(prefill, decode, monkeypatch):
    stager, made = decode.loop._stager, []
    make, poll = stager._make, stager.poll
    monkeypatch.setattr(stager_module, "SLICE_S", 0.0)
    monkeypatch.setattr(stager, "_make", lambda *given: (made.append("make"), make(*given)))
    monkeypatch.setattr(stager, "poll", lambda: (made.append("turn"), poll())[1])
    assert decode.received(*(prefill.request(f"a{i}") for i in range(6))) == [True] * 6
    assert (decode.worker.memory == decode.expected()).all() and free(decode) == TINY
    assert "make make" not in " ".join(made), "several were made in a turn that had no time"
    assert made.count("make") > 6 * 4


def test_many_requests_share_the_staging_buffer(prefill, other, decode):
    requests = [into(source.request(f"{name}{i}"), blocks) for i in range(8)
              for source, name, blocks in ((prefill, "a", A), (other, "b", B))]  # fmt: skip
    decode.loop.submit(requests, [])
    assert all(decode.wait_for(*(request.request_id for request in requests)))
    assert (decode.worker.memory == expected(decode, A, B)).all()
    assert free(decode) == TINY


@pytest.mark.parametrize("decode", [{"transfer_timeout": 0.5}], indirect=True)
def test_a_frozen_peer_keeps_its_slots_but_not_the_blocks_nor_the_others(prefill, other, decode):
    set_faults(prefill.transports, frozen=True)
    assert decode.received(*(prefill.request(f"a{i}") for i in range(6))) == [False] * 6
    assert decode.failures == {"deadline": 6} and not decode.quarantined
    assert 0 < free(decode) < TINY
    object.__setattr__(decode.loop._receives._limits, "read_s", 60.0)  # what follows succeeds
    assert decode.received(into(other.request("b"), B)) == [True]
    set_faults(prefill.transports, frozen=False)
    until(lambda: free(decode) == TINY, "the slots to come back")
    assert (decode.worker.memory == expected(decode, B)).all(), "a receive that was given up wrote into its blocks"


@pytest.mark.parametrize("decode", [{"transfer_timeout": 0.5}], indirect=True)
def test_a_receive_that_is_given_up_says_how_far_it_was(prefill, decode, monkeypatch):
    said: list[str] = []
    log = "vllm_pd_connector.worker.receive.ending.logger.error"
    monkeypatch.setattr(log, lambda text, *values: said.append(text % values))
    set_faults(prefill.transports, frozen=True)
    assert decode.received(prefill.request("a")) == [False]
    [text] = said
    assert (
        "0 being copied" in text
        and f"of {TINY} bytes of the staging buffer are free" in text
        and "longer than 0.5 s" in text
    )


@pytest.mark.parametrize("decode", [{"transfer_timeout": 0.5}], indirect=True)
def test_a_receive_that_finds_no_room_fails_in_time(prefill, other, decode):
    with contextlib.closing(Prefill("p-2")) as third:
        frozen = [transport for source in (prefill, other) for transport in source.transports]
        set_faults(frozen, frozen=True)
        decode.loop.submit(
            [source.request(f"{i}{source.engine_id}") for i in range(2) for source in (prefill, other)], []
        )
        until(lambda: free(decode) == 0, "the staging buffer to fill")
        assert decode.received(third.request("c")) == [False]
        assert set(decode.failures) == {"deadline"} and not decode.quarantined
        object.__setattr__(decode.loop._receives._limits, "read_s", 60.0)  # what follows succeeds
        set_faults(frozen, frozen=False)
        until(lambda: free(decode) == TINY, "the slots to come back")
        assert decode.received(third.request("d")) == [True]


def test_an_aborted_receive_writes_nothing_more(prefill, decode):
    prefill.transports[0].faults.frozen = True
    decode.loop.submit([prefill.request("a")], [])
    until(lambda: free(decode) < TINY, "a read to begin")
    decode.loop.submit([], ["a"])
    assert decode.wait_for("a") == [False]
    assert decode.failures == {"aborted": 1} and not decode.quarantined
    at_the_report = decode.worker.memory.copy()
    prefill.transports[0].faults.frozen = False
    until(lambda: free(decode) == TINY, "the slot to come back")
    assert (decode.worker.memory == at_the_report).all()


def test_a_failed_read_of_a_chunk_fails_the_receive_and_frees_the_staging_buffer(prefill, decode):
    decode.transport.faults.failures.append(TransferError("a cable was pulled"))
    assert decode.received(prefill.request("a")) == [False]
    assert decode.failures == {"transfer_failed": 1} and not decode.quarantined
    until(lambda: free(decode) == TINY, "the slots to come back")
    assert decode.received(prefill.request("b")) == [True]


def test_a_slot_that_may_still_be_written_stays_out_until_the_worker_has_ended(prefill, decode):
    decode.transport.faults.failures.append(TransferError("unclear", terminal=False))
    assert decode.received(prefill.request("a")) == [False]
    assert not decode.quarantined
    until(lambda: free(decode) == TINY - 64, "all slots but one to come back")
    decode.see_workers()
    prefill.end_workers()
    until(lambda: free(decode) == TINY, "the slot to come back")


def test_a_slot_that_may_still_be_written_keeps_its_link_however_long_nobody_uses_it(prefill, decode):
    decode.transport.faults.failures.append(TransferError("unclear", terminal=False))
    assert decode.received(prefill.request("a")) == [False]
    until(lambda: free(decode) == TINY - 64, "all slots but one to come back")
    decode.see_workers()
    links = decode.loop._receives._links

    def later(now: float) -> list[str]:
        for times in (1, 2):
            links.tick(now + times * (IDLE_LINK_S + 1))
        return [link.stalled for link in links._links.values()]

    assert in_its_thread(decode.loop, later) == [""], "what nothing is heard of is nothing that stands still"
    decode.hear_the_end_of(prefill)
    with contextlib.closing(Prefill(port=prefill.server.port)) as again:
        assert decode.received(again.request("b")) == [True]
        until(lambda: free(decode) == TINY, "the slot to come back")


def test_a_lost_peer_fails_the_receive_and_a_new_life_of_it_works(prefill, decode):
    set_faults(prefill.transports, frozen=True)
    decode.loop.submit([prefill.request("a")], [])
    until(lambda: free(decode) < TINY, "a read to begin")
    set_faults(prefill.transports, lost=True)
    assert decode.wait_for("a") == [False]
    until(lambda: free(decode) == TINY, "the slots to come back")
    decode.hear_the_end_of(prefill)
    with contextlib.closing(Prefill(port=prefill.server.port)) as again:
        assert decode.received(again.request("b")) == [True]


def test_a_staging_buffer_of_negative_size_stops_the_engine():
    with pytest.raises(InvalidConfig, match="staging_bytes is -1"):
        parse_config({"staging_bytes": -1})


@st.composite
def copies(draw: st.DrawFn) -> Copy:
    """A permutation of up to three axes, with gaps, of any item size."""
    item = draw(st.sampled_from([1, 2, 3, 4, 8, 24, 48]))
    sizes = draw(st.lists(st.integers(2, 5), min_size=0, max_size=3))
    strides = []
    for request in (draw(st.permutations(range(len(sizes)))), range(len(sizes))):
        step, mine = item, dict.fromkeys(request, 0)
        for axis in reversed(request):
            mine[axis] = step
            step = step * sizes[axis] + draw(st.sampled_from([0, 0, 6]))
        strides.append(mine)
    return Copy(5, 0, item, tuple((size, strides[0][i], strides[1][i]) for i, size in enumerate(sizes)))


def places(copy: Copy, side: int) -> list[int]:
    """The first byte of every item, in the order of the axes."""
    return [sum(i * axis[side] for i, axis in zip(index, copy.axes, strict=True))
            for index in itertools.product(*(range(axis[0]) for axis in copy.axes))]  # fmt: skip


@settings(max_examples=examples(300), deadline=None)
@given(copies(), st.booleans())
def test_a_copy_moves_its_items_and_nothing_else(copy, gather):
    noise = np.random.default_rng(1).integers(0, 255, (2, 1 << 14), dtype=np.uint8)
    wanted = noise.copy()
    for in_staging, in_cache in zip(places(copy, 1), places(copy, 2), strict=True):
        staging, cache = wanted[0, in_staging + 5 :][: copy.item], wanted[1, in_cache + 3 :][: copy.item]
        (staging if gather else cache)[:] = cache if gather else staging
    by_items, by_elements = noise.copy(), noise.copy()
    CpuCopier().copy(by_items[0].ctypes.data, replace(copy, cache=by_items[1].ctypes.data + 3), gather=gather)
    assert (by_items == wanted).all()
    # The GPU's form of the same copy: integers instead of items.
    views = element_arrays(by_elements[0].ctypes.data, replace(copy, cache=by_elements[1].ctypes.data + 3))
    staging, cache = map(np.asarray, views)
    np.copyto(*((staging, cache) if gather else (cache, staging)))
    assert (by_elements == wanted).all()


@settings(max_examples=examples(300), deadline=None)
@given(copies())
def test_what_a_copy_names_of_the_cache_is_zeroed_and_nothing_else(copy):
    wanted = np.random.default_rng(1).integers(1, 255, 1 << 14, dtype=np.uint8)
    by_items, by_elements = wanted.copy(), wanted.copy()
    for in_cache in places(copy, 2):
        wanted[in_cache + 3 :][: copy.item] = 0
    CpuCopier().blank([replace(copy, cache=by_items.ctypes.data + 3)])
    assert (by_items == wanted).all()
    # The GPU's form of the same place.
    np.asarray(cache_array(replace(copy, cache=by_elements.ctypes.data + 3)))[...] = 0
    assert (by_elements == wanted).all()


def test_an_element_is_as_wide_as_both_sides_allow():
    assert widths(Copy(0, 0, 512, ((4, 4096, 512),))) == {"<i8"}
    assert widths(Copy(0, 0, 6, ((4, 4096, 512),))) == {"<i2"}
    assert widths(Copy(1, 0, 512, ())) == {"|u1"}


def widths(copy: Copy) -> set[str]:
    return {array.__array_interface__["typestr"] for array in element_arrays(1 << 20, copy)}


def test_memory_for_the_staging_buffer_is_aligned_and_of_the_asked_length():
    memory = CpuCopier().allocate(1000, "a test")
    assert memory.segment == Segment(memory.segment.address, 1000, "cpu", 0)
    assert memory.segment.address % 4096 == 0
    assert memory.owner.ctypes.data <= memory.segment.address <= memory.owner.ctypes.data + len(memory.owner) - 1000


def test_memory_of_a_host_is_there_when_it_is_given() -> None:
    """Else the transfer thread meets it page by page, and a turn of it takes as long as the kernel needs."""
    length = 16 << 20
    memory = CpuCopier().allocate(length, "a test")
    before = resource.getrusage(resource.RUSAGE_THREAD).ru_minflt
    memory.owner[:] = 1
    assert resource.getrusage(resource.RUSAGE_THREAD).ru_minflt - before < length // resource.getpagesize() / 10


@pytest.mark.parametrize("decode", [{"staging_bytes": 0}, {"staging_bytes": 1 << 20}], indirect=True)
def test_a_transfer_that_cannot_be_looked_at_fails_its_request_and_no_later_one(prefill, decode, monkeypatch):
    """As of a transport of another package, each time."""
    poll, read, met = decode.transport.poll, decode.transport.read, []

    def note(*what: Any) -> Any:
        transfer = read(*what)
        met[:] = met or [transfer]
        return transfer

    def broken(transfer: Any) -> Any:
        if transfer in met:
            raise RuntimeError("a defect")
        return poll(transfer)

    monkeypatch.setattr(decode.transport, "read", note)
    monkeypatch.setattr(decode.transport, "poll", broken)
    assert decode.received(prefill.request("a")) == [False]
    assert decode.received(prefill.request("b"), prefill.request("c")) == [True, True]


@pytest.mark.parametrize("decode", [{"staging_bytes": 1 << 20}], indirect=True)
@pytest.mark.parametrize("error", [RuntimeError("a defect"), TransferError("no", terminal=False), TransferError("no")])
def test_a_chunk_that_the_transport_does_not_take_fails_its_request_alone(prefill, decode, monkeypatch, error):
    """Its slot is another's only where it is certain that nothing was begun: an error that is none of ours, as of a
    transport of another package, does not say so."""
    read, given, begun = decode.transport.read, itertools.count(), []

    def broken(*what: Any) -> Any:
        if next(given) == 0:
            begun.append(what[1])
            raise error
        return read(*what)

    monkeypatch.setattr(decode.transport, "read", broken)
    decode.loop.submit(requests := [into(prefill.request("a"), A), into(prefill.request("b"), B)], [])
    assert decode.wait_for(*(request.request_id for request in requests)) == [False, True]
    assert not decode.quarantined, "nothing but our own copies writes into its blocks"
    certain = isinstance(error, TransferError) and error.terminal
    assert (free(decode) == 1 << 20) is certain
    if not certain:
        decode.see_workers()
    prefill.end_workers()
    decode.until(lambda: free(decode) == 1 << 20, "the slot")

"""Pushes by way of the staging buffer: the bytes of a direct push and no other, back-pressure, what slots wait for."""

from __future__ import annotations

import contextlib
import itertools
import math
import secrets
import threading
from collections.abc import Container, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.geometry.moves import moves, windows
from tests.support.geometry.numbers import write
from tests.support.geometry.request import Move
from tests.support.geometry.world import Worker, instance, token_groups
from tests.support.worker.decode_instance import lacking, set_faults, until
from tests.support.worker.prefill_instance import TOKENS, real
from tests.support.worker.writer import CONFIG, TINY, Target, Writer, ask_early, freed, whole
from vllm_pd_connector.bounded import at_once
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import TransferError
from vllm_pd_connector.geometry.runs import Runs, concatenate
from vllm_pd_connector.geometry.staging.chunks import Chunk
from vllm_pd_connector.protocol.peer import Peer, PeerKey
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef, PushInto
from vllm_pd_connector.transport.base import TransferStatus
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker.push.link import NOTHING_AHEAD, Ahead, Part, WriteLink
from vllm_pd_connector.worker.push.waves import waves_of
from vllm_pd_connector.worker.staging.stager import Stager
from vllm_pd_connector.worker.transfer_loop import TransferLoop

A, B = (2, 6, 4), (1, 3, 7)
UNSURE = TransferError("unclear", terminal=False)


# One push without threads: links, stagers and memory of all ranks


def carry_out(link: WriteLink, stager: Stager, transport: LoopbackTransport, into: PushInto, part: Part) -> None:
    """Write a part of a push."""
    peer = link.ranks.get(into.rank)
    for runs in part.direct:
        assert transport.poll(transport.write(peer, runs)) is TransferStatus.DONE
    if part.staged is not None:
        stager.start(into, 0, link, peer, part.staged)
        while stager._streams:
            assert all(failure is None for _, failure in stager.poll())


class Pushing:
    """One rank's writes into one other, from step to step; what `push.driver` does with the cursor and the waves."""

    def __init__(self, link: WriteLink, stager: Stager, transport: LoopbackTransport, move: Move, into: PushInto):
        self._link, self._stager, self._transport = link, stager, transport
        self._move, self._into = move, into
        self._cursor, self._ahead = move.start, NOTHING_AHEAD
        self._written: list[Runs] = []

    def require_each_byte_once(self) -> None:
        """No run ends behind where the next one begins; of what was written directly."""
        runs = concatenate(self._written)
        order = np.argsort(runs.destination)
        ends = (runs.destination + runs.length)[order]
        assert (ends[:-1] <= runs.destination[order][1:]).all()

    def waves(self, ready: int, stop: int, whole: bool) -> None:
        """Write what the first waves of layers hold when the step is done that computes `ready` tokens."""
        reach = self._link.reach(self._into, ready, self._cursor, False)
        if reach > self._cursor or whole:
            source = self._move.source_tables
            part = self._link.bind_waves(self._into, source, self._cursor, reach, whole, self._ahead.waves, stop)
            self._written += part.direct
            carry_out(self._link, self._stager, self._transport, self._into, part)
            self._ahead = Ahead(stop, reach, whole)

    def step(self, ready: int) -> None:
        """Write the rest when `ready` tokens are computed."""
        final = ready == self._move.stop
        reach = self._link.reach(self._into, ready, self._cursor, final)
        if reach > self._cursor or final:
            source = self._move.source_tables
            part = self._link.bind_push(self._into, source, self._cursor, reach, final, self._ahead)
            self._written += part.direct
            carry_out(self._link, self._stager, self._transport, self._into, part)
            self._cursor, self._ahead = reach, NOTHING_AHEAD


def pushed(
    move: Move, steps: list[int], staging: int, early: Container[int] = (), last: str = "waits"
) -> tuple[list[Worker], int]:
    """The decode instance's ranks after a push in steps that complete so many tokens, and how much was staged (edges,
    each growing or ending). What the waves before the `early` ones hold goes out before the next wave is computed; so
    it does in the `last` step, which "waits" for its end, "grows" or, with windows and states, is "whole"."""
    model, staged = move.model, 0
    sources, destinations = instance(model, move.source), instance(model, move.destination, "decode-1")
    manifests, transports = [], []
    for worker in destinations:
        transports.append(LoopbackTransport())
        transports[-1].register(real(worker).segments)
        manifests.append(msgspec.msgpack.encode(real(worker, transports[-1].describe())))
    own = [msgspec.msgpack.encode(real(worker)) for worker in sources]
    ranks = [worker.manifest.parallel for worker in destinations]
    requests = [
        PushInto(PrefillRef("a", None), InstanceAddress("decode-1", "0" * 32, "h", 1), *place.rank,
                 0, 1, secrets.token_bytes(16), tuple(move.destination_tables), move.start, move.stop, "0" * 16)
        for place in ranks
    ]  # fmt: skip
    for worker in sources:
        transport = LoopbackTransport()
        stager = Stager(transport, real(worker).segments, staging)
        transport.register((*real(worker).segments, *stager.segments))
        waves = waves_of(list(dict.fromkeys(tensor.layer for tensor in worker.manifest.tensors)) if early else [])
        peer = Peer(PeerKey("h", 1, ""), lambda: 0.5)
        link = WriteLink(peer, "decode-1", "", 0.0, manifests, own=own, waves=waves)
        at_once(link.connecting(real(worker), transport, stager.chunk_bytes))
        pushes, done = [Pushing(link, stager, transport, move, into) for into in requests], 0
        for ready in [*steps, move.stop]:
            for number, wave in enumerate(waves, 1):
                write(model, move.source, worker, move.source_tables, worker.memory, done, ready, wave)
                for push in pushes if number in early and (ready < move.stop or last != "waits") else ():
                    push.waves(ready, number, ready == move.stop and last == "whole")
            write(model, move.source, worker, move.source_tables, worker.memory, done, ready)
            done = ready
            for push in pushes:
                push.step(ready)
        for push in pushes:
            push.require_each_byte_once()
        assert stager.staging.free == stager.staging.length
        staged += sum(
            edge.pairings != ()
            for edges in filter(None, link.outgoing.values())
            for _, edge in (*edges.growing, *edges.ending)
        )
        transport.close()
    for transport in transports:
        transport.close()
    return destinations, staged


def belonging(move: Move, worker: Worker, start: int, stop: int, layers: Container[str] | None = None) -> np.ndarray:
    """Which bytes of a decode rank's memory hold tokens [start, stop) of these layers, or tokens and states of all."""
    marks = [np.full(len(worker.memory), fill, dtype=np.uint8) for fill in (0, 255)]
    for memory in marks:
        write(move.model, move.destination, worker, move.destination_tables, memory, start, stop, layers)
    return marks[0] == marks[1]


def in_steps(move: Move, steps: list[int]) -> list[int]:
    return sorted({step for step in steps if 0 < step < move.stop})


@settings(max_examples=examples(150), deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(
    moves() | windows(),
    st.lists(st.integers(1, 40), max_size=4),
    st.sampled_from([512, 2048, 1 << 16]),
    st.sets(st.integers(1, 3)),
    st.sampled_from(["waits", "grows", "whole"]),
)
def test_a_push_by_way_of_the_staging_buffer_or_in_waves_writes_what_a_direct_one_writes_and_nothing_else(
    move, steps, staging, early, last
):
    before = instance(move.model, move.destination, "decode-1")
    direct, none = pushed(move, in_steps(move, steps), 0)
    staged, _ = pushed(move, in_steps(move, steps), staging, early, last)
    assert none == 0
    for old, one, other in zip(before, direct, staged, strict=True):
        assert (one.memory == other.memory).all(), f"{move}\nrank {old.manifest.parallel}"
        own = belonging(move, old, move.start, move.stop)
        assert (other.memory[own] == move.expected(old)[own]).all()
        # Of equal pages the last may move whole; nothing behind its blocks does, nor what lies between the tokens.
        # Ranks that hold tokens in turns share them out: pages of all of them end where turns and pages do.
        own = belonging(move, old, 0, 0)  # states
        for group in token_groups(move.model, move.destination):
            page = math.lcm(group.page_tokens, move.destination.interleave if group.ranks > 1 else 1) * group.ranks
            own |= belonging(move, old, move.start, -(-move.stop // page) * page, group.names)
        assert (other.memory[~own] == old.memory[~own]).all()


# Pushes through the transfer loops


@pytest.fixture
def config(request: pytest.FixtureRequest) -> Config:
    return msgspec.structs.replace(CONFIG, **({"staging_bytes": TINY} | getattr(request, "param", {})))


@pytest.fixture
def other(config: Config) -> Iterator[Target]:
    with contextlib.closing(Target(config)) as made:
        yield made


def writes(loop: TransferLoop) -> bool:
    """Whether a chunk is being written: one that is still being copied is over as soon as its push is."""
    return any(flight.transfer for stream in list(loop._stager._streams) for flight in list(stream.in_flight))


def free(writer: Writer) -> list[int]:
    return [loop._stager.staging.free for loop in writer.loops]


def into(target: Target, writer: Writer, name: str, blocks: tuple[int, ...] = A):
    return target.request(writer, f"d-{name}", name, blocks=(lacking(blocks),))


@pytest.mark.parametrize("config", [{"staging_bytes": size} for size in (0, TINY, 1 << 20)], indirect=True)
def test_a_push_is_exact_with_any_staging_buffer(writer, target):
    posted: list[Runs] = []
    for transport in writer.transports:
        original = transport.write
        transport.write = lambda peer, runs, original=original: posted.append(runs) or original(peer, runs)
    writer.whole()
    assert target.received(into(target, writer, "a")) == [True]
    expected = target.expected(blocks=A)
    assert whole(target.worker.memory, expected)
    freed(writer, "a")
    size = writer.loops[0]._config.staging_bytes
    assert free(writer) == [size, size]
    assert sum(runs.total_bytes for runs in posted) == target.bytes == 6 * 4 * 8 * 2, "tokens 4 to 10, nothing twice"
    lengths = {length for runs in posted for length in runs.length.tolist()}
    assert lengths == ({16} if size else {8}), "both heads of a rank are one run only by way of the staging buffer"
    buffers = [segment for loop in writer.loops for segment in loop._stager.segments]
    for source in (address for runs in posted for address in runs.source.tolist() if size):
        assert any(0 <= source - staging.address < staging.length for staging in buffers)
    if size == TINY:
        assert max(runs.total_bytes for runs in posted) <= TINY // 8, "a chunk is larger than its share"


def test_the_cache_is_read_only_when_its_step_is_done(writer, target, monkeypatch):
    """The staging buffer is filled in the transfer thread, after the launching thread has said that the step ended."""
    ask_early(writer, target)
    threads = set()
    for loop in writer.loops:
        copy = loop._stager.copier.copy

        def told(base, part, gather, copy=copy, loop=loop):
            threads.add((loop, threading.current_thread()))
            copy(base, part, gather=gather)

        monkeypatch.setattr(loop._stager.copier, "copy", told)
    writer.finish(step=1)
    until(lambda: all(loop._pushes.waiting for loop in writer.loops), "the order")
    assert not threads
    writer.compute(0, TOKENS)
    writer.step_done(1)
    assert target.wait_for("d") == [True]
    assert whole(target.worker.memory, target.expected(0))
    assert threads == {(loop, loop._thread) for loop in writer.loops}


def test_many_pushes_share_the_staging_buffer(writer, target, other):
    names = [f"{i}" for i in range(8)]
    for i, name in enumerate(names):
        writer.whole(name)
        (other if i % 2 else target).loop.submit([into((other if i % 2 else target), writer, name)], [])
    assert all(target.wait_for(*(f"d-{name}" for name in names[::2])))
    assert all(other.wait_for(*(f"d-{name}" for name in names[1::2])))
    freed(writer, *names)
    assert free(writer) == [TINY, TINY]


def test_a_push_that_finds_no_room_waits_for_it(writer, target, other):
    """Neither instance gets more than half of the staging buffer; the third push is written when there is room."""
    set_faults(writer.transports, held=True)
    for name in ("a", "b", "c", "d"):
        writer.whole(name)
    target.loop.submit([into(target, writer, "a"), into(target, writer, "b", B)], [])
    until(lambda: free(writer) == [TINY // 2] * 2, "half of the staging buffer to be taken")
    other.loop.submit([into(other, writer, "c"), into(other, writer, "d", B)], [])
    until(lambda: free(writer) == [0, 0], "the staging buffer to fill")
    assert not target.finished and not other.finished
    set_faults(writer.transports, held=False)
    assert target.wait_for("d-a", "d-b") == [True, True] and other.wait_for("d-c", "d-d") == [True, True]
    for each in (target, other):
        expected = each.before.copy()
        for blocks in (A, B):
            each.receive(expected, blocks)
        assert whole(each.worker.memory, expected)
    freed(writer, "a", "b", "c", "d")
    assert free(writer) == [TINY, TINY]


@pytest.mark.parametrize("config", [{"transfer_timeout": 0.3}], indirect=True)
def test_a_push_that_finds_no_room_fails_in_time_and_was_never_begun(writer, target, caplog):
    slots = [(x._stager.staging, x._stager.staging.take(TINY // 8, n)) for x in writer.loops for n in range(8)]
    writer.whole()
    assert target.received(into(target, writer, "a")) == [False]
    assert "have not ended, and no part of one has since (0 bytes were posted; 0 chunks being moved" in caplog.text
    target.until(lambda: target.drained == target.quarantined, "the word that nothing of it is written")
    freed(writer, "a")
    for staging, slot in slots:
        staging.give(slot)
    assert free(writer) == [TINY, TINY]
    assert whole(target.worker.memory, target.before)


def test_after_a_push_was_given_up_its_slots_stay_out_until_nothing_is_written(writer, target):
    set_faults(writer.transports, held=True)
    writer.whole()
    target.loop.submit([into(target, writer, "a")], [])
    until(lambda: all(map(writes, writer.loops)), "the writes")
    target.loop.submit([], ["d-a"])
    assert target.wait_for("d-a") == [False]
    until(lambda: all(push.machine.failed for part in writer.pushes() for push in part), "the word to cancel")
    target.collect()
    taken = free(writer)
    assert all(room < TINY for room in taken) and target.quarantined == {"d-a"} and not target.drained
    freed(writer, "a")
    set_faults(writer.transports, held=False)
    target.until(lambda: target.drained == {"d-a"}, "the quarantine to end")
    assert free(writer) == [TINY, TINY]


def test_a_worker_that_was_told_to_cancel_says_that_it_is_over_when_its_slots_are_back(writer, target):
    set_faults(writer.transports, held=True)
    writer.whole()
    target.loop.submit([into(target, writer, "a")], [])
    until(lambda: all(map(writes, writer.loops)), "the writes")
    target.loop.submit([], ["d-a"])
    until(lambda: all(push.machine.failed for part in writer.pushes() for push in part), "the word to cancel")
    assert all(writer.pushes()), "a push is over that is being written"
    set_faults(writer.transports, held=False)
    assert target.wait_for("d-a") == [False]
    freed(writer, "a")


def test_a_failed_write_of_a_chunk_fails_the_push_and_frees_the_staging_buffer(writer, target, caplog):
    writer.transports[0].faults.failures.append(TransferError("a cable was pulled"))
    writer.whole()
    assert target.received(into(target, writer, "a")) == [False]
    assert "a cable was pulled" in caplog.text
    target.until(lambda: target.drained == target.quarantined, "the quarantine to end")
    freed(writer, "a")
    assert free(writer) == [TINY, TINY]
    writer.whole("b")
    assert target.received(into(target, writer, "b")) == [True]


@pytest.mark.parametrize("errors", [(UNSURE,), ()], ids=["taken", "a defect as it is given"])
def test_a_write_that_may_go_on_keeps_the_decode_sides_blocks_alone_and_costs_the_prefill_side_nothing(
    writer, target, monkeypatch, errors
):
    monkeypatch.setattr("vllm_pd_connector.worker.receive.push_request.SELDOM_S", 0.5)
    monkeypatch.setattr("vllm_pd_connector.protocol.push.table.ANSWER_S", 0.5)
    writer.transports[0].faults.failures.extend(errors)
    if not errors:  # a defect as it is given
        write, given = writer.transports[0].write, itertools.count()
        monkeypatch.setattr(writer.transports[0], "write", lambda *what: write(*what) if next(given) else 1 // 0)
    writer.whole()
    assert target.received(into(target, writer, "a")) == [False]
    until(lambda: free(writer) == [TINY, TINY], "all slots to come back")
    freed(writer, "a")
    writer.whole("b")
    assert target.received(into(target, writer, "b", B)) == [True], "others go on"
    freed(writer, "b")
    target.collect()
    assert target.quarantined == {"d-a"} and not target.drained
    until(lambda: not any(writer.pushes()), "it to be forgotten")
    assert writer.loops[0]._stager.pause() is None
    before = writer.server.counts()["WithdrawPush"]
    target.until(lambda: writer.server.counts()["WithdrawPush"] > before + 1, "further questions")
    assert target.quarantined == {"d-a"} and not target.drained, "they were answered as if nothing could arrive"


@pytest.mark.parametrize("broken", ["chunks", "copies"])
def test_a_defect_that_one_push_meets_fails_it_alone(writer, target, monkeypatch, broken):
    """Above all it is not reported as done."""
    stager = writer.loops[0]._stager
    writer.whole()
    assert target.received(into(target, writer, "a")) == [True]
    freed(writer, "a")
    with monkeypatch.context() as patch:
        if broken == "chunks":
            patch.setattr("vllm_pd_connector.worker.push.link.chunks", broken_chunks)
        else:
            patch.setattr(stager.copier, "copy", broken_copy)
        writer.whole("b")
        assert target.received(into(target, writer, "b")) == [False]
        freed(writer, "b")
    writer.whole("c")
    assert target.received(into(target, writer, "c")) == [True]
    freed(writer, "c")
    assert free(writer) == [TINY, TINY]


def broken_copy(*_: object, **__: object) -> None:
    raise ZeroDivisionError("a defect")


def broken_chunks(*_: object, **__: object) -> Iterator[Chunk]:
    yield broken_copy()

"""Verification between a decode worker and the workers of a prefill instance, over a real side channel."""

from __future__ import annotations

import contextlib
import pickle
import queue
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from tests.support.descriptors import no_descriptor_left
from tests.support.worker.decode_instance import Decode, Prefill, set_deadline
from tests.support.worker.late_memory import LateMemory
from tests.support.worker.prefill_instance import P_BLOCKS, real
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import Busy, DeadlineExceeded
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.checksums.sums import Checksum, checksums, difference
from vllm_pd_connector.metadata import PushFrom, ReceiveRequest, StepMetadata
from vllm_pd_connector.protocol.peer import PeerKey
from vllm_pd_connector.protocol.receive import ReceiveState
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.worker import checksum_server
from vllm_pd_connector.worker.checksum_server import ChecksumServer
from vllm_pd_connector.worker.checksums import is_chosen, of_pieces, to_messages
from vllm_pd_connector.worker.receive import compare


class Verifying(Prefill):
    """A prefill instance whose workers make sums; `corrupt` makes the second one see another byte."""

    def __init__(self, offers: bool = True, corrupt: bool = False):
        super().__init__()
        self.server.close()
        self.server = SideChannelServer("127.0.0.1", 0, self.engine_id, self.incarnation, verifies=offers)
        self.tokens = [secrets.token_bytes(16) for _ in self.workers]
        self.server.set_manifests(self.manifests, self.tokens)
        address = endpoint("127.0.0.1", self.server.port)
        self.copies = [worker.memory.copy() for worker in self.workers]
        if corrupt:
            for index in self.workers[1].where.values():
                self.copies[1][index[P_BLOCKS[1], 1, 0, 0, 0]] ^= 1
        self.makers = []
        for number, (worker, copy) in enumerate(zip(self.workers, self.copies, strict=True)):
            worker.memory, original = copy, worker.memory
            self.makers.append(ChecksumServer(address, None, real(worker), number, self.tokens[number]))
            worker.memory = original

    def held(self, request_id: str) -> ReceiveRequest:
        request = self.request(request_id, hold=False)
        lease = request.lease
        self.server.hold(lease.request_id, lease.nonce, 60.0, (BlockTable.of(0, P_BLOCKS),))
        return request

    def close(self) -> None:
        for maker in self.makers:
            maker.close()
        super().close()


@pytest.fixture
def decode() -> Iterator[Decode]:
    made = Decode(Config(transport="loopback", staging_bytes=0, verify="all", transfer_timeout=20.0))
    yield made
    made.loop.close()


@pytest.mark.parametrize("step", ["the sums", "the question", "the question again"])
def test_a_comparison_that_cannot_begin_fails_its_receive_alone(decode, monkeypatch, step):
    """An error out of the loop's turn would fail every receive and push of the worker."""

    def defect(*given):
        raise RuntimeError("can't start new thread")

    comparison, calls = decode.loop._comparison, decode.loop._calls
    monkeypatch.setattr(compare, "RETRY_S", 0.0)
    with contextlib.closing(Verifying()) as prefill, monkeypatch.context() as patch:
        if step == "the sums":
            patch.setattr(comparison._summing, "submit", defect)
        ask, asked = calls.ask, []

        def fails(address, message, timeout_s, handler=None):
            if not isinstance(message, m.GetChecksums) or step == "the sums":
                return ask(address, message, timeout_s, handler)
            asked.append(message)
            if step == "the question" or len(asked) > 1:
                defect()
            return handler(m.Failure(m.FailureCode.BUSY, "later"), 0.0)

        patch.setattr(calls, "ask", fails)
        met = []
        patch.setattr(decode.loop, "_fail_all", lambda *given: met.append(given))
        assert decode.received(prefill.held("a")) == [False]
        assert decode.failures == {"internal": 1} and not met
        patch.undo()
        assert decode.received(prefill.held("b")) == [True] and decode.verified == 1


@pytest.mark.parametrize("heard", [False, True], ids=["raised", "heard later"])
def test_a_comparison_for_which_no_socket_is_left_yet_waits_for_one(decode, monkeypatch, heard):
    monkeypatch.setattr(compare, "RETRY_S", 0.01)
    ask, asked = decode.loop._calls.ask, []

    def full(address, message, timeout_s, handler=None):
        asked.extend([message] if isinstance(message, m.GetChecksums) else [])
        if asked and message is asked[-1] and len(asked) < 3:
            busy = Busy("side channel: no socket is left: Too many open files")
            if not heard:
                raise busy
            return handler(busy, time.monotonic())
        return ask(address, message, timeout_s, handler)

    monkeypatch.setattr(decode.loop._calls, "ask", full)
    with contextlib.closing(Verifying()) as prefill:
        assert decode.received(prefill.held("a")) == [True] and len(asked) == 3
        assert decode.verified == 1


def test_equal_contents_are_verified_and_counted(decode):
    with contextlib.closing(Verifying()) as prefill:
        names = [f"r{i}" for i in range(5)]
        assert all(decode.received(*(prefill.held(name) for name in names)))
        decode.until(lambda: decode.verified == 5, "the count")
        assert (decode.worker.memory == decode.expected()).all()


def test_a_receive_without_a_sum_is_not_counted_as_verified(decode, monkeypatch):
    """As between instances whose pages are opaque."""
    with contextlib.closing(Verifying()) as prefill:
        with monkeypatch.context() as without:
            for module in (checksum_server, compare):
                without.setattr(module, "checksums", lambda *_: [])
            assert decode.received(prefill.held("r0")) == [True]
        assert decode.received(prefill.held("r1")) == [True]
        decode.until(lambda: decode.verified, "the count")
        assert decode.verified == 1


def test_who_makes_sums_has_the_caches_device(monkeypatch):
    """In a thread of another device each rank of a host would begin a context on the first GPU, beside its caches."""
    made = []
    for module in (checksum_server, compare):
        monkeypatch.setattr(
            module, "make_device_current", lambda segments: made.append((threading.current_thread().name, *segments))
        )
    decode = Decode(Config(transport="loopback", staging_bytes=0, verify="all", transfer_timeout=20.0))
    with contextlib.closing(decode.loop), contextlib.closing(Verifying()) as prefill:
        assert decode.received(prefill.held("a"), prefill.held("b")) == [True, True]
        theirs = [("pd-sums", *maker._manifest.segments) for maker in prefill.makers]
        assert Counter(made) == Counter([*theirs, ("pd-sums_0", *real(decode.worker).segments)])


def test_what_is_compared_is_visible_before(decode, monkeypatch):
    late = LateMemory(monkeypatch)
    with contextlib.closing(Verifying()) as prefill:
        assert decode.received(prefill.held("a")) == [True]
        late.refuses = True
        assert decode.received(prefill.held("b")) == [False] and decode.failures == {"internal": 1}


def test_no_deadline_ends_a_receive_whose_sums_this_worker_still_makes(decode, monkeypatch):
    """One thread makes them for all receives, and of long prompts they take seconds."""
    go_on = threading.Event()
    monkeypatch.setattr(compare, "checksums", lambda *given: (go_on.wait(60.0), checksums(*given))[1])
    with contextlib.closing(Verifying()) as prefill:
        decode.loop.submit([prefill.held("a")], [])

        def verifies() -> bool:
            return (active := decode.active("a")) is not None and active.machine.state is ReceiveState.VERIFYING

        decode.until(verifies, "the comparison")
        active = decode.active("a")
        object.__setattr__(decode.loop._receives._limits, "read_s", 0.05)
        set_deadline(decode.loop, active)
        begun = time.monotonic()
        decode.until(lambda: (active.machine.next_deadline() or 0.0) > begun + 0.5, "several deadlines to pass")
        decode.until(lambda: active.comparing, "the other side's sums")
        go_on.set()
        assert decode.wait_for("a") == [True] and not decode.failures


def test_what_was_compared_and_not_yet_said_is_waited_for(decode, monkeypatch):
    """The thread that compares may end between what was found is handed over and deadlines are looked after."""
    comparison, late = decode.loop._comparison, []
    turn = comparison.turn

    def a_deadline_before(now: float) -> None:
        if not comparison._results:
            return
        if (active := decode.loop._receives._active.get("a")) is not None:
            assert active.machine.state is ReceiveState.VERIFYING and active.summing.done()
            decode.loop._receives._tick(active, now + 100.0)
            late.append(active.reported)
        turn(now)

    monkeypatch.setattr(comparison, "turn", a_deadline_before)
    with contextlib.closing(Verifying()) as prefill:
        assert decode.received(prefill.held("a")) == [True] and not decode.failures
    assert late == [False]


def test_a_difference_fails_the_receive_and_gives_the_lease_back(decode):
    with contextlib.closing(Verifying(corrupt=True)) as prefill:
        assert decode.received(prefill.held("a")) == [False]
        assert decode.failures == {"verification": 1} and not decode.quarantined
        decode.until(lambda: len(prefill.server.take_freed()) == 1, "the lease to come back")


def test_a_prefill_instance_with_too_much_to_sum_is_asked_again(decode, monkeypatch):
    """What was read is right, as far as anybody knows."""
    monkeypatch.setattr("vllm_pd_connector.protocol.verification.MAX_JOBS", 1)
    monkeypatch.setattr(compare, "RETRY_S", 0.02)
    go_on = threading.Event()
    monkeypatch.setattr(checksum_server, "checksums", lambda *given: (go_on.wait(60.0), checksums(*given))[1])
    with contextlib.closing(Verifying()) as prefill:
        decode.loop.submit([prefill.held("a"), prefill.held("b")], [])
        decode.until(lambda: prefill.server.counts().get("failure:busy", 0) >= 3, "one to be refused, again and again")
        go_on.set()
        assert decode.wait_for("a", "b") == [True, True] and not decode.failures


def test_who_has_failed_since_asks_for_no_sums(decode, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.protocol.verification.MAX_JOBS", 0)
    monkeypatch.setattr(compare, "RETRY_S", 0.02)
    object.__setattr__(decode.loop._receives._limits, "read_s", 0.2)
    with contextlib.closing(Verifying()) as prefill:
        assert decode.received(prefill.held("a")) == [False] and decode.failures == {"deadline": 1}
        decode.until(lambda: not decode.loop._comparison._again, "nobody to ask")


def test_a_prefill_instance_that_offers_no_sums_fails_the_receive(decode):
    with contextlib.closing(Verifying(offers=False)) as prefill:
        assert decode.received(prefill.held("a")) == [False]
        assert decode.failures == {"verification": 1}


def test_without_verification_nothing_is_asked():
    made = Decode(Config(transport="loopback", staging_bytes=0))
    with contextlib.closing(Verifying(corrupt=True)) as prefill, contextlib.closing(made.loop):
        assert made.received(prefill.held("a")) == [True]
        assert "GetChecksums" not in prefill.server.counts()


def test_workers_that_ask_before_their_instance_is_complete_are_not_forgotten(decode):
    with contextlib.closing(Verifying()) as prefill:
        for maker in prefill.makers:
            maker.close()
        prefill.server.close()
        prefill.server = SideChannelServer("127.0.0.1", 0, prefill.engine_id, prefill.incarnation, verifies=True)
        address = endpoint("127.0.0.1", prefill.server.port)
        prefill.makers = [
            ChecksumServer(address, None, real(worker), i, prefill.tokens[i])
            for i, worker in enumerate(prefill.workers)
        ]
        decode.until(lambda: prefill.server.counts().get("NextChecksumJob", 0) >= 2, "both workers to ask")
        prefill.server.set_manifests(prefill.manifests, prefill.tokens)
        assert decode.received(prefill.held("a")) == [True]


def test_nobody_but_a_worker_is_given_jobs_or_believed_in_what_it_sums(decode):
    with contextlib.closing(Verifying()) as prefill, contextlib.closing(SideChannelClient()) as client:
        address, own = endpoint("127.0.0.1", prefill.server.port), prefill.tokens[0]
        posing = [
            m.NextChecksumJob(bytes(16), 0),
            m.NextChecksumJob(own, 1),
            m.NextChecksumJob(own, 2),
            m.JobChecksums(bytes(16), 1, 0, (), True),
        ]
        sent = [client.send(address, message, 20.0) for message in posing]
        outcomes = {}
        decode.until(lambda: bool(outcomes.update(client.receive())) or len(outcomes) == len(sent), "the refusals")
        for token in sent:
            assert outcomes[token].code is m.FailureCode.MALFORMED and "token" in outcomes[token].message
        assert decode.received(prefill.held("a")) == [True]


def test_sums_that_cannot_be_made_fail_one_check_and_not_those_after_it(decode, monkeypatch):

    with contextlib.closing(Verifying()) as prefill:
        left = {maker._thread for maker in prefill.makers}

        def runs_out_of_memory_once(*arguments):
            if (thread := threading.current_thread()) in left:
                left.remove(thread)
                raise RuntimeError("CUDA out of memory")
            return checksums(*arguments)

        monkeypatch.setattr("vllm_pd_connector.worker.checksum_server.checksums", runs_out_of_memory_once)
        assert decode.received(prefill.held("a")) == [False]
        assert decode.failures == {"verification": 1}
        assert decode.received(prefill.held("b")) == [True]


def test_sums_of_which_a_piece_was_lost_are_made_again(decode, monkeypatch):
    """Without it what arrived well would be taken for wrong."""
    monkeypatch.setattr("vllm_pd_connector.worker.checksums.MAX_PIECES_BYTES", 64)
    monkeypatch.setattr(checksum_server, "_RETRY_S", 0.05)
    with contextlib.closing(Verifying()) as prefill:
        lost, ask = set(), ChecksumServer._ask

        def loses_one_of_each(maker, client, request, timeout):
            if isinstance(request, m.JobChecksums) and maker not in lost and not request.last:
                lost.add(maker)
                return DeadlineExceeded("no reply within 0.05 s")
            return ask(maker, client, request, timeout)

        monkeypatch.setattr(ChecksumServer, "_ask", loses_one_of_each)
        assert decode.received(prefill.held("a")) == [True]
        assert lost == set(prefill.makers)


def test_a_maker_without_a_side_channel_ends_when_it_is_told(decode):
    prefill = Prefill()
    prefill.server.close()
    maker = ChecksumServer(endpoint("127.0.0.1", prefill.server.port), None, real(prefill.workers[0]), 0, bytes(16))
    began = time.monotonic()
    maker.close()
    assert time.monotonic() - began < 5.0 and not maker._thread.is_alive()
    prefill.close()


def test_a_maker_begins_again_after_an_unexpected_error(decode, monkeypatch):
    """Without memory to wait with, say."""
    real, met = checksum_server.wait, set()

    def fails_once(*what):
        if (thread := threading.current_thread()) not in met:
            met.add(thread)
            raise MemoryError
        real(*what)

    monkeypatch.setattr(checksum_server, "wait", fails_once)
    monkeypatch.setattr(checksum_server, "_AGAIN_S", 0.0)
    with contextlib.closing(Verifying()) as prefill:
        decode.until(lambda: len(met) == len(prefill.makers), "each maker to meet one")
        assert decode.received(prefill.held("a")) == [True]


def test_a_maker_that_finds_no_descriptor_asks_again_later(monkeypatch):
    """Its side channel stands still, and for another connection there none is left."""
    monkeypatch.setattr("vllm_pd_connector.worker.checksum_server._JOB_WAIT_S", 0.05)
    pauses = queue.Queue()
    monkeypatch.setattr(ChecksumServer, "_pause", lambda self, client: pauses.put(None))
    with contextlib.closing(Prefill()) as prefill, socket.create_server(("127.0.0.1", 0)) as silent:
        address = endpoint("127.0.0.1", silent.getsockname()[1])
        maker = ChecksumServer(address, None, real(prefill.workers[0]), 0, bytes(16))
        silent.accept()[0].close()
        with no_descriptor_left():
            for _ in range(3):
                pauses.get(timeout=20.0)
        assert maker.runs
        maker.close()


def test_sums_of_any_size_fit_their_messages():
    found = [Checksum(f"layer {i}", "key", 3, np.arange(9000, dtype=np.uint64)) for i in range(3)]
    messages = list(to_messages(bytes(16), 7, 1, found))
    assert [message.last for message in messages] == [False] * (len(messages) - 1) + [True]
    for message in messages:
        assert m.decode_request(m.encode(1, message))[1] == message
    pieces = [piece for message in messages for piece in message.pieces]
    assert difference(found, of_pieces(pieces)) == "" == difference(of_pieces(pieces), found)


def test_a_sample_is_about_one_in_sixteen_and_the_same_for_all_ranks():
    with contextlib.closing(Prefill()) as prefill:
        read = [prefill.request(str(i), hold=False) for i in range(512)]
    written = [replace(request, source=terms(f"transfer {i}")) for i, request in enumerate(read)]
    for requests in (read, written):
        assert 16 < sum(is_chosen(request, "sample") for request in requests) < 64
        copies = pickle.loads(pickle.dumps(StepMetadata(receives=requests))).receives  # as another rank gets them
        there = [is_chosen(request, "sample") for request in reversed(copies)]
        assert there[::-1] == [is_chosen(request, "sample") for request in requests]
        assert all(is_chosen(request, "all") for request in requests)
        assert not any(is_chosen(request, "off") for request in requests)
    # And in a process of its own, which has other hashes of a text.
    assert [number for number in range(64) if is_chosen(written[number], "sample")] == [4, 17, 20, 41]


def terms(name: str) -> PushFrom:
    home = InstanceAddress("decode-1", "ab" * 16, "127.0.0.1", 5600)
    return PushFrom(PeerKey("127.0.0.1", 5601, ""), "p-0", PrefillRef(name, None), home, "0" * 16)

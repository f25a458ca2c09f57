"""Verification of what a prefill instance wrote: compared while its blocks are held, then confirmed like a read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec
import pytest

from tests.support.push.asked import ordered
from tests.support.worker.auto import both_ways, found
from tests.support.worker.decode_instance import until
from tests.support.worker.prefill_instance import P_BLOCKS, real
from tests.support.worker.writer import SOURCE, Target, Writer, ask_early, freed, pushed, whole
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.wire.fields import LeaseRef
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef, PushEnded, PushInto, PushState
from vllm_pd_connector.sidechannel.client import Outcome, SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.worker.checksum_server import ChecksumServer
from vllm_pd_connector.worker.peers.bandwidth_test import Bandwidth

OTHER_BLOCKS = (BlockTable.of(0, (4, 1, 5)),)
CONFIG = Config(transport="loopback", mode="push", staging_bytes=0, verify="all", transfer_timeout=20.0)


class Vouching(Writer):
    """A prefill instance that writes, and whose workers make sums once `begin_sums` was called."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.server._verifies = config.verify != "off"
        self.makers: list[ChecksumServer] = []

    def begin_sums(self) -> None:
        address = endpoint("127.0.0.1", self.server.port)
        self.makers = [
            ChecksumServer(address, None, real(worker), number, self.tokens[number])
            for number, worker in enumerate(self.workers)
        ]

    def close(self) -> None:
        for maker in self.makers:
            maker.close()
        super().close()


@pytest.fixture
def config(request: pytest.FixtureRequest) -> Config:
    return msgspec.structs.replace(CONFIG, **getattr(request, "param", {}))


@pytest.fixture
def writer(config: Config) -> Iterator[Vouching]:
    with contextlib.closing(Vouching(config)) as made:
        made.begin_sums()
        yield made


@pytest.mark.parametrize("by_lease", [False, True])
def test_equal_contents_are_verified_counted_and_freed(writer, target, by_lease):
    names = [f"r{i}" for i in range(5)]
    for name in names:
        nonce = writer.whole(name)
        target.loop.submit([target.request(writer, f"d-{name}", name, nonce if by_lease else None)], [])
    assert all(target.wait_for(*(f"d-{name}" for name in names)))
    target.until(lambda: target.verified == 5, "the count")
    assert whole(target.worker.memory, target.expected())
    freed(writer, *names)


def test_what_went_out_step_by_step_is_verified_as_a_whole(writer, target):
    ask_early(writer, target)
    writer.compute(0, 6)
    writer.server.pushes.progressed([("p-a", SOURCE, 6)], 1)
    writer.step_done(1)
    target.until(lambda: not whole(target.worker.memory, target.before), "the first page")
    writer.compute(6, 10)
    writer.finish(step=2)
    writer.step_done(2)
    assert target.wait_for("d") == [True]
    target.until(lambda: target.verified == 1, "the count")
    assert whole(target.worker.memory, target.expected(0))


def test_a_difference_fails_the_request_before_its_blocks_are_used_and_frees_the_prefill(target, config, caplog):
    with contextlib.closing(Vouching(config)) as writer:
        writer.whole()
        target.loop.submit([target.request(writer)], [])
        until(lambda: writer.server.counts().get("GetChecksums") == 1, "the question for sums")
        assert not target.finished and not writer.server.take_freed(), "neither side may use its blocks yet"
        for index in writer.workers[1].where.values():
            writer.workers[1].memory[index[P_BLOCKS[1], 1, 0, 0, 0]] ^= 1
        writer.begin_sums()
        assert target.wait_for("d") == [False]
        assert target.failures == {"verification": 1} and not target.quarantined
        assert "differs from the prefill side's" in caplog.text
        freed(writer, "a")


def test_the_blocks_are_kept_until_they_were_compared_and_no_longer(target, config):
    with contextlib.closing(Vouching(config)) as writer:
        writer.whole()
        target.loop.submit([target.request(writer)], [])
        until(lambda: writer.server.counts().get("GetChecksums") == 1, "the question for sums")
        assert not writer.server.take_freed()
        writer.begin_sums()
        assert target.wait_for("d") == [True]
        freed(writer, "a")


def test_a_decode_instance_that_dies_before_it_compared_frees_the_prefill_in_time():
    now, lease_s, compare_s = [0.0], 30.0, 20.0
    server = SideChannelServer("127.0.0.1", 0, "p-0", "ab" * 16, clock=lambda: now[0])
    with contextlib.closing(server), contextlib.closing(SideChannelClient()) as client:
        address, token, ref = endpoint("127.0.0.1", server.port), b"t" * 16, PrefillRef("a", None)
        server.pushes.enable([token], lease_s)
        server.pushes.started("p-a", "a", 10, "0" * 16)
        server.hold("p-a", b"n" * 16, lease_s, SOURCE)
        server.pushes.finished("p-a", b"n" * 16, SOURCE, 0)
        home = InstanceAddress("decode-1", "cd" * 16, "127.0.0.1", 5600)
        message = PushInto(ref, home, 0, 0, 0, 0, 1, b"a" * 16, SOURCE, 0, 10, "0" * 16, compare_s)
        outcomes: dict[int, Outcome] = {}
        answer = client.send(address, message, 60.0)
        sends = lambda: outcomes.update(client.receive()) or bool(server.counts().get("PushInto"))  # noqa: E731
        until(sends, "the registration")
        now[0] = 25.0  # of writing
        client.send(address, PushEnded(token, 0, b"a" * 16, True, "", True), 60.0)
        until(lambda: bool(outcomes.update(client.receive())) or answer in outcomes, "the answer")
        if outcomes[answer].state is PushState.WRITING:  # a question so old may be answered before the end has come
            answer = client.send(address, message, 60.0)
            until(lambda: bool(outcomes.update(client.receive())) or answer in outcomes, "the end")
        assert outcomes[answer].lease == LeaseRef("p-a", b"n" * 16)
        now[0] = 25.0 + compare_s  # the decode instance has died: nothing more is heard of it
        assert not server.take_freed()
        now[0] += lease_s
        assert [entry.request_id for entry in server.take_freed()] == ["p-a"]


def test_an_aborted_request_gives_the_blocks_back(target, config):
    with contextlib.closing(Vouching(config)) as writer:
        writer.whole()
        target.loop.submit([target.request(writer)], [])
        until(lambda: writer.server.counts().get("GetChecksums") == 1, "the question for sums")
        target.loop.submit([], ["d"])
        assert target.wait_for("d") == [False]
        assert not target.quarantined
        freed(writer, "a")


def test_a_prefill_that_was_preempted_is_not_compared(writer, target):
    ask_early(writer, target)
    writer.compute(0, 10)
    writer.server.pushes.progressed([("p-a", OTHER_BLOCKS, 6)], 1)
    until(lambda: ordered(writer.server.pushes, "p-a"), "the order")
    writer.step_done(1)
    writer.finish(step=2)
    writer.step_done(2)
    assert target.wait_for("d") == [True]
    freed(writer, "a")
    assert "GetChecksums" not in writer.server.counts() and not target.verified


@pytest.mark.parametrize("config", [{"verify": "off"}], indirect=True)
def test_without_verification_nothing_is_asked(writer, target):
    assert pushed(writer, target)
    assert not {"GetChecksums", "ReadDone"} & writer.server.counts().keys()
    freed(writer, "a")


@pytest.mark.parametrize("config", [{"verify": "off"}], indirect=True)
def test_a_prefill_instance_that_offers_no_sums_fails_the_request_and_is_freed(writer, config):
    with contextlib.closing(Target(msgspec.structs.replace(config, verify="all"))) as target:
        assert not pushed(writer, target)
        assert target.failures == {"verification": 1}
        freed(writer, "a")


@pytest.mark.parametrize("config", [{"mode": "auto"}], indirect=True)
@pytest.mark.parametrize("bandwidth", [Bandwidth(1e9, 9e9), Bandwidth(9e9, 1e9)])
def test_mode_auto_verifies_either_way(writer, target, monkeypatch, bandwidth):
    monkeypatch.setattr("vllm_pd_connector.worker.peers.auto_mode.measure_bandwidth", found(bandwidth))
    assert target.received(both_ways(writer, target)) == [True]
    target.until(lambda: target.verified == 1, "the count")
    freed(writer, "a")

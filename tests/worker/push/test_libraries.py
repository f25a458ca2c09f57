"""Pushes over real libraries, into decode instances in processes that are stopped and killed.

Whatever happens to one of them: its push ends with the reason within its deadline, pushes into others are untouched,
the prefill's blocks are kept until nothing reads them, and the next life is written into.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from tests.support.patience import PATIENCE_S
from tests.support.worker.decode_instance import D_BLOCKS, until
from tests.support.worker.library_processes import VARIANTS, Instance, instances
from tests.support.worker.prefill_instance import MODEL, P_BLOCKS, P_SIDE, TOKENS, keep, table, write
from tests.support.worker.writer import DIGEST, SOURCE, Writer, freed
from tests.support.worker.written_instance import WRITTEN_SIDE, be_written
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.metadata import ReadFrom, ReceiveRequest
from vllm_pd_connector.protocol.params.parse import RemotePrefill
from vllm_pd_connector.protocol.wire.push_messages import PrefillRef, Pushed, PushInto, PushState
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.transport.registry import create

Start = Callable[[str], Instance]


class Wanted:
    """A push that a decode instance wants, asked for again until it has ended."""

    def __init__(self, writer: Writer, instance: Instance, name: str):
        home, _ = instance.place
        blocks = (BlockTable.of(0, D_BLOCKS),)
        reader_rank = (0, 0, 0, 0, 1)
        self._message = PushInto(
            PrefillRef(name, None), home, *reader_rank, secrets.token_bytes(16), blocks, 4, TOKENS, DIGEST
        )
        self._address = endpoint("127.0.0.1", writer.server.port)
        self._client = SideChannelClient()
        self._client.send(self._address, self._message, PATIENCE_S)

    def end(self, *, terminal: bool = True) -> Pushed:
        """What became of it; with `terminal`, when nothing of it is written any more."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            assert time.monotonic() < deadline, "the push does not end"
            for _, reply in self._client.receive():
                assert isinstance(reply, Pushed), reply
                if reply.state is PushState.DONE or (reply.state is PushState.FAILED and reply.terminal >= terminal):
                    self._client.close()
                    return reply
                self._client.send(self._address, self._message, PATIENCE_S)
            time.sleep(0.005)


def expected(instance: Instance) -> np.ndarray:
    _, worker = instance.place
    memory = worker.memory.copy()
    write(MODEL, WRITTEN_SIDE, worker, [table(*D_BLOCKS)], memory, 4, TOKENS)
    return memory


@pytest.fixture
def start(variant: str) -> Iterator[Start]:
    with instances(be_written, variant) as start_one:
        yield start_one


@pytest.fixture
def deadline_s() -> float:
    return 2 * PATIENCE_S  # so that no slow machine reaches it


@pytest.fixture
def writer(variant: str, deadline_s: float) -> Iterator[Writer]:
    name, options = VARIANTS[variant]
    config = Config(transport="loopback", mode="push", transfer_timeout=deadline_s, handshake_timeout=60.0)
    with contextlib.closing(Writer(config, make=lambda: create(name, options))) as made:
        yield made


def pushed(writer: Writer, instance: Instance, name: str) -> Wanted:
    writer.whole(name)
    return Wanted(writer, instance, name)


def know(writer: Writer, *targets: Instance) -> None:
    """Have the writer linked to these instances."""
    names = [f"warm {i}" for i in range(len(targets))]
    for name, target in zip(names, targets, strict=True):
        assert pushed(writer, target, name).end().state is PushState.DONE
    freed(writer, *names)


def test_the_bytes_arrive(writer: Writer, start: Start) -> None:
    target = start("d-0")
    assert pushed(writer, target, "a").end().state is PushState.DONE
    assert (target.ask("memory") == expected(target)).all()
    freed(writer, "a")


def read(writer: Writer, remote: RemotePrefill) -> list[bool]:
    """Have the writer's workers read a conversation's turn into the blocks of a prefill; whether each of them has."""
    source = ReadFrom(remote.peer, remote.remote_engine_id, remote.lease, remote.tables)
    turn = ReceiveRequest("p-a", source, SOURCE, 0, TOKENS, spare=True)
    for loop in writer.loops:
        loop.submit([turn], [])
    ended: list[bool] = []

    def all_ended() -> bool:
        for loop in writer.loops:
            results, report = loop._outbox.take_results(), loop._outbox.take_report()
            assert not results.failed_recving, "of which vLLM is told nothing"
            ended.extend(report is None or name not in report.spared for name in results.finished_recving)
        return len(ended) == len(writer.loops)

    until(all_ended, "every worker to have read")
    return ended


def test_an_instance_that_writes_reads_what_decode_has_kept_and_writes_it_on(
    writer: Writer, variant: str, start: Start
) -> None:
    """From one rank in one layout, to two in another, to one again."""
    target = start("d-0")
    with instances(keep, variant) as start_keeping:
        held = start_keeping("d-1")
        assert read(writer, held.ask("turn")) == [True, True]
        for worker in writer.workers:
            right = worker.memory.copy()
            write(MODEL, P_SIDE, worker, [table(*P_BLOCKS)], right, 0, TOKENS)
            assert (worker.memory == right).all()
        lost = held.ask("lost")
        held.kill()
        assert read(writer, lost) == [False, False], "and is computed"
    writer.begin("a")
    writer.finish("a")
    assert Wanted(writer, target, "a").end().state is PushState.DONE
    assert (target.ask("memory") == expected(target)).all()
    freed(writer, "a")


@pytest.mark.parametrize("deadline_s", [8.0])
def test_a_stopped_instance_fails_its_push_at_the_deadline_and_delays_no_other(
    writer: Writer, start: Start, deadline_s: float
) -> None:
    stuck, other = start("d-0"), start("d-1")
    know(writer, stuck, other)
    stuck.stop()
    waiting = pushed(writer, stuck, "a")
    names = [f"b{i}" for i in range(10)]
    for wanted in [pushed(writer, other, name) for name in names]:
        assert wanted.end().state is PushState.DONE
    freed(writer, *names)
    failure = waiting.end(terminal=False)
    assert failure.state is PushState.FAILED and f"longer than {deadline_s:g} s" in failure.reason
    assert not failure.terminal
    freed(writer, "a")
    stuck.kill()
    assert pushed(writer, other, "c").end().state is PushState.DONE
    assert (other.ask("memory") == expected(other)).all()


def test_a_killed_instance_fails_its_push_before_the_deadline_and_its_next_life_is_used(
    writer: Writer, start: Start
) -> None:
    first, other = start("d-0"), start("d-1")
    know(writer, first, other)
    first.stop()
    waiting = pushed(writer, first, "a")
    until(lambda: writer.server.counts()["PushInto"] > 2, "the push to be asked for")
    assert pushed(writer, other, "b").end().state is PushState.DONE
    first.kill()
    failure = waiting.end(terminal=False)
    assert failure.state is PushState.FAILED and "longer than" not in failure.reason
    freed(writer, "a", "b")
    second = start("d-0")
    assert pushed(writer, second, "c").end().state is PushState.DONE
    assert (second.ask("memory") == expected(second)).all()

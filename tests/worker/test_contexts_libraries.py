"""Bytes between worker processes under context parallelism, over real libraries, read and written."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.support.forked import PROCESSES
from tests.support.geometry.numbers import write
from tests.support.geometry.request import Move, make_move
from tests.support.geometry.world import Model, Side, Worker, instance
from tests.support.worker.library_processes import VARIANTS
from tests.support.worker.prefill_instance import real
from vllm_pd_connector.bounded import at_once
from vllm_pd_connector.geometry.spans import Slices
from vllm_pd_connector.metadata import ReadFrom, ReceiveRequest
from vllm_pd_connector.protocol.peer import Peer, PeerKey
from vllm_pd_connector.protocol.wire.messages import LeaseRef
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef, PushInto
from vllm_pd_connector.transport.base import Transfer, TransferStatus, Transport
from vllm_pd_connector.transport.registry import create
from vllm_pd_connector.worker.push.link import WriteLink
from vllm_pd_connector.worker.receive.read_link import ReadLink

PATIENCE_S = 150.0
LATENT, ONE_HEAD = Model(layers=2, heads=0, key=8), Model(layers=2, heads=1)
TWO, BY_FOUR, FOUR = (
    Side(tp=2, dcp=2, block_tokens=8, interleave=1),
    Side(tp=2, dcp=2, block_tokens=16, interleave=4, layout="HND"),
    Side(tp=2, pcp=2, dcp=4, block_tokens=16, interleave=2),
)
ONE = Side(block_tokens=6)
PAIRS = {
    "2 to 1": (LATENT, TWO, ONE),
    "1 to 2": (ONE_HEAD, ONE, BY_FOUR),
    "2 to 4": (LATENT, BY_FOUR, FOUR),
}


def prefill(pipe: Connection, move: Move, transport: str, options: Mapping[str, Any]) -> None:
    """Main of a process with all ranks of a prefill instance: says its manifests and, where it is told a decode
    instance's, writes into that; ends with the pipe."""
    workers = instance(move.model, move.source)
    transports = [create(transport, options) for _ in workers]
    own = []
    for worker, one in zip(workers, transports, strict=True):
        write(move.model, move.source, worker, move.source_tables, worker.memory, 0, move.stop)
        one.register(real(worker).segments)
        own.append(msgspec.msgpack.encode(real(worker, one.describe())))
    pipe.send(own)
    told = pipe.recv()
    for worker, one in zip(workers, transports, strict=True):
        link = WriteLink(Peer(PeerKey("h", 1, ""), lambda: 0.5), "decode-1", "", 0.0, told, own=own)
        at_once(link.connecting(real(worker), one))
        for manifest in map(msgspec.msgpack.Decoder(type(real(worker))).decode, told):
            into = PushInto(
                PrefillRef("a", None), InstanceAddress("decode-1", "0" * 32, "h", 1), *manifest.parallel.rank, 0, 1,
                secrets.token_bytes(16), tuple(move.destination_tables), move.start, move.stop, "0" * 16,
            )  # fmt: skip
            part = link.bind_push(into, move.source_tables, move.start, move.stop, whole=True)
            for runs in part.direct:
                finish(one, one.write(link.ranks[into.rank], runs))
    pipe.send("written")
    pipe.recv()
    for one in transports:
        one.close()


def finish(transport: Transport, transfer: Transfer) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while transport.poll(transfer) is not TransferStatus.DONE:
        assert time.monotonic() < deadline, "the transfer does not end"
        time.sleep(0.001)


def expected(move: Move, worker: Worker) -> np.ndarray:
    memory = worker.memory.copy()
    write(move.model, move.destination, worker, move.destination_tables, memory, move.start, move.stop)
    return memory


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("pair", PAIRS)
def test_every_rank_gets_its_tokens_read_and_written(variant: str, pair: str) -> None:
    model, source, destination = PAIRS[pair]
    move = make_move(model, source, destination, 16, 77)
    name, options = VARIANTS[variant]
    pipe, child = PROCESSES.Pipe()
    process = PROCESSES.Process(target=partial(prefill, child, move, name, options), daemon=True)
    process.start()
    child.close()
    theirs = answer(pipe)
    workers = instance(model, move.destination, "decode-1")
    before = [worker.memory.copy() for worker in workers]
    wanted = [expected(move, worker) for worker in workers]
    transports = [create(name, options) for _ in workers]
    for worker, one in zip(workers, transports, strict=True):
        one.register(real(worker).segments)
    request = ReceiveRequest(
        "d", ReadFrom(PeerKey("h", 1, ""), "p-0", LeaseRef("a", bytes(16)), tuple(move.source_tables)),
        tuple(move.destination_tables), move.start, move.stop,
    )  # fmt: skip
    for worker, one in zip(workers, transports, strict=True):
        link = ReadLink(Peer(PeerKey("h", 1, ""), lambda: 0.5), "p-0", "", 0.0, theirs)
        at_once(link.connecting(real(worker), one))
        bound = at_once(link.binding(request.read.blocks, request.blocks, request.start, request.stop))
        for peer, slices in bound.reads:
            assert isinstance(slices, Slices)
            for runs in slices:
                finish(one, one.read(peer, runs))
    read = [worker.memory.copy() for worker in workers]
    for worker, memory in zip(workers, before, strict=True):
        worker.memory[:] = memory
    both = zip(workers, transports, strict=True)
    pipe.send([msgspec.msgpack.encode(real(worker, one.describe())) for worker, one in both])
    assert answer(pipe) == "written"
    for worker, of_reads, right in zip(workers, read, wanted, strict=True):
        for memory in (of_reads, worker.memory):
            wrong = np.flatnonzero(memory != right)
            assert not len(wrong), (worker.manifest.parallel, wrong[:10])
    pipe.send(None)
    process.join(PATIENCE_S)
    assert process.exitcode == 0
    for one in transports:
        one.close()


def answer(pipe: Any) -> Any:
    assert pipe.poll(PATIENCE_S), "the process does not answer"
    return pipe.recv()

"""A prefill instance without vLLM, for tests of decode workers: ranks with bytes and transports, and a side channel.

It stands apart from the tests because processes of its own run it (`test_loop_libraries`), and importing vLLM would
cost each of them seconds.
"""

from __future__ import annotations

import ipaddress
import secrets
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tests.support.geometry.numbers import write
from tests.support.geometry.world import Model, Side, Worker, instance, table
from tests.support.handed_over import answer_of
from vllm_pd_connector.geometry.manifest import Manifest, Segment
from vllm_pd_connector.protocol.params.parse import RemotePrefill
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.transport.registry import create
from vllm_pd_connector.worker.peers.process_watch import ProcessWatches

MODEL = Model(layers=2, heads=4)
P_SIDE = Side(tp=2, layout="HND")
LOOPBACK = ipaddress.ip_address("127.0.0.1")
P_BLOCKS, TOKENS = (3, 1, 5), 10


def real(worker: Worker, endpoint: bytes = b"", **changes: object) -> Manifest:
    """The worker's manifest with the true address of its memory."""
    segment = Segment(worker.memory.ctypes.data, len(worker.memory), "cpu", 0)
    return msgspec.structs.replace(worker.manifest, segments=(segment,), endpoint=endpoint, **changes)


class PrefillInstance:
    """See the module; `hand_over` is what its scheduler half would do when a prefill ends."""

    def __init__(
        self,
        engine_id: str = "p-0",
        port: int = 0,
        make: Callable[[], Transport] = LoopbackTransport,
        workers: Sequence[Worker] | None = None,
        **changes: object,
    ):
        """`workers`: others than this module's; nothing is written into their caches."""
        self.workers = workers or instance(MODEL, P_SIDE, engine_id)
        self.transports = [make() for _ in self.workers]
        self.lives = [ProcessWatches(LOOPBACK, lambda: None) for _ in self.workers]
        manifests = []
        for worker, life, transport in zip(self.workers, self.lives, self.transports, strict=True):
            if workers is None:
                write(MODEL, P_SIDE, worker, [table(*P_BLOCKS)], worker.memory, 0, TOKENS)
            bare = real(worker)
            transport.register(bare.segments)
            manifests.append(msgspec.msgpack.encode(real(worker, transport.describe(), life=life.own, **changes)))
        self.engine_id, self.incarnation = engine_id, secrets.token_hex(16)
        self.server = SideChannelServer("127.0.0.1", port, engine_id, self.incarnation)
        self.manifests = manifests
        self.server.set_manifests(manifests)

    def hand_over(
        self, request_id: str, *, hold: bool = True, duration: float = 60.0, **changes: object
    ) -> RemotePrefill:
        """The parameters of a request whose prefill ran here and, with `hold`, is leased for `duration` seconds."""
        answer = answer_of(
            remote_block_ids=(P_BLOCKS,), first_blocks=(0,), remote_request_id=f"p-{request_id}",
            nonce=secrets.token_hex(16), remote_engine_id=self.engine_id, incarnation=self.incarnation,
            remote_host="127.0.0.1", remote_port=self.server.port, remote_num_tokens=TOKENS,
        )  # fmt: skip
        if hold:
            self.server.hold(answer.lease.request_id, answer.lease.nonce, duration)
        return msgspec.structs.replace(answer, **changes)

    def close(self) -> None:
        self.server.close()
        for transport in self.transports:
            transport.close()
        self.end_workers()

    def end_workers(self) -> None:
        """What is seen of the workers when their processes end."""
        for life in self.lives:
            life.close()


def serve(pipe: Connection, engine_id: str, transport: str, options: Mapping[str, Any]) -> None:
    """Main of a process with a prefill instance: tells its port, then hands requests over until the pipe is closed."""
    _hand_over(pipe, PrefillInstance(engine_id, make=lambda: create(transport, options)))


def keep(pipe: Connection, engine_id: str, transport: str, options: Mapping[str, Any]) -> None:
    """The same of a decode instance that keeps conversations: one rank, in a layout of its own."""
    side = Side(tp=1, layout="NHD")
    workers = instance(MODEL, side, engine_id)
    write(MODEL, side, workers[0], [table(*P_BLOCKS)], workers[0].memory, 0, TOKENS)
    _hand_over(pipe, PrefillInstance(engine_id, make=lambda: create(transport, options), workers=workers))


def _hand_over(pipe: Connection, prefill: PrefillInstance) -> None:
    pipe.send(prefill.server.port)
    try:
        while True:
            pipe.send(prefill.hand_over(pipe.recv()))
    except (EOFError, OSError):
        prefill.close()

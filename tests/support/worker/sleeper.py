"""A prefill instance with vLLM's sleep: the real worker half over memory that cannot be touched while it sleeps.

Asked "sleep" and "wake" it does what an engine of vLLM 0.33 does, in its order: leases end and peers are told, the
worker half lets go of the caches, the memory goes; the memory comes back with other bytes, the worker half registers it
anew, and the side channel listens as another incarnation. Whoever touches the memory meanwhile dies of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import secrets
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from tests.support.geometry.numbers import write
from tests.support.geometry.world import Side, instance, table
from tests.support.handed_over import answer_of
from tests.support.ports import free_port
from tests.support.worker.prefill_instance import MODEL, P_BLOCKS, TOKENS
from vllm_pd_connector.geometry.manifest import Manifest, Segment
from vllm_pd_connector.protocol.lease import End
from vllm_pd_connector.sidechannel.server import SideChannelServer

SIDE = Side(tp=1, layout="HND")
LEASE_S = 60.0


class Caches:
    """Memory of its own for a worker of `tests.support.geometry.world`; what it holds is lost while it is away."""

    def __init__(self, side: Side, engine_id: str) -> None:
        [self.worker] = instance(MODEL, side, engine_id)
        self._side = side
        self._size = -(-len(self.worker.memory) // mmap.PAGESIZE) * mmap.PAGESIZE
        self._mapped = mmap.mmap(-1, self._size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = np.frombuffer(self._mapped, np.uint8)[: len(self.worker.memory)]
        self.fill()

    @property
    def address(self) -> int:
        return int(self.memory.ctypes.data)

    def fill(self) -> None:
        """The tokens of a prompt, and something else everywhere else."""
        self.memory[:] = self.worker.memory
        write(MODEL, self._side, self.worker, [table(*P_BLOCKS)], self.memory, 0, TOKENS)

    def go(self) -> None:
        self.memory[:] = 0
        self._protect(0)

    def come_back(self) -> None:
        self._protect(mmap.PROT_READ | mmap.PROT_WRITE)

    def manifest(self, *_: object, incarnation: str, **__: object) -> Manifest:
        segment = Segment(self.address, len(self.memory), "cpu", 0)
        return msgspec.structs.replace(self.worker.manifest, segments=(segment,), incarnation=incarnation)

    def _protect(self, how: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mprotect(ctypes.c_void_p(self.address), ctypes.c_size_t(self._size), how):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


class Sleeper:
    """See the module."""

    def __init__(self, engine_id: str, transport: str, options: Mapping[str, Any]) -> None:
        from vllm_pd_connector.config import Config
        from vllm_pd_connector.worker import half as half_module

        self.engine_id, self.port = engine_id, free_port()
        self.caches = Caches(SIDE, engine_id)
        vars(half_module)["build_manifest"] = self.caches.manifest  # what vLLM would have told
        config = Config(transport=transport, transport_options=dict(options), shutdown_timeout=0)
        roles = SimpleNamespace(is_kv_producer=True, is_kv_consumer=False)
        place = SimpleNamespace(data_parallel_index=0, use_ubatching=False)
        self.half = half_module.WorkerHalf(
            config, SimpleNamespace(kv_transfer_config=roles, parallel_config=place), SimpleNamespace()
        )
        self.half.register({})
        self.serve()

    def serve(self) -> None:
        self.incarnation = secrets.token_hex(16)
        self.server = SideChannelServer("127.0.0.1", self.port, self.engine_id, self.incarnation)
        self.server.set_manifests([self.half.encoded_manifest()])

    def answer(self, question: str) -> Any:
        match question:
            case "sleep":
                self.server.drop_all(End.ASLEEP)
                self.server.close()
                for _ in range(2):  # vLLM may say it again
                    self.half.unregister()
                self.caches.go()
            case "wake":
                self.caches.come_back()
                self.caches.fill()
                for _ in range(2):
                    self.half.restore()
                self.serve()
            case name:
                return self.hand_over(name)
        return question

    def hand_over(self, name: str) -> Any:
        answer = answer_of(
            remote_block_ids=(P_BLOCKS,), first_blocks=(0,), remote_request_id=f"p-{name}",
            nonce=secrets.token_hex(16), remote_engine_id=self.engine_id, incarnation=self.incarnation,
            remote_host="127.0.0.1", remote_port=self.port, remote_num_tokens=TOKENS,
        )  # fmt: skip
        self.server.hold(answer.lease.request_id, answer.lease.nonce, LEASE_S)
        return answer


def serve(pipe: Connection, engine_id: str, transport: str, options: Mapping[str, Any]) -> None:
    """Main of a process: answers what it is asked until the pipe is closed."""
    sleeper = Sleeper(engine_id, transport, options)
    pipe.send(sleeper.port)
    try:
        while True:
            pipe.send(sleeper.answer(pipe.recv()))
    except (EOFError, OSError):
        sleeper.half.shutdown()
        sleeper.server.close()

"""Workers that outlive their engine core and write on, over real libraries: the core is a process that is killed."""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import msgspec

from tests.support.worker.core_process import DIGEST, be_core
from tests.support.worker.decode_instance import D_BLOCKS, START, Decode, lacking, until
from tests.support.worker.library_processes import VARIANTS, Instance, instances
from tests.support.worker.prefill_instance import MODEL, P_BLOCKS, P_SIDE, TOKENS, instance, real, table, write
from tests.support.worker.writer import SOURCE, whole
from vllm_pd_connector.config import Config
from vllm_pd_connector.metadata import PushFrom, ReceiveRequest
from vllm_pd_connector.protocol.peer import PeerKey
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef, WithdrawPush
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.registry import create
from vllm_pd_connector.worker.outbox import Outbox
from vllm_pd_connector.worker.push.driver import PushSetup
from vllm_pd_connector.worker.push.step_clock import StepClock
from vllm_pd_connector.worker.transfer_loop import TransferLoop

CONFIG = Config(transport="loopback", mode="push", handshake_timeout=20.0, staging_bytes=0)


class Workers:
    """The workers of a prefill instance whose core is elsewhere; their writes wait until `go_on` is set."""

    def __init__(self, core: Instance, variant: str):
        self.go_on, self.held = threading.Event(), list[str]()
        self.loops, manifests = [], []
        workers = instance(MODEL, P_SIDE, "p-0")
        tokens = [secrets.token_bytes(16) for _ in workers]
        for i, worker in enumerate(workers):
            write(MODEL, P_SIDE, worker, [table(*P_BLOCKS)], worker.memory, 0, TOKENS)
            setup = PushSetup(endpoint("127.0.0.1", core.place), tokens[i], StepClock())
            loop = TransferLoop(CONFIG, real(worker), lambda: self._make(variant), Outbox(), i, len(workers), setup)
            manifests.append(msgspec.msgpack.encode(real(worker, loop.start(), scratch=loop.scratch, life=loop.life)))
            self.loops.append(loop)
        self.kept = workers  # their memory
        assert core.ask((manifests, tokens)) == "serves"

    def _make(self, variant: str) -> Transport:
        transport = create(*VARIANTS[variant])
        begin = transport.write

        def held(*arguments: Any) -> Any:
            self.held.append(threading.current_thread().name)
            self.go_on.wait()
            return begin(*arguments)

        transport.write = held  # type: ignore[method-assign]
        return transport

    def close(self) -> None:
        self.go_on.set()
        for loop in self.loops:
            loop.close()


@contextlib.contextmanager
def decode_instance(variant: str) -> Iterator[tuple[Decode, InstanceAddress]]:
    decode = Decode(CONFIG, lambda: create(*VARIANTS[variant]))
    server = SideChannelServer("127.0.0.1", 0, "decode-1", secrets.token_hex(16))
    described = real(decode.worker, decode.loop._started.result(), life=decode.loop.life)
    server.set_manifests([msgspec.msgpack.encode(described)])
    try:
        yield decode, InstanceAddress("decode-1", server._incarnation, "127.0.0.1", server.port)
    finally:
        decode.loop.close()
        server.close()


def test_what_workers_without_a_core_write_lands_in_blocks_that_are_nobody_elses(variant, monkeypatch) -> None:
    with instances(be_core, variant) as start, decode_instance(variant) as (decode, home):
        core = start("p-0")
        workers = Workers(core, variant)
        try:
            assert core.ask(("a", SOURCE, TOKENS)) == "finished"
            peer = PeerKey("127.0.0.1", core.place, "")
            terms = PushFrom(peer, "p-0", PrefillRef("a", None), home, DIGEST)
            order = ReceiveRequest("d", terms, (lacking(D_BLOCKS),), START, TOKENS)
            withdrawn: list[object] = []
            ask = decode.loop._calls.ask

            def counted(address: str, request: object, timeout_s: float, handler: Any = None) -> None:
                if isinstance(request, WithdrawPush):
                    withdrawn.append(request)
                    timeout_s = min(timeout_s, 0.5)
                ask(address, request, timeout_s, handler)  # type: ignore[arg-type]

            monkeypatch.setattr(decode.loop._calls, "ask", counted)
            decode.loop.submit([order], [])
            until(lambda: len(workers.held) == 2, "both workers to begin their writes")
            core.kill()
            assert decode.wait_for("d") == [False]
            assert decode.quarantined == {"d"}

            def asks_in_vain() -> None:
                asked = len(withdrawn)
                decode.until(
                    lambda: bool(decode.drained) or len(withdrawn) > asked + 1, "questions to a port that refuses"
                )

            asks_in_vain()
            assert not decode.drained and (decode.worker.memory == decode.before).all()
            workers.go_on.set()
            until(lambda: whole(decode.worker.memory, decode.written()), "what the workers wrote")
            asks_in_vain()
            assert not decode.drained, "it landed in blocks that were given back"
        finally:
            workers.close()
        decode.until(lambda: decode.drained == {"d"}, "the quarantine to end with the workers")

"""A prefill worker that writes and a decode worker that is written into, in one process."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from tests.support.geometry.numbers import write
from tests.support.geometry.world import instance, table
from tests.support.push.asked import asked_for
from tests.support.worker.decode_instance import D_BLOCKS, START, Decode, in_its_thread, lacking, set_faults, until
from tests.support.worker.prefill_instance import MODEL, P_BLOCKS, P_SIDE, TOKENS, real
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.metadata import PushFrom, ReceiveRequest
from vllm_pd_connector.protocol.peer import PeerKey
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker.outbox import Outbox
from vllm_pd_connector.worker.push.active import ActivePush
from vllm_pd_connector.worker.push.driver import PushSetup
from vllm_pd_connector.worker.push.step_clock import StepClock
from vllm_pd_connector.worker.push.waves import waves_of
from vllm_pd_connector.worker.transfer_loop import TransferLoop

DIGEST = "0" * 16
SOURCE = (BlockTable.of(0, P_BLOCKS),)


class Writer:
    """A prefill instance that writes: its workers' loops and transports, and a side channel. With `push_when` "layers"
    every layer is a wave."""

    def __init__(self, config: Config, port: int = 0, make: Callable[[], Transport] | None = None):
        self.workers = instance(MODEL, P_SIDE, "p-0")
        self.incarnation = secrets.token_hex(16)
        self.server = SideChannelServer("127.0.0.1", port, "p-0", self.incarnation)
        self.tokens = [secrets.token_bytes(16) for _ in self.workers]
        self.transports = [] if make else [LoopbackTransport() for _ in self.workers]
        self.clocks = [StepClock() for _ in self.workers]
        by_layer = config.push_when == "layers"
        self.waves = [
            waves_of(list(dict.fromkeys(tensor.layer for tensor in worker.manifest.tensors)) if by_layer else [])
            for worker in self.workers
        ]
        self.loops, manifests = [], []
        for i, worker in enumerate(self.workers):
            home = endpoint("127.0.0.1", self.server.port)
            setup = PushSetup(home, self.tokens[i], self.clocks[i], self.waves[i])
            transport = make or partial(self.transports.__getitem__, i)
            loop = TransferLoop(config, real(worker), transport, Outbox(), i, len(self.workers), setup)
            manifest = real(worker, loop.start(), scratch=loop.scratch, life=loop.life)
            manifests.append(msgspec.msgpack.encode(manifest))
            self.loops.append(loop)
        self.server.set_manifests(manifests, self.tokens)
        self.server.pushes.enable(self.tokens, wait_timeout_s=config.kv_lease_duration)

    def compute(self, start: int, stop: int, layers: Container[str] | None = None) -> None:
        """The forward of the next step has filled tokens [start, stop), in all layers or these."""
        for worker in self.workers:
            write(MODEL, P_SIDE, worker, [table(*P_BLOCKS)], worker.memory, start, stop, layers)

    def step_done(self, step: int) -> None:
        for loop in self.loops:
            loop.step_launched(step, lambda: True)

    def waves_done(self, step: int, waves: int) -> None:
        for loop in self.loops:
            loop.step_launched(step, lambda: True, waves)

    def begin(self, name: str = "a") -> str:
        request_id = f"p-{name}"
        assert self.server.pushes.started(request_id, name, TOKENS, DIGEST)
        return request_id

    def finish(self, name: str = "a", step: int = 0, nonce: bytes | None = None) -> bytes:
        """The prefill has ended and is held; returns the lease's nonce."""
        nonce = nonce or secrets.token_bytes(16)
        self.server.hold(f"p-{name}", nonce, 60.0, SOURCE)
        if not self.server.pushes.finished(f"p-{name}", nonce, SOURCE, step):
            self.server.drop(f"p-{name}")
        return nonce

    def whole(self, name: str = "a") -> bytes:
        self.compute(0, TOKENS)
        self.begin(name)
        return self.finish(name)

    def pushes(self) -> list[list[ActivePush]]:
        """What each worker knows of its pushes."""
        return [in_its_thread(loop, partial(_pushes_of, loop)) for loop in self.loops]

    def wait_for_orders(self) -> None:
        """Until every worker has been told to write what a step computes that is not done."""
        for loop in self.loops:
            until(partial(in_its_thread, loop, partial(_waits_for_a_step, loop)), "an order")

    def close(self) -> None:
        for loop in self.loops:
            loop.close()
        self.server.close()


class Target(Decode):
    """A decode worker with the side channel at which it is found."""

    def __init__(self, config: Config, make: Callable[[], Transport] | None = None, **changes: object):
        super().__init__(config, make)
        self.server = SideChannelServer("127.0.0.1", 0, "decode-1", secrets.token_hex(16))
        self.server.set_manifests(
            [msgspec.msgpack.encode(real(self.worker, self.endpoint, life=self.loop.life, **changes))]
        )
        self.home = InstanceAddress("decode-1", self.server._incarnation, "127.0.0.1", self.server.port)

    def request(
        self,
        writer: Writer,
        request_id: str = "d",
        name: str = "a",
        nonce: bytes | None = None,
        **changes: Any,
    ) -> ReceiveRequest:
        ref = PrefillRef(name if nonce is None else f"p-{name}", nonce)
        peer = PeerKey("127.0.0.1", writer.server.port, "" if nonce is None else writer.incarnation)
        terms = PushFrom(peer, "p-0", ref, self.home, DIGEST)
        start = changes.get("start", START)
        blocks = (lacking(D_BLOCKS, start),)
        fields: dict[str, Any] = {"source": terms, "blocks": blocks, "start": start, "stop": TOKENS}
        return ReceiveRequest(request_id, **(fields | changes))

    def close(self) -> None:
        self.loop.close()
        self.server.close()


CONFIG = Config(transport="loopback", mode="push")
TINY = 512  # chunks of 64 bytes: what a rank gives to one page of one layer


def writes(loop: TransferLoop) -> bool:
    """Whether the loop's pushes are under way, and not only ordered."""

    def look(now: float) -> bool:
        pushes, streams = _pushes_of(loop, now), loop._stager._streams
        staged = [stream.owner for stream in streams if any(flight.transfer is not None for flight in stream.in_flight)]
        return bool(pushes) and all(push.in_flight.transfers or push in staged for push in pushes)

    return in_its_thread(loop, look)


def _pushes_of(loop: TransferLoop, _: float) -> list[ActivePush]:
    assert loop._pushes is not None
    return list(loop._pushes._pushes.values())


def _waits_for_a_step(loop: TransferLoop, _: float) -> bool:
    assert loop._pushes is not None
    return loop._pushes.waiting


def pushed(writer: Writer, target: Target, request_id: str = "d", name: str = "a") -> bool:
    """Whether a prefill arrives for which is asked when it has ended."""
    writer.whole(name)
    [arrived] = target.received(target.request(writer, request_id, name))
    return arrived


def begin_writes(writer: Writer, target: Target) -> None:
    """Have every worker begin to write such a prefill."""
    writer.whole()
    target.loop.submit([target.request(writer)], [])
    until(lambda: all(writes(loop) for loop in writer.loops), "the writes of every worker")


def hold_writes(writer: Writer, target: Target) -> None:
    """The same, and have none of them end."""
    set_faults(writer.transports, held=True)
    begin_writes(writer, target)


def ask_early(writer: Writer, target: Target, request_id: str = "d", name: str = "a") -> None:
    """Have a prefill begin of which everything is asked for before anything is computed."""
    target.loop.submit([target.request(writer, request_id, name, start=0)], [])
    writer.begin(name)
    until(lambda: asked_for(writer.server.pushes, f"p-{name}"), "the registration")


def freed(writer: Writer, *names: str) -> None:
    """Wait until exactly these prefills' blocks are free."""
    seen: list[str] = []

    def enough() -> bool:
        seen.extend(entry.request_id for entry in writer.server.take_freed())
        return len(seen) >= len(names)

    until(enough, f"{names} to be freed")
    assert sorted(seen) == sorted(f"p-{name}" for name in names)


def over(writer: Writer) -> None:
    """Wait until every worker has said that it writes nothing of what was asked for."""
    table = writer.server.pushes._table
    assert table is not None
    until(lambda: not table._registrations and not table._draining, "the workers' word that nothing is written")


def whole(memory: Sequence[int], expected: np.ndarray) -> bool:
    return bool((np.asarray(memory) == expected).all())

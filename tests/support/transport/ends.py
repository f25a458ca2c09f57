"""The two ends of a connection under test: memory, a transport, and a peer that a test can kill, freeze and ask.

`End` is one side. `ProcessPeer` is an `End` in a process of its own, driven over a pipe; `InProcessPeer` is one beside
the test, for transports that live in one process. Both answer the same calls, so that tests do not know which it is.
"""

from __future__ import annotations

import hashlib
import mmap
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

from tests.support.forked import Child
from tests.support.gpu.stand_in import prepare
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.transport.base import Transfer, TransferStatus, Use, is_met
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.transport.registry import create

PATIENCE_S = 60.0


def until(condition: Callable[[], Any], what: str) -> Any:
    """The first true value of `condition`; fails when it stays false."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        value = condition()
        if value:
            return value
        time.sleep(0.0005)
    raise AssertionError(f"waited {PATIENCE_S:.0f} s for {what}")


def pattern(seed: int, length: int) -> bytes:
    return np.random.default_rng(seed).bytes(length)


class End:
    """`length` bytes of memory, registered as two adjacent segments with a transport.

    Starting and closing an engine may take seconds, so tests that leave theirs in order share one: `renew` makes it as
    new for the next of them.
    """

    device, number = "cpu", 0

    def __init__(self, transport: str, options: dict[str, Any], length: int, *, serves: bool = True) -> None:
        self.length = length
        self.clock = time.process_time
        self.address = self.allocate(length)
        half = length // 2
        self.segments = (
            Segment(address=self.address, length=half, device=self.device, device_id=self.number),
            Segment(self.address + half, length - half, device=self.device, device_id=self.number),
        )
        self.transport: Any = create(transport, options, Use(serves=serves, memory=self.device, device_id=self.number))
        self.transport.register(self.segments)
        self.endpoint: bytes = self.transport.describe()
        self._peers: dict[bytes, Any] = {}
        self._connected: list[Any] = []

    def allocate(self, length: int) -> int:
        self._map = mmap.mmap(-1, length, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = np.frombuffer(self._map, dtype=np.uint8)
        return int(self.memory.ctypes.data)

    def hello(self) -> tuple[bytes, tuple[Segment, ...], int]:
        return self.endpoint, self.segments, self.address

    def fill(self, seed: int) -> None:
        self.memory[:] = np.frombuffer(pattern(seed, self.length), dtype=np.uint8)

    def zero(self) -> None:
        self.memory[:] = 0

    def content(self, offset: int, length: int) -> bytes:
        return self.memory[offset : offset + length].tobytes()

    def digest(self) -> bytes:
        return hashlib.blake2b(self.memory.data).digest()

    def connect(self, endpoint: bytes, segments: tuple[Segment, ...]) -> Any:
        until(lambda: is_met(self.transport, endpoint), "the meeting's end")
        self._connected.append(self.transport.connect(endpoint, segments))
        return self._connected[-1]

    def disconnect(self, peer: Any) -> None:
        self._connected.remove(peer)
        self.transport.disconnect(peer)

    def renew(self) -> None:
        """Zeros and no peer; only for an end whose transfers have all ended."""
        for peer in tuple(self._connected):
            self.disconnect(peer)
        self.zero()

    def peer(self, endpoint: bytes, segments: tuple[Segment, ...]) -> Any:
        if endpoint not in self._peers:
            until(lambda: is_met(self.transport, endpoint), "the meeting's end")
            self._peers[endpoint] = self.transport.connect(endpoint, segments)
        return self._peers[endpoint]

    def read_all(self, endpoint: bytes, segments: tuple[Segment, ...], address: int) -> None:
        self.finish(self.transport.read(self.peer(endpoint, segments), whole(address, self.address, self.length)))

    def write_all(self, endpoint: bytes, segments: tuple[Segment, ...], address: int) -> None:
        """Fill the other end's memory with the beginning of ours."""
        length = sum(segment.length for segment in segments)
        self.finish(self.transport.write(self.peer(endpoint, segments), whole(self.address, address, length)))

    def cpu_seconds(self) -> float:
        return self.clock()

    def finish(self, transfer: Transfer) -> None:
        until(lambda: self.transport.poll(transfer) is TransferStatus.DONE, "the end of a transfer")


class GpuEnd(End):
    """An `End` whose memory is on the first CUDA device."""

    device = "cuda"

    def allocate(self, length: int) -> int:
        import torch

        prepare()
        self._torch = torch
        torch.cuda.set_device(self.number)
        self.tensor = torch.zeros(length, dtype=torch.uint8, device=f"cuda:{self.number}")
        torch.cuda.synchronize()
        return int(self.tensor.data_ptr())

    def fill(self, seed: int) -> None:
        self.tensor.copy_(self._torch.frombuffer(bytearray(pattern(seed, self.length)), dtype=self._torch.uint8))
        self._torch.cuda.synchronize()

    def zero(self) -> None:
        self.tensor.zero_()
        self._torch.cuda.synchronize()

    def content(self, offset: int, length: int) -> bytes:
        self._torch.cuda.synchronize()
        return bytes(self.tensor[offset : offset + length].cpu().numpy().tobytes())

    def digest(self) -> bytes:
        return hashlib.blake2b(self.content(0, self.length)).digest()


class SecondGpuEnd(GpuEnd):
    """On the second."""

    number = 1


def whole(source: int, destination: int, length: int) -> Runs:
    return runs([(source, destination, length)])


def runs(rows: list[tuple[int, int, int]]) -> Runs:
    columns = np.array(rows, dtype=np.int64).reshape(-1, 3)
    return Runs(columns[:, 0].copy(), columns[:, 1].copy(), columns[:, 2].copy())


class InProcessPeer:
    """An `End` beside the test; the faults of the loopback transport stand for signals."""

    def __init__(self, transport: str, options: dict[str, Any], length: int) -> None:
        self._end = End(transport, options, length)
        self._end.clock = time.thread_time  # the loopback has no thread of its own
        assert isinstance(self._end.transport, LoopbackTransport)
        self._faults = self._end.transport.faults
        self.endpoint, self.segments, self.address = self._end.hello()

    def call(self, method: str, *arguments: Any) -> Any:
        return getattr(self._end, method)(*arguments)

    def ask(self, method: str, *arguments: Any) -> None:
        self._question = (method, *arguments)

    def answer(self) -> Any:
        return self.call(*self._question)

    def kill(self) -> None:
        self._faults.lost = True

    def freeze(self) -> None:
        self._faults.frozen = True

    def thaw(self) -> None:
        self._faults.frozen = False

    def tell_to_stop(self) -> None:
        """It takes no time here."""

    def stop(self) -> None:
        self._end.transport.close()


class ProcessPeer(Child):
    """An `End` in a child process."""

    def __init__(self, transport: str, options: dict[str, Any], length: int, kind: type[End] = End) -> None:
        super().__init__(PATIENCE_S, serve, kind, transport, options, length)
        self._told = False
        self.endpoint, self.segments, self.address = self.answer()

    def call(self, method: str, *arguments: Any) -> Any:
        self.ask(method, *arguments)
        return self.answer()

    def ask(self, method: str, *arguments: Any) -> None:
        """Like `call`, but the peer works while the test goes on; `answer` follows."""
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        failure, value = super().answer()
        assert not failure, f"in the peer: {failure}"
        return value

    def tell_to_stop(self) -> None:
        """Begin what `stop` waits for."""
        if not self._told and self._process.is_alive():
            self.thaw()
            self._pipe.send(None)
        self._told = True

    def stop(self) -> None:
        self.tell_to_stop()
        self.join()
        self._pipe.close()
        self._process.close()


def serve(pipe: Connection, kind: type[End], transport: str, options: dict[str, Any], length: int) -> None:
    """Main of a `ProcessPeer`: answers calls until None arrives or the test process ends."""
    end = kind(transport, options, length)
    pipe.send(("", end.hello()))
    while True:
        try:
            request = pipe.recv()
        except EOFError:
            break
        if request is None:
            break
        method, arguments = request
        try:
            pipe.send(("", getattr(end, method)(*arguments)))
        except Exception as error:
            pipe.send((repr(error), None))
    end.transport.close()

"""Publishes batches of events over real sockets, as vLLM's `ZmqEventPublisher` does, and replays them if asked to."""

from __future__ import annotations

import asyncio
import contextlib

import zmq
import zmq.asyncio

from tests.support.ports import free_port


class Publisher:
    """One life of an engine's publisher; `log` is what it published. Make it and close it in an event loop."""

    def __init__(self, events: str = "", replay: str = "", log: list[bytes] | None = None):
        self.events = events or f"tcp://127.0.0.1:{free_port()}"
        self.replay = replay or f"tcp://127.0.0.1:{free_port()}"
        self.log: list[bytes] = [] if log is None else log
        self.replays: list[int] = []
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.XPUB)  # tells of subscribers, where PUB does not
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._socket.bind(self.events)
        self._replays = self._context.socket(zmq.ROUTER)
        self._replays.bind(self.replay)
        self._task = asyncio.create_task(self._serve_replays())

    async def heard(self) -> None:
        """Wait for a subscriber."""
        assert await self._socket.recv() == b"\x01"

    async def publish(self, payload: bytes, comes: bool = True) -> None:
        """The next batch; if it does not come, only the log has it."""
        number = len(self.log)
        self.log.append(payload)
        if comes:
            await self.send(number.to_bytes(8, "big"), payload)

    async def send(self, number: bytes, *payload: bytes) -> None:
        await self._socket.send_multipart((b"kv", number, *payload))

    async def _serve_replays(self) -> None:
        while True:
            client, _, start = await self._replays.recv_multipart()
            self.replays.append(int.from_bytes(start, "big"))
            for number, payload in enumerate(self.log):
                if number >= self.replays[-1]:
                    await self._replays.send_multipart((client, b"", b"kv", number.to_bytes(8, "big"), payload))
            end = (-1).to_bytes(8, "big", signed=True)
            await self._replays.send_multipart((client, b"", b"", end, b""))

    async def close(self) -> None:
        self._task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._task
        self._context.destroy(linger=0)

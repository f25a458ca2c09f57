"""Both legs of one hand-off by hand, in any order, and an instance that is paused."""

from __future__ import annotations

import time
import urllib.request
import uuid
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest

from examples.launch import Server
from tests.support.servers.cluster import Cluster, until
from tests.support.servers.workload import Answer, Prompt, Refused, ask, by_length

LONG = 1900


class Legs:
    """Both legs of one hand-off, by hand, each in a thread of its own."""

    def __init__(self, pair: Cluster, prompt: Prompt, pool: ThreadPoolExecutor):
        self.pair, self.prompt, self._pool = pair, prompt, pool
        self.name = uuid.uuid4().hex

    @property
    def prefill_body(self) -> dict[str, Any]:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": self.name}
        return self.pair.body(self.prompt, max_tokens=1, kv_transfer_params=params)

    @property
    def decode_body(self) -> dict[str, Any]:
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": self.name,
            "remote_engine_id": self.pair.prefill_engine_id,
            "remote_host": "127.0.0.1",
            "remote_port": int(self.pair.prefill.spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"]),
        }
        return self.pair.body(self.prompt, kv_transfer_params=params)

    def prefill(self) -> Future[Answer]:
        return self._pool.submit(ask, self.pair.prefill.url, self.prefill_body)

    def decode(self) -> Future[Answer]:
        return self._pool.submit(ask, self.pair.decode.url, self.decode_body)

    def right(self, answer: Future[Answer]) -> None:
        assert answer.result().tokens == self.pair.baselines.tokens(self.pair.model, self.prompt)

    def registered(self) -> None:
        """Wait until the decode instance holds blocks for this request."""
        until(lambda: self.pair.holds_blocks(self.pair.decode), "the decode instance to allocate")


@contextmanager
def legs(pair: Cluster, length: int = LONG, scenario: str = "orders") -> Iterator[Legs]:
    """Of the prompt of this length in a scenario, which neither side has."""
    for server in (pair.prefill, pair.decode):
        pair.forget_prefixes(server)
    with ThreadPoolExecutor(4) as pool:
        yield Legs(pair, by_length(scenario, length), pool)


@contextmanager
def paused(server: Server) -> Iterator[None]:
    """An instance schedules nothing; what comes queues."""

    def tell(route: str) -> None:
        request = urllib.request.Request(f"{server.url}/{route}", method="POST")
        with urllib.request.urlopen(request, timeout=30) as answer:
            answer.read()

    tell("pause?mode=keep")
    try:
        yield
    finally:
        tell("resume")


@contextmanager
def refused_within(seconds: float) -> Iterator[None]:
    """The one who asks is refused, and in this time."""
    began = time.monotonic()
    with pytest.raises(Refused) as refused:
        yield
    took = time.monotonic() - began
    assert refused.value.status >= 400
    assert took < seconds, f"refused after {took:.1f} s, {seconds:g} s are allowed"

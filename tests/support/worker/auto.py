"""A self-test that finds given figures."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from dataclasses import replace

from tests.support.worker.prefill_instance import TOKENS
from tests.support.worker.writer import SOURCE, Target, Writer
from vllm_pd_connector.metadata import Either, ReadFrom, ReceiveRequest
from vllm_pd_connector.worker.peers.bandwidth_test import Bandwidth


def found(bandwidth: Bandwidth) -> Callable[..., Generator[None, None, Bandwidth]]:
    """A self-test that is over at once."""

    def test(*_: object) -> Generator[None, None, Bandwidth]:
        yield from ()
        return bandwidth

    return test


def both_ways(writer: Writer, target: Target) -> ReceiveRequest:
    """A request whose prefill can be read and can be written."""
    writer.compute(0, TOKENS)
    writer.begin()
    request = target.request(writer, nonce=writer.finish(nonce=secrets.token_bytes(16)))
    push = request.push
    assert push is not None and push.lease is not None
    return replace(request, source=Either(ReadFrom(push.peer, "p-0", push.lease, SOURCE), push))

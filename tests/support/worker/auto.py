"""A self-test that finds given figures."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Generator
from dataclasses import replace

from tests.support.worker.prefill_instance import P_BLOCKS, TOKENS
from tests.support.worker.writer import DIGEST, Target, Writer
from vllm_pd_connector.metadata import ReceiveRequest
from vllm_pd_connector.protocol.params.answer import remote_prefill_params
from vllm_pd_connector.protocol.params.parse import parse_remote_prefill
from vllm_pd_connector.worker.peers.bandwidth_test import Bandwidth


def found(bandwidth: Bandwidth) -> Callable[..., Generator[None, None, Bandwidth]]:
    """A self-test that is over at once."""

    def test(*_: object) -> Generator[None, None, Bandwidth]:
        yield from ()
        return bandwidth

    return test


def both_ways(writer: Writer, target: Target) -> ReceiveRequest:
    """A request whose prefill can be read and can be written."""
    params = remote_prefill_params(
        block_ids=[P_BLOCKS], first_blocks=[0], request_id="p-a", nonce=secrets.token_bytes(16),
        lease_seconds=60.0, prompt_digest=DIGEST,
        engine_id="p-0", incarnation=writer.incarnation, host="127.0.0.1", port=writer.server.port,
        tp_size=2, dcp_size=1, pp_size=1, num_tokens=TOKENS, transfer_mode="push",
    )  # fmt: skip
    remote = parse_remote_prefill(params)
    writer.compute(0, TOKENS)
    writer.begin()
    nonce = writer.finish(nonce=remote.lease.nonce)
    return replace(target.request(writer, nonce=nonce), remote=remote, either=True)

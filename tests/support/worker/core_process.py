"""The engine core of a prefill instance in a process of its own, which tests kill: a side channel, and what its
scheduler half would tell it. Its workers are elsewhere."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.sidechannel.server import SideChannelServer

DIGEST = "0" * 16


def be_core(pipe: Connection, engine_id: str, transport: str, options: Mapping[str, Any]) -> None:
    """Main: tells its port, gets the workers' manifests and secrets, then the tables and length of prefills."""
    server = SideChannelServer("127.0.0.1", 0, engine_id, secrets.token_hex(16))
    pipe.send(server.port)
    try:
        manifests, tokens = pipe.recv()
        server.set_manifests(manifests, tokens)
        server.pushes.enable(tokens, wait_timeout_s=60.0)
        pipe.send("serves")
        while True:
            name, tables, tokens_held = pipe.recv()
            finish(server, name, tables, tokens_held)
            pipe.send("finished")
    except (EOFError, OSError):
        server.close()


def finish(server: SideChannelServer, name: str, tables: tuple[BlockTable, ...], length: int) -> None:
    """A prefill of this name comes, ends and is held."""
    request_id, nonce = f"p-{name}", secrets.token_bytes(16)
    assert server.pushes.started(request_id, name, length, DIGEST)
    server.hold(request_id, nonce, 60.0, tables)
    assert server.pushes.finished(request_id, nonce, tables, 0)

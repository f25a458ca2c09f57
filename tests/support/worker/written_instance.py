"""A decode instance without vLLM that prefill instances write into: one rank's memory, its transport, a side channel.

It asks for nothing itself: whoever tests sends `PushInto` in its name, also while it is stopped.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from tests.support.geometry.world import Side, instance
from tests.support.worker.prefill_instance import LOOPBACK, MODEL, real
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress
from vllm_pd_connector.sidechannel.server import SideChannelServer
from vllm_pd_connector.transport.registry import create
from vllm_pd_connector.worker.peers.process_watch import ProcessWatches

WRITTEN_SIDE = Side(tp=1, layout="NHD")


def be_written(pipe: Connection, engine_id: str, transport: str, options: Mapping[str, Any]) -> None:
    """Main of a process: tells where it is found and what its memory holds, and the latter again whenever asked."""
    [worker] = instance(MODEL, WRITTEN_SIDE, engine_id)
    end = create(transport, options)
    end.register(real(worker).segments)
    life = ProcessWatches(LOOPBACK, lambda: None)
    server = SideChannelServer("127.0.0.1", 0, engine_id, secrets.token_hex(16))
    server.set_manifests([msgspec.msgpack.encode(real(worker, end.describe(), life=life.own))])
    pipe.send((InstanceAddress(engine_id, server._incarnation, "127.0.0.1", server.port), worker))
    try:
        while pipe.recv():
            pipe.send(worker.memory)
    except (EOFError, OSError):
        server.close()
        end.close()
        life.close()

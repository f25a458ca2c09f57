"""What becomes of a transfer over Mooncake when the line to its peer is closed, over a stand-in for the library's
engine and real lines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.support.transport.ends import runs, until
from tests.support.transport.line_proxy import Proxy
from vllm_pd_connector.errors import PeerLost, TransferError
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.transport.endpoint import seal, unseal
from vllm_pd_connector.transport.liveness_link import LivenessState
from vllm_pd_connector.transport.mooncake import transport as mooncake
from vllm_pd_connector.transport.mooncake.engine import MooncakeOptions
from vllm_pd_connector.transport.mooncake.whereabouts import Whereabouts
from vllm_pd_connector.transport.ranges import Ranges

MEMORY = Segment(address=1 << 20, length=1 << 20, device="cpu", device_id=0)


class Engine:
    """Takes descriptors; all have failed or run."""

    failed = False

    def get_rpc_port(self) -> int:
        return 7

    def batch_transfer_async(self, *_: Any) -> int:
        return 1

    def transfer_check_status(self, _batch: int) -> int:
        return -1 if self.failed else 0


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[mooncake.MooncakeTransport, mooncake.MooncakeTransport]]:
    """Two transports with the memory `MEMORY`."""
    module = SimpleNamespace(TransferOpcode=SimpleNamespace(Read=0, Write=1))
    monkeypatch.setattr(mooncake, "load_module", lambda *_: module)
    monkeypatch.setattr(mooncake, "start_engine", lambda *_, serves: (Engine(), "tcp"))
    with ExitStack() as ending:
        made = []
        for _ in range(2):
            one = mooncake.MooncakeTransport(MooncakeOptions(protocol="tcp", address="127.0.0.1"))
            ending.callback(one.close)
            one._openings.close()
            one._openings = SimpleNamespace(  # type: ignore[assignment]
                ready=lambda opening: True, end_exchanges=lambda opening, now: None, close=lambda: None
            )
            one._ranges = Ranges.of([MEMORY], "this worker")
            made.append(one)
        yield made[0], made[1]


@pytest.mark.parametrize("proxied", [False, True])
def test_a_write_whose_peer_may_live_behind_a_proxy_is_not_over(ends: Any, proxied: bool) -> None:
    """The proxy has ended, and the peer takes what its connections hold."""
    here, there = ends
    endpoint = unseal("mooncake", there.describe())
    with closing(Proxy(there._liveness.port)) as proxy:
        where = msgspec.msgpack.decode(endpoint.metadata, type=Whereabouts)
        if proxied:
            where = msgspec.structs.replace(where, line_port=proxy.port)
        peer = here.connect(seal("mooncake", endpoint.name, msgspec.msgpack.encode(where), "tcp"), [MEMORY])
        if proxied:
            proxy.carry()
        until(lambda: peer.liveness.state is LivenessState.OPEN, "the line")
        transfer = here.write(peer, runs([(MEMORY.address, MEMORY.address, 64)]))
        here.poll(transfer)
        assert transfer.in_flight
        (proxy if proxied else there).close()
    until(lambda: peer.liveness.state is LivenessState.LOST, "the end of the line")
    here._engine.failed = True
    with pytest.raises(TransferError) as failure:
        here.poll(transfer)
    assert failure.value.terminal is isinstance(failure.value, PeerLost) is not proxied


def test_an_end_that_does_not_close_is_not_lost_for_its_peers(ends: Any) -> None:
    """Its engine goes on, and may still move what they asked for."""
    here, there = ends
    line = here.connect(there.describe(), (MEMORY,)).liveness
    until(lambda: line.state is LivenessState.OPEN, "the line to be open")

    def refuses() -> None:
        raise TransferError("still opening", terminal=False)

    there._openings.close = refuses
    with pytest.raises(TransferError, match="still opening"):
        there.close()
    time.sleep(0.2)  # in which its end would be seen
    assert line.state is LivenessState.OPEN
    there._openings.close = lambda: None
    there.close()
    until(lambda: line.state is LivenessState.LOST, "its end to be seen")

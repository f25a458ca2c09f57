"""Links connect to a rank when their transport has met it, and leave the turn meanwhile."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.support.geometry.world import Model, Side, instance
from vllm_pd_connector.protocol.peer import Peer, PeerKey
from vllm_pd_connector.transport.endpoint import seal
from vllm_pd_connector.worker.push.link import WriteLink
from vllm_pd_connector.worker.receive.read_link import ReadLink

LOOKS = 3


class Shy:
    """A transport that has met an endpoint when it is asked for the third time."""

    name = "shy"

    def __init__(self) -> None:
        self.asked: list[bytes] = []
        self.connected: list[bytes] = []

    def meet(self, endpoint: bytes) -> bool:
        self.asked.append(endpoint)
        return self.asked.count(endpoint) >= LOOKS

    def connect(self, endpoint: bytes, segments: Any) -> object:
        assert self.asked.count(endpoint) == LOOKS, "it was not waited for"
        self.connected.append(endpoint)
        return object()


def manifests(side: Side, engine: str) -> list[Any]:
    made = [worker.manifest for worker in instance(Model(heads=4), side, engine)]
    return [
        msgspec.structs.replace(one, endpoint=seal("nixl", f"{engine}-{number}", b"metadata"))
        for number, one in enumerate(made)
    ]


@pytest.mark.parametrize("reads", [True, False])
def test_a_link_asks_until_a_rank_is_met_and_connects_then(reads: bool) -> None:
    prefill, [decode] = manifests(Side(tp=2), "prefill-0"), manifests(Side(tp=1), "decode-0")
    peer = Peer(PeerKey("h", 1, ""), lambda: 0.5)
    theirs = tuple(map(msgspec.msgpack.encode, prefill if reads else [decode]))
    link: Any
    if reads:
        link, local = ReadLink(peer, "prefill-0", "", 0.0, theirs), decode
    else:
        own = tuple(map(msgspec.msgpack.encode, prefill))
        link, local = WriteLink(peer, "decode-0", "", 0.0, theirs, own=own), prefill[0]
    transport, turns = Shy(), 0
    pieces = link.connecting(local, transport, 1 << 20)
    before = 0
    while next(pieces, "over") != "over":
        turns += 1
        assert len(transport.asked) - before <= 1, "a turn waited"
        before = len(transport.asked)
    wanted = [one.endpoint for one in (prefill if reads else [decode])]
    assert transport.connected == wanted and turns > LOOKS

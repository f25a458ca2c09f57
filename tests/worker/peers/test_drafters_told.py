"""The line of a link tells of a drafter's layers that are not moved."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.geometry.test_drafters import drafting
from tests.geometry.test_topology import manifests, with_model
from vllm_pd_connector.bounded import at_once
from vllm_pd_connector.protocol.peer import Peer, PeerKey
from vllm_pd_connector.worker.push.link import WriteLink
from vllm_pd_connector.worker.receive.push_link import AskLink
from vllm_pd_connector.worker.receive.read_link import ReadLink


class Met:
    """A transport that connects to whatever it is given."""

    name = "met"

    def connect(self, endpoint: bytes, segments: object) -> object:
        return object()


@pytest.mark.parametrize("kind", [ReadLink, AskLink, WriteLink])
@pytest.mark.parametrize("drafts", [True, False])
def test_the_line_of_a_link_tells_of_a_drafter_that_is_not_moved(kind: Any, drafts: bool) -> None:
    """Once for each link, whoever moves the bytes."""
    prefill = drafting("p-0", tp=2) if drafts else with_model(manifests(engine="p-0", tp=2), speculative="")
    [decode] = drafting()
    theirs, local = ([decode], prefill[0]) if kind is WriteLink else (prefill, decode)
    told = tuple(map(msgspec.msgpack.encode, theirs))
    own = {"own": tuple(map(msgspec.msgpack.encode, prefill))} if kind is WriteLink else {}
    link = kind(Peer(PeerKey("h", 1, ""), lambda: 0.5), theirs[0].engine_id, "", 0.0, told, **own)
    transport: Any = Met()
    verdict = at_once(link.connecting(local, transport, 1 << 20))
    assert ("writes" in verdict) != (kind is ReadLink)
    assert verdict.endswith(": engine p-0 does not draft") != drafts

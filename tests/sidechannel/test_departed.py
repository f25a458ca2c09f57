"""What the client remembers of servers that end, for owners that ask and for those that never do."""

from __future__ import annotations

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.sidechannel.ends import ENGINE, INCARNATION, address, wait_for
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.server import SideChannelServer


def hear_that_one_ends(client: SideChannelClient) -> str:
    server = SideChannelServer("127.0.0.1", 0, ENGINE, INCARNATION)
    where, before = address(server), len(client._departed)
    client.send(where, m.GetManifests(ENGINE), PATIENCE_S)
    wait_for(lambda: bool(client.receive()))
    server.close()
    wait_for(lambda: bool(client.receive()) or where in client._departed or len(client._departed) > before)
    return where


def test_a_server_that_ends_is_told_once(client: SideChannelClient) -> None:
    where = hear_that_one_ends(client)
    link = client._links[where]
    for _ in range(3):
        client._accept(link, [m.encode(0, m.Failure(m.FailureCode.LEAVING, "it ends"))])
    assert client.take_departed() == [where] and client.take_departed() == []


def test_servers_that_end_are_remembered_in_a_bounded_number_where_nobody_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The renewer of leases never does, and instances come and go for weeks."""
    monkeypatch.setattr("vllm_pd_connector.sidechannel.client.MAX_SERVERS", 2)
    client = SideChannelClient()
    try:
        gone = [hear_that_one_ends(client) for _ in range(3)]
        assert client.take_departed() == gone[1:]
    finally:
        client.close()

"""The two ends of a side channel, for tests that need no others."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.sidechannel.ends import ENGINE, INCARNATION
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.server import SideChannelServer


@pytest.fixture
def server() -> Iterator[SideChannelServer]:
    made = SideChannelServer("127.0.0.1", 0, ENGINE, INCARNATION)
    made.set_manifests([b"rank 0", b"rank 1"])
    yield made
    made.close()


@pytest.fixture
def client() -> Iterator[SideChannelClient]:
    made = SideChannelClient()
    yield made
    made.close()

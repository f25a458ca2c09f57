"""An instance without requests tells what it holds: leases end and blocks come back without another request."""

from __future__ import annotations

import re

import pytest

from examples.launch import Server
from tests.support.servers.cluster import Cluster, until
from tests.support.servers.matrix import PLAIN_ROWS, QUICK_PUSH_ROWS
from tests.support.servers.over import over
from tests.support.servers.workload import SCENARIOS

TOLD = re.compile(r"^vllm:(kv_cache_usage_perc|pd_leases|pd_free_blocks)\{[^}]*\} (\S+)$", re.MULTILINE)
SECONDS = 30.0
"""More than a lease lasts here, and far less than anybody waits who looks at a gauge."""

[PROMPT] = SCENARIOS["idle"]


def told(pair: Cluster, server: Server) -> dict[str, float]:
    """What an instance says of its blocks; asks for nothing that makes it take a step."""
    return {name: float(value) for name, value in TOLD.findall(pair.metrics(server))}


@over([PLAIN_ROWS[0], *QUICK_PUSH_ROWS])
@pytest.mark.parametrize("fetched", [True, pytest.param(False, marks=pytest.mark.unfetched)], ids=["read", "expired"])
def test_an_idle_instance_tells_that_a_lease_has_ended(pair: Cluster, fetched: bool) -> None:
    pair.settle()  # each instance has just served a request, so its gauges are those of now
    before = told(pair, pair.prefill)
    assert before["pd_leases"] == 0
    params = pair.prefill_only(PROMPT)
    until(lambda: told(pair, pair.prefill)["pd_leases"] == 1, "the lease is told")
    if fetched:
        pair.decode_with(PROMPT, params)
    until(lambda: told(pair, pair.prefill) == before, "the idle instance tells that nothing is held", SECONDS)

"""Fixtures of the end-to-end tests: the pair of a row, kept for all tests of the row, and the checks after each test.

A test takes `pair` and is parametrised with `over(rows)`. Whatever it did, afterwards both instances must live, every
block must be free again, not by the end of a lease (but where the test is marked `unfetched`), and every byte that a
decode worker received must equal what the prefill side held.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import signal
import time
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest

from examples.launch import Servers
from tests.support.servers.cluster import Cluster
from tests.support.servers.matrix import ROWS, Row
from tests.support.servers.pairs import ROOT, Pairs


def _row_of(item: pytest.Item) -> Row | None:
    callspec = getattr(item, "callspec", None)
    row = callspec.params.get("pair") if callspec else None
    return row if isinstance(row, Row) else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put the tests of one row side by side, after those without a row: a pair takes most of a minute to start."""
    wanted = config.getoption("--row")
    dropped = [item for item in items if (row := _row_of(item)) and wanted not in row.id]
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = [item for item in items if item not in dropped]
    order = {row: place for place, row in enumerate(ROWS)}
    items.sort(key=lambda item: order.setdefault(row, len(order)) if (row := _row_of(item)) else -1)


@pytest.fixture(scope="session")
def pairs(request: pytest.FixtureRequest) -> Iterator[Pairs]:
    # Not pytest's own temporary directory, which later runs clear: the logs are what one needs after a failure.
    directory = ROOT / "out" / "e2e" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    print(f"servers' logs: {directory / 'logs'}")
    # A run that is told to end, as `timeout` does, ends its servers as one that is interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with Servers(directory / "logs") as servers:
        yield Pairs(servers, directory, request.config.getoption("--kv-connector"))


@pytest.fixture
def pair(request: pytest.FixtureRequest, pairs: Pairs) -> Iterator[Cluster]:
    cluster = pairs.get(request.param)
    cluster.drop_digests()
    expired = cluster.leases_expired()
    try:
        yield cluster
        cluster.settle()
    except BaseException:
        pairs.end()
        raise
    cluster.check_digests()
    if not request.node.get_closest_marker("unfetched"):
        assert cluster.leases_expired() == expired, "blocks came back by the end of a lease alone"


# -- results, from which docs/compatibility.md is made ----------------------------------------------------------------

VERSIONS = ("vllm", "torch", "nixl", "mooncake-transfer-engine-non-cuda", "vllm-pd-connector")

_RESULTS = pytest.StashKey[dict[str, dict[str, object]]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note whether a test of a row of the matrix passed, what is checked after it included."""
    report = yield
    row = _row_of(item)
    if row is not None and not row.beside and not row.drafts and not row.events:
        name = getattr(item, "originalname", item.name)
        fresh = {"test": name, "row": dataclasses.asdict(row), "passed": True}
        record = item.config.stash.setdefault(_RESULTS, {}).setdefault(item.nodeid, fresh)
        record["passed"] = bool(record["passed"]) and report.passed
    return report


def pytest_sessionfinish(session: pytest.Session) -> None:
    results = session.config.stash.get(_RESULTS, {})
    if results:
        path = Path(session.config.getoption("--results"))
        path.parent.mkdir(parents=True, exist_ok=True)
        versions = {name: importlib.metadata.version(name) for name in VERSIONS}
        content = {"versions": versions, "records": list(results.values())}
        path.write_text(json.dumps(content, indent=1) + "\n")

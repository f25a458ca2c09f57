"""What UCX's log says of the ways that it chose."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from vllm_pd_connector.transport import registry
from vllm_pd_connector.transport.nixl.ways import chosen, ways

# Of UCX 1.23, over shared memory and TCP on one host, and over RDMA as its sources print it.
SELF = "[1.2] [vm:7 :0]  ucp_worker.c:1997 UCX  INFO    pd-0a62 self cfg#0 rma_am(tcp/lo)  am(tcp/lo)  ka(tcp/lo)"
LOCAL = (
    "[1.2] [vm:7 :0]  ucp_worker.c:1997 UCX  INFO    pd-0a62 intra-node cfg#1 rma_am(tcp/lo)  amo_am(tcp/lo)  "
    "am(tcp/lo cma/memory)  ka(tcp/lo)"
)
FAR = "[1.2] [vm:7 :0]  ucp_worker.c:1997 UCX  INFO    pd-0a62 inter-node cfg#2 rma(rc_mlx5/mlx5_0:1)  ka(ud/mlx5_0:1)"


def test_each_kind_of_peer_is_told_once() -> None:
    assert chosen("\n".join((SELF, LOCAL, LOCAL, FAR))) == (
        "UCX took rma_am(tcp/lo) am(tcp/lo cma/memory) for a peer on this host",
        "UCX took rma(rc_mlx5/mlx5_0:1) for a peer on another host",
    )
    assert chosen("") == chosen(SELF) == ()


@pytest.mark.parametrize("key", ["UCX_LOG_LEVEL", "UCX_LOG_FILE"])
def test_what_an_operator_has_ucx_log_is_left_alone(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(key, "trace")
    before = dict(os.environ)
    with ways() as told:
        assert dict(os.environ) == before and told() == ()


def test_the_environment_is_as_before_and_warnings_are_not_lost(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for key in ("UCX_LOG_LEVEL", "UCX_LOG_FILE"):
        monkeypatch.delenv(key, raising=False)
    before = dict(os.environ)
    with ways() as told:
        assert told() == ()
        Path(os.environ["UCX_LOG_FILE"]).write_text(f"{LOCAL}\n[1.2] x.c:1 UCX  WARN  no memory to lock\n")
        assert len(told()) == 1
    assert dict(os.environ) == before
    assert [(one.levelno, "no memory to lock" in one.getMessage()) for one in caplog.records] == [
        (logging.WARNING, True)
    ]


def test_a_transport_that_says_nothing_is_asked_in_vain() -> None:
    with registry.ways("loopback") as told:
        assert told() == ()

"""Names of the libraries that we set or rely on and cannot see at work here occur in the wheels that are installed
(docs/design/between-hosts.md). An option that a release renames would be set in vain."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from vllm_pd_connector.transport.mooncake.engine import DEFAULTS

pytestmark = pytest.mark.libraries

MOONCAKE = (
    *DEFAULTS,
    *("MC_FORCE_TCP", "MC_USE_IPV6", "MC_TCP_PROTO", "MC_MIN_RPC_PORT", "MC_MAX_RPC_PORT", "MC_LOG_LEVEL"),
    *("MC_TCP_LANES_PER_PEER", "MC_TCP_MAX_CONNECTIONS_PER_PEER", "MC_TCP_ENABLE_CONNECTION_POOL"),
    "Relaxed ordering disabled via",
)
NAMES = {
    ("mooncake-transfer-engine", "mooncake/engine.so"): MOONCAKE,
    ("nixl-cu", "/libplugin_UCX.so"): ("ucp_ep_flush_nbx", "_ZN9nixlUcxEp7flushEpERPv"),
    ("nixl-cu", "/libucp-"): ("ucp_ep_flush_mem_progress", "KEEPALIVE_INTERVAL"),
    ("nixl-cu", "/libuct_ib.so"): ("PCI_RELAXED_ORDERING",),
}


def installed(wheel: str, file: str) -> list[Path]:
    found = [
        Path(str(one.locate()))
        for distribution in importlib.metadata.distributions()
        if (distribution.metadata["Name"] or "").startswith(wheel)
        for one in distribution.files or ()
        if file in str(one)
    ]
    assert found, f"no file {file} in a wheel {wheel}"
    return found


@pytest.mark.parametrize(("wheel", "file"), NAMES, ids=[file.strip("/") for _, file in NAMES])
def test_names_that_we_rely_on_occur_in_the_wheels(wheel: str, file: str) -> None:
    for path in installed(wheel, file):
        content = path.read_bytes()
        assert not [name for name in NAMES[wheel, file] if name.encode() not in content], path

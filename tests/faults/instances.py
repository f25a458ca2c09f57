"""One `vllm serve` under attack: how it is started, its processes, and what it holds."""

from __future__ import annotations

import json
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from examples.launch import Server, Spec, vllm_spec
from examples.make_models import MODELS, make
from tests.faults.system import processes
from tests.faults.system.network import OF_A_NETWORK, Host
from tests.faults.system.relay import Relay
from tests.support.servers.cluster import HOLDINGS, sibling, together
from tests.support.servers.workload import forgets

LEASE_S = 4.0
LIMITS = {"handshake_timeout": 3.0, "transfer_timeout": 4.0, "confirm_timeout": 3.0, "kv_lease_duration": LEASE_S}
"""Seconds: short, so that a campaign sees deadlines pass."""

UCX_OVER_NETWORK = {"TLS": "tcp", "NET_DEVICES": "net"}
CHUNK = 128
CACHE_BYTES = 64 << 20
"""Small enough that a fault can have every block used again."""


@dataclass(eq=False, slots=True)
class Instance:
    """One `vllm serve`. `relay` stands before a prefill instance's side channel, `side_port` is the port behind it."""

    spec: Spec
    server: Server
    at_start: dict[str, float] = field(default_factory=dict)
    told: frozenset[str] = frozenset()
    relay: Relay | None = None
    engine_id: str = ""
    side_port: int = 0
    generation: int = 0

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def url(self) -> str:
        return self.server.url

    @property
    def pid(self) -> int:
        return self.server.process.pid

    @property
    def _transfer(self) -> Mapping[str, Any]:
        command = self.spec.command
        transfer: Mapping[str, Any] = json.loads(command[command.index("--kv-transfer-config") + 1])
        return transfer

    @property
    def policy(self) -> str:
        """What it does about a read that failed: "fail" or "recompute"."""
        return str(self._transfer["kv_load_failure_policy"])

    @property
    def extra(self) -> Mapping[str, Any]:
        """This project's `kv_connector_extra_config`; beside others it is the first connector."""
        extra: Mapping[str, Any] = self._transfer["kv_connector_extra_config"]
        own: Mapping[str, Any] = extra["connectors"][0]["kv_connector_extra_config"] if "connectors" in extra else extra
        return own

    def processes(self, part: str) -> list[processes.Process]:
        """The processes of a part: "server" (the HTTP server), "engine", "worker"."""
        if part == "server":
            return processes.tree(self.pid)[:1]
        return processes.engines(self.pid) if part == "engine" else processes.workers(self.pid)

    def metrics(self) -> str:
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            return str(answer.read(), "utf-8")

    def forgets(self) -> bool:
        """Whether its prefix cache is empty now: it refuses while blocks are held, and one that has ended begins its
        next life so."""
        try:
            return forgets(self.server)
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionError):
                raise
        except ConnectionError:
            pass
        return True

    def holdings(self) -> dict[str, float]:
        """What it says that it holds; engine steps renew that. A figure that is not told any more is no leak that was
        not found: vLLM's own is there from the start, the connector's from the first that it had to tell."""
        held = {name: float(value) for name, value in HOLDINGS.findall(self.metrics())}
        missing = {"kv_cache_usage_perc", *self.told} - held.keys()
        assert not missing, f"{self.name} does not tell {', '.join(sorted(missing))} on /metrics"
        self.told = frozenset(held)
        return held


def lasting_interfaces() -> list[str]:
    """This host's network interfaces without those of a `Network` that another campaign has made."""
    return [name for _, name in socket.if_nameindex() if not OF_A_NETWORK.fullmatch(name)]


def kept_to(interfaces: Sequence[str]) -> dict[str, str]:
    """What has an instance's UCX use these alone: it takes all that are there when it starts, and UCX 1.23 ends its
    process (`ucp_ep_set_lanes_failed`) when it connects and one of them is gone."""
    return {"UCX_NET_DEVICES": ",".join(interfaces)} if interfaces else {}


def spec_of(
    name: str,
    role: str,
    policy: str,
    family: str,
    extra: Mapping[str, Any],
    host: Host | None,
    tp_size: int,
    hold: Path | None = None,
    more: Sequence[str] = (),
    variables: Mapping[str, str] = MappingProxyType({}),
    store: Path | None = None,
) -> Spec:
    """How an instance is started, on this host or on one of a `Network`. `hold`: its prompts take several steps, and
    its workers can be held (`pd_test_plugins.hold`). `more` are flags of `vllm serve`, `variables` are for it. `store`:
    where a connector beside this project's, in a MultiConnector, keeps prefixes."""
    model = MODELS[family]
    own = {**LIMITS, **extra}
    environment = {"VLLM_SERVER_DEV_MODE": "1", "PD_TEST_POLITE": "1", **model.environment, **variables}
    flags = ["--block-size", str(model.block_size), *model.flags, *more]
    flags += ["--worker-extension-cls", "pd_test_plugins.weights.Operated"]
    if hold is not None:
        environment["PD_TEST_HOLD"] = str(hold)
        flags += ["--max-num-batched-tokens", str(CHUNK)]
    place: dict[str, Any] = {}
    if host is None:
        environment |= kept_to(lasting_interfaces())
    else:
        place = {"host": host.control, "prefix": host.command()}
        environment |= {"VLLM_HOST_IP": host.control, "GLOO_SOCKET_IFNAME": "ctl"}
        options: dict[str, Any] = {"ucx": UCX_OVER_NETWORK}
        if own.get("transport") == "mooncake":
            options = {"address": host.address, "allow_unauthenticated_peers": True}
        own |= {"side_channel_host": host.address, "transport_options": options}
    transfer = {
        "kv_connector": "PDConnector",
        "kv_role": role,
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": own,
    }
    if store is not None:
        both = together(transfer, sibling("StoringConnector", role, store))
        transfer = {**both, "kv_load_failure_policy": policy}
    return vllm_spec(
        name,
        make(model),
        flags=flags,
        tp_size=tp_size,
        transfer=transfer,
        environment=environment,
        cache_bytes=CACHE_BYTES,
        **place,
    )

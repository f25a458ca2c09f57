"""The table of roles and flags: what a prefill instance, a decode instance and the router are started with.

The launcher, the demo, the servers of the tests and the Kubernetes manifests (`examples/manifests.py`) take their words
from here, so none of them can know a role or a flag that the others do not. Standard library only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

MODEL = "Qwen/Qwen3-0.6B"
TRANSPORTS = ("nixl", "mooncake")
MODES = ("pull", "push", "auto")
ROUTER_PORT = 8000
SIDE_CHANNEL_PORT = 5600
SIDE_CHANNEL_STEP = 20
"""An instance adds its data-parallel index, so instances of one host are this many ports apart."""


@dataclass(frozen=True, slots=True)
class Role:
    """One side of a pair."""

    name: str
    """In the names of processes, pods and options."""
    kv_role: str
    """What vLLM calls it."""
    port: int
    """HTTP port of a host's first instance."""
    serves_reads: bool
    """Whether it listens on its side channel in every mode. The other side does where it is written into."""

    def listens(self, mode: str) -> bool:
        """Whether an instance of this role has a side channel in `mode`."""
        return self.serves_reads or mode != "pull"


PREFILL = Role("prefill", "kv_producer", 8100, serves_reads=True)
DECODE = Role("decode", "kv_consumer", 8200, serves_reads=False)
ROLES = (PREFILL, DECODE)

CPU_ENVIRONMENT = {
    # vLLM binds OpenMP threads to cores of its own choice, the same ones in every instance.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    # Even with --enforce-eager the sampler is compiled at the first request, which takes seconds and a C++ compiler.
    "TORCH_COMPILE_DISABLE": "1",
}
CPU_FLAGS = ("--enforce-eager", "--dtype", "float32")
"""float32: greedy tokens of a random model differ between two instances in bfloat16, where near-ties flip."""
CACHE_BYTES = 384 * 1024 * 1024


def last_value(words: Sequence[str], *names: str) -> str | None:
    """What the last of these flags is given, as one word or as two; underscores are dashes, as for vLLM's parser."""
    found = None
    for word, following in zip(words, [*words[1:], ""], strict=False):
        flag, equals, value = word.partition("=")
        if flag.replace("_", "-") in names:
            found = value if equals else following
    return found


def cache_flags(cache_bytes: int = CACHE_BYTES) -> tuple[str, ...]:
    """A cache of this size; on a CPU vLLM would take most of the machine's memory for each instance."""
    return "--kv-cache-memory-bytes", str(cache_bytes)


def transfer_config(role: Role, transport: str, mode: str, settings: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's KVTransferConfig; `settings` are more members of `kv_connector_extra_config`."""
    extra = {"transport": transport, "mode": mode, **settings}
    return {"kv_connector": "PDConnector", "kv_role": role.kv_role, "kv_connector_extra_config": extra}


def serve_words(
    model: str, host: str, port: int, transfer: Mapping[str, Any] | None, flags: Sequence[str] = ()
) -> list[str]:
    """The command of an instance; without `transfer` it has no connector."""
    words = ["vllm", "serve", model, "--host", host, "--port", str(port)]
    if transfer is not None:
        words += ["--kv-transfer-config", json.dumps(transfer)]
    return [*words, *flags]


def router_words(host: str, port: int, instances: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """The command of this project's router over instances at these URLs; it finds their roles out itself."""
    return [
        "vllm-pd",
        "proxy",
        "--host",
        host,
        "--port",
        str(port),
        *flags,
        *(f"--instance={url}" for url in instances),
    ]

"""Configurations of vLLM's own prefill/decode connectors, said in ours.

A key of theirs has a counterpart here, or a line that says why there is none: nothing of a configuration is dropped
without a word. The same lines refuse such a key where it is left in one of ours (`config.parse_config`).

Source: vLLM 0.32 and 0.33, `kv_connector/v1/nixl` (`base_worker.py`, `base_scheduler.py`, `push_scheduler.py`),
`kv_connector/v1/mooncake/mooncake_connector.py`, `config/kv_transfer.py`, `envs.py`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from vllm_pd_connector.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

CONNECTORS: Final[dict[str, dict[str, Any]]] = {
    "NixlConnector": {"transport": "nixl", "mode": "pull"},
    "NixlPullConnector": {"transport": "nixl", "mode": "pull"},
    "NixlPushConnector": {"transport": "nixl", "mode": "push"},
    "MooncakeConnector": {"transport": "mooncake", "mode": "push"},
}
"""In-tree connectors, and what of our configuration stands for the choice of each."""

STORES: Final = (
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "OffloadingConnector",
    "SimpleCPUOffloadConnector",
    "MooncakeStoreConnector",
    "FlexKVConnectorV1",
    "HF3FSKVConnector",
)
"""Connectors of vLLM's that keep prefixes: they go on beside this one."""
OTHERS: Final = ("MoRIIOConnector", "P2pNcclConnector")
"""Connectors, now or formerly of vLLM's, that hand prefills over in ways that have nothing in common with ours."""

_MULTI: Final = "MultiConnector"
_NIXL, _MOONCAKE = "NixlConnector", "MooncakeConnector"
_BOOTSTRAP_PORT = 8998
_BOOTSTRAP_VARIABLE = "VLLM_MOONCAKE_BOOTSTRAP_PORT"

LEASE_LIMIT_S: Final = 600.0
"""The default of `kv_lease_limit`, which no lease may exceed."""

KEYS: Final[dict[str, tuple[str, str]]] = {
    "backends": (_NIXL, 'one NIXL backend, "transport_options": {"backend": …}; several have no counterpart'),
    "num_threads": (_NIXL, "no counterpart: one thread posts and polls, so NIXL needs no threads of its own"),
    "engine_ttl": (_NIXL, "no counterpart: a link that nothing used for an hour is let go"),
    "enforce_handshake_compat": (
        _NIXL,
        "no counterpart: every pair is checked; model_id, weights_version, allow_mixed_quantization allow differences",
    ),
    "bidirectional_kv_xfer": (_NIXL, "conversations, on both sides: prefill reads the last turn from decode"),
    "kv_recompute_threshold": (_NIXL, "no counterpart: whatever decode holds of a conversation's last turn is read"),
    "decoder_kv_blocks_ttl": (_NIXL, "conversation_lease, how long decode keeps a turn"),
    "push_registration_timeout": (_NIXL, "kv_lease_duration, which is also how long a request waits for its prefill"),
    "mooncake_protocol": (_MOONCAKE, '"transport_options": {"protocol": "rdma"}, "tcp" or another of its builds'),
    "device_name": (_MOONCAKE, '"transport_options": {"device": …}'),
    "num_workers": (_MOONCAKE, "no counterpart: one thread posts and polls all transfers of a worker"),
    "bootstrap_server_address": (_MOONCAKE, "bootstrap_port, at side_channel_host of the prefill instance"),
}
"""Keys of their `kv_connector_extra_config` that ours lacks: whose they are, and what to do instead."""

TOP_LEVEL: Final[dict[str, str]] = {
    "kv_buffer_device": "no counterpart: bytes move between the caches where they lie; leave it out, another device "
    "than theirs is refused",
    "kv_port": "side_channel_port in kv_connector_extra_config",
    "kv_connector_module_path": "not needed: the plugin makes PDConnector known to vLLM",
    "enable_permute_local_kv": "no counterpart: unequal layouts are converted by themselves (staging_bytes)",
}
"""Keys beside `kv_connector` that mean nothing to PDConnector."""

_BOTH_SIDES: Final = "both sides change together: PDConnector does not talk to vLLM's own connectors"
_SEVERAL_HOSTS: Final = (
    "instances on several hosts: set side_channel_host to an address that the other side reaches, and "
    "side_channel_keys, or allow_unauthenticated_peers on a network that only you reach"
)
_OF_THE_WHOLE: Final = ("engine_id", "kv_load_failure_policy")
_OUTER_ALONE: Final = "stands beside connectors, not in an entry: the outer one is read"
_KEPT: Final = ("engine_id", "kv_role", "kv_load_failure_policy")


def refusal(key: str) -> str:
    """What to do about a key of an in-tree connector in a configuration of ours; empty if it is none."""
    if key not in KEYS:
        return ""
    whose, instead = KEYS[key]
    return f"{key} is a key of {whose}; here: {instead}"


@dataclass(frozen=True, slots=True)
class Migration:
    """`config` is what to give to --kv-transfer-config. `dropped` are (key, why) of what has no counterpart, `notes`
    what an operator must know or decide."""

    config: dict[str, Any]
    dropped: tuple[tuple[str, str], ...]
    notes: tuple[str, ...]


def migrate(transfer: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Migration:
    """Our configuration for one of an in-tree connector, alone or beside others in a MultiConnector.

    Raises:
        InvalidConfig: another connector, or a value that theirs would not take either.
    """
    if transfer.get("kv_connector") == _MULTI:
        return _migrate_among(transfer, environ)
    name, module = transfer.get("kv_connector"), transfer.get("kv_connector_module_path")
    if isinstance(module, str) and module.partition(".")[0] == __name__.partition(".")[0]:
        raise InvalidConfig(f"kv_connector_module_path is {module}: this is PDConnector already")
    if not isinstance(name, str) or name not in CONNECTORS:
        raise InvalidConfig(f"kv_connector: {name!r} cannot be migrated; {_instead(name)}")
    given = transfer.get("kv_connector_extra_config", {})
    if not isinstance(given, dict):
        raise InvalidConfig(f"kv_connector_extra_config is {given!r}: it must be an object")
    dropped: list[tuple[str, str]] = []
    extra = dict(CONNECTORS[name])
    serves = name == _MOONCAKE and transfer.get("kv_role") != "kv_consumer"
    if serves and not environ.get(_BOOTSTRAP_VARIABLE):
        extra["bootstrap_port"] = _BOOTSTRAP_PORT
    for key, value in given.items():
        if key in _LEASES:  # two times of theirs are one of ours, which must cover both
            least = extra.get("kv_lease_duration", given.get("kv_lease_duration", _THEIR_LEASE_S))
            known = [one for one in (least, value) if isinstance(one, int | float)]
            extra["kv_lease_duration"] = max(known, default=value)
        elif (change := _CHANGES.get(key)) is not None:
            _merge(extra, change(value))
        elif key in KEYS:
            dropped.append((key, KEYS[key][1]))
        else:
            dropped.append((key, f"unknown to {name}, and not carried over"))
    longest = extra.get("kv_lease_duration")
    if isinstance(longest, int | float) and longest > LEASE_LIMIT_S:
        extra["kv_lease_limit"] = longest
    for key in transfer:
        if key not in ("kv_connector", "kv_connector_extra_config", *_KEPT):
            dropped.append((key, TOP_LEVEL.get(key, "not carried over")))
    kept = {key: transfer[key] for key in _KEPT if key in transfer}
    config = {"kv_connector": "PDConnector", **kept, "kv_connector_extra_config": extra}
    return Migration(config, tuple(dropped), tuple(_notes(name, transfer, extra)))


def _instead(name: object) -> str:
    """What to do with a connector that has no counterpart."""
    if name in STORES:
        return (
            "it keeps prefixes: name it behind PDConnector in a MultiConnector (docs/multi-connector.md), and leave "
            "its own hand-over between instances off"
        )
    if name in OTHERS:
        return (
            "none of its keys has a counterpart: write PDConnector's configuration anew (docs/quickstart.md), and take "
            "a router that passes kv_transfer_params on, such as `vllm-pd proxy`, in the place of its proxy"
        )
    return f"one of {', '.join(CONNECTORS)} can, alone or in a {_MULTI}"


def _migrate_among(transfer: Mapping[str, Any], environ: Mapping[str, str]) -> Migration:
    """Of a MultiConnector the one entry of an in-tree connector; what stands beside it stays."""
    extra = transfer.get("kv_connector_extra_config")
    connectors = extra.get("connectors") if isinstance(extra, dict) else None
    if not isinstance(connectors, list) or not all(isinstance(one, dict) for one in connectors):
        raise InvalidConfig(f"connectors is {connectors!r:.60}: it must be a list of objects")
    names = [one.get("kv_connector") for one in connectors]
    places = [at for at, name in enumerate(names) if isinstance(name, str) and name in CONNECTORS]
    if len(places) != 1:
        known = ", ".join(CONNECTORS)
        raise InvalidConfig(f"connectors are {names!r:.200}: one of them, and no more, must be of {known}")
    [at] = places
    own = migrate(connectors[at], environ)
    dropped = [*own.dropped, *((key, _OUTER_ALONE) for key in _OF_THE_WHOLE if key in own.config)]
    entry = {key: value for key, value in own.config.items() if key not in _OF_THE_WHOLE}
    among = [entry, *connectors[:at], *connectors[at + 1 :]]
    notes = [*own.notes, "what is beside PDConnector stays as it was: docs/multi-connector.md says which may"]
    if at:
        notes.append(f"{names[at]} was number {at + 1} of the connectors: PDConnector comes first")
    config = {**transfer, "kv_connector_extra_config": {**(extra or {}), "connectors": among}}
    return Migration(config, tuple(dropped), tuple(notes))


def _backends(value: object) -> dict[str, Any]:
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise InvalidConfig(f"backends is {value!r}: it must be a list of names")
    if len(value) > 1:
        raise InvalidConfig(f"backends is {value!r}: PDConnector uses one NIXL backend; leave one in the list")
    return {} if value == ["UCX"] else {"transport_options": {"backend": value[0]}}


def _protocol(value: object) -> dict[str, Any]:
    if value not in _PROTOCOLS:
        raise InvalidConfig(f"mooncake_protocol is {value!r}: PDConnector knows {', '.join(_PROTOCOLS)}")
    return {"transport_options": {"protocol": value}}


def _bidirectional(value: object) -> dict[str, Any]:
    if not isinstance(value, bool):
        raise InvalidConfig(f"bidirectional_kv_xfer is {value!r}: it must be true or false")
    return {"conversations": True} if value else {}


def _bootstrap(value: object) -> dict[str, Any]:
    port = str(value).rpartition(":")[2]
    if not (port.isascii() and port.isdigit()) or not 1 <= int(port) <= 65535:
        raise InvalidConfig(f"bootstrap_server_address is {value!r}: it must be host:port")
    return {"bootstrap_port": int(port)}


_LEASES: Final = ("kv_lease_duration", "push_registration_timeout")
_THEIR_LEASE_S: Final = 30
"""vLLM's `kv_lease_duration`, where it is not given; `nixl/scheduler.py`."""
_PROTOCOLS: Final = ("rdma", "tcp", "efa", "barex", "hip", "nvlink", "nvlink_intra")
_CHANGES: Final[dict[str, Callable[[Any], dict[str, Any]]]] = {
    "backends": _backends,
    "mooncake_protocol": _protocol,
    "device_name": lambda value: {"transport_options": {"device": value}} if value else {},
    "bootstrap_server_address": _bootstrap,
    "bidirectional_kv_xfer": _bidirectional,
    "decoder_kv_blocks_ttl": lambda value: {"conversation_lease": value},
}


def _merge(extra: dict[str, Any], change: dict[str, Any]) -> None:
    for key, value in change.items():
        extra[key] = extra.get(key, {}) | value if isinstance(value, dict) else value


def _notes(name: str, transfer: Mapping[str, Any], extra: Mapping[str, Any]) -> list[str]:
    notes = [_BOTH_SIDES, _SEVERAL_HOSTS]
    if transfer.get("kv_role") == "kv_both":
        notes.append("kv_role: kv_producer for instances that only prefill and kv_consumer for those that only decode")
    if "kv_lease_duration" in extra and "push_registration_timeout" in transfer.get("kv_connector_extra_config", {}):
        notes.append("kv_lease_duration is also how long prefill keeps finished blocks without hearing from a reader")
    if name == _MOONCAKE:
        notes.append(
            "Mooncake serves peers of other hosts only with allow_unauthenticated_peers: its library knows no keys"
        )
        if "bootstrap_server_address" in transfer.get("kv_connector_extra_config", {}):
            notes.append("bootstrap_server_address: its host has no counterpart, each prefill instance answers its "
                         "router itself, at side_channel_host")  # fmt: skip
        if "bootstrap_port" in extra:
            notes.append(f"bootstrap_port comes before {_BOOTSTRAP_VARIABLE}; leave it out where that is set")
        notes.append("VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT is kv_lease_duration here, and counts from the last word of "
                     "a reader; VLLM_MOONCAKE_CONNECTOR_TIMEOUT is transfer_timeout")  # fmt: skip
    else:
        notes.append("VLLM_NIXL_SIDE_CHANNEL_HOST and VLLM_NIXL_SIDE_CHANNEL_PORT are read as before")
    return notes

"""What an instance says of itself to routers: the labels of one Prometheus series on its `/metrics`.

    vllm:pd_instance_info{engine="0",role="kv_producer",mode="pull",handoff="serial",engine_id="…",…} 1

`/metrics` is served by every instance, prefill and decode, from its start on and without a further port or plugin, so
a router needs nothing but the instance's URL. There is one row per data-parallel engine behind that URL. The values
are those that the engine itself uses: the API server builds the series from the same configuration object.

Both ends are here so that they cannot disagree: `labels` for the instance, `parse` for the router. Neither vLLM nor
an HTTP library is imported, but for `opened`, by which the commands ask instances.
"""

from __future__ import annotations

import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING

from prometheus_client.parser import text_string_to_metric_families

from vllm_pd_connector.errors import ProtocolError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from prometheus_client.samples import Sample

INFO_SERIES = "vllm:pd_instance_info"
INFO_TEXT = "What routers need to know of this instance; always 1."
MAX_PAGE_BYTES = 8 << 20
"""More than any instance has to say on `/metrics`; who asks reads no more."""
opened = urllib.request.build_opener(urllib.request.ProxyHandler({})).open
"""As `urllib.request.urlopen`, without a proxy of the environment's: of a cluster that knows nothing, and an instance's
key is not for it."""
ROLES = ("kv_producer", "kv_consumer", "kv_both")
HANDOFFS = ("serial", "concurrent")


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One data-parallel engine of an instance. Sizes are numbers of ranks; the address is its side channel's.

    `handoff` is how requests are to be brought here, "serial" or "concurrent" (`Config.handoff`). `kv_events` and
    `kv_events_replay` are the endpoints at which it publishes and replays vLLM's KV-cache events, as it binds them;
    empty where it does not. `conversations` is "on" where it keeps turns, or reads them, and empty elsewhere.
    `version` is this package's, empty where an older release does not say it; `server_key` is its side channel's public
    key, empty where it has none."""

    role: str
    mode: str
    handoff: str
    transport: str
    engine_id: str
    side_channel_host: str
    side_channel_port: int
    tp_size: int
    pp_size: int
    dcp_size: int
    dp_size: int
    kv_events: str = ""
    kv_events_replay: str = ""
    conversations: str = ""
    version: str = ""
    server_key: str = ""

    def labels(self) -> dict[str, str]:
        """Names and values of the series' own labels."""
        return {name: str(getattr(self, name)) for name in LABELS}


LABELS: tuple[str, ...] = tuple(EngineInfo.__dataclass_fields__)
_MAY_BE_EMPTY = ("kv_events", "kv_events_replay", "conversations", "version", "server_key")
_NUMBERS = ("side_channel_port", "tp_size", "pp_size", "dcp_size", "dp_size")


def parse(exposition: str) -> dict[int, EngineInfo]:
    """The engines by index that a `/metrics` page tells of; empty if no PDConnector runs there.

    Raises:
        ProtocolError: the page is no exposition, or a row lacks a label or has a value that cannot be.
    """
    rows = [sample.labels for sample in samples(exposition) if sample.name == INFO_SERIES]
    return {_number(row, "engine", least=0): of_labels(row) for row in rows}


def samples(exposition: str) -> Iterator[Sample]:
    """All that a `/metrics` page tells.

    Raises:
        ProtocolError: the page is no exposition.
    """
    try:
        for family in text_string_to_metric_families(exposition):
            yield from family.samples
    except (ValueError, KeyError, IndexError) as error:
        raise ProtocolError(f"/metrics: not a Prometheus exposition: {error}") from error


def of_labels(row: Mapping[str, str]) -> EngineInfo:
    """The engine that `EngineInfo.labels` describes; other names in `row` are passed over.

    Raises:
        ProtocolError: a label is missing or has a value that cannot be.
    """
    missing = [name for name in LABELS if not row.get(name) and name not in _MAY_BE_EMPTY]
    if missing:
        raise ProtocolError(
            f"{INFO_SERIES}: without {', '.join(missing)}; run releases of vllm_pd_connector on both sides that "
            "describe an instance alike"
        )
    for name, known in (("role", ROLES), ("handoff", HANDOFFS)):
        if row[name] not in known:
            raise ProtocolError(f"{INFO_SERIES}: {name}: {row[name][:80]!r} there, one of {', '.join(known)} here")
    words = {name: row.get(name, "") for name in LABELS if name not in _NUMBERS}
    numbers = {name: _number(row, name, least=1) for name in _NUMBERS}
    return EngineInfo(**words, **numbers)  # type: ignore[arg-type]  # the names are the fields'


def _number(row: Mapping[str, str], name: str, *, least: int) -> int:
    text = row.get(name, "")
    # Five digits: Python refuses to read thousands of them with an error of its own.
    if not text.isascii() or not text.isdigit() or len(text) > 5 or not least <= int(text) <= 65535:
        raise ProtocolError(f"{INFO_SERIES}: {name}: {text[:80]!r} there, a number from {least} to 65535 here")
    return int(text)

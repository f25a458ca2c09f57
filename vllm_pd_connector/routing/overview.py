"""What an operator looks at: instances and who moves what between them, from their `/metrics` pages.

`read` makes a `Look` of one page. Two looks at the same instance give rates; a counter that fell was begun anew by a
restart, and its rate is not known. Both `vllm-pd top` and the router's `/ui` show `instance_rows` and `link_rows`.
Pages are other processes' words: what is malformed is a `ProtocolError`, and names are only printed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.instance_info import INFO_SERIES, EngineInfo, of_labels, samples

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

_PREFIX = "vllm:pd_"
_REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
_LINKS: dict[str, Literal["from", "to"]] = {"peer_received_bytes_total": "from", "peer_given_bytes_total": "to"}
_BY_REASON = {"failed_receives_total": "", "failed_pushes_total": "push ", "prefills_not_held_total": "not held: "}
"""What stands before a reason in `Look.failures`."""
_NAME = 64
"""Characters of a name that are shown: ids are a UUID and a rank."""


@dataclass(frozen=True, slots=True)
class Look:
    """One instance at one moment (`at`, seconds of any clock). `values` are the unlabelled series without `vllm:pd_`,
    summed over engines; `failures` count by reason (`_BY_REASON`); `links` are bytes by direction, peer and transport.
    `problem` says why there is nothing, empty if there is."""

    url: str
    at: float
    engines: tuple[EngineInfo, ...] = ()
    requests: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    failures: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[tuple[str, str, str], float] = field(default_factory=dict)
    protocols: frozenset[str] = frozenset()
    problem: str = ""


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One line of the first table; rates are per second, None where two looks are needed and one is there."""

    url: str
    role: str
    mode: str
    transport: str
    version: str
    engines: int
    requests: int
    received_bytes: float | None
    given_bytes: float | None
    leases: int
    leased_blocks: int
    leased_blocks_limit: int
    held_back: int
    quarantined_blocks: int
    free_blocks: int
    failures: str
    problem: str

    @property
    def wrong(self) -> bool:
        """Whether somebody should look at it: clients that leave (`aborted`) are no reason."""
        return bool(self.problem) or any(not told.endswith(" aborted") for told in self.failures.split(", ") if told)


@dataclass(frozen=True, slots=True)
class LinkRow:
    """One line of the second: what an instance gets `from` a peer or gives `to` one."""

    url: str
    way: str
    peer: str
    transport: str
    bytes_per_second: float | None
    bytes: float


def read(page: str, url: str, at: float) -> Look:
    """The look of one page.

    Raises:
        ProtocolError: it is no exposition, or not of an instance with PDConnector.
    """
    values: dict[str, float] = defaultdict(float)
    failures: dict[str, float] = defaultdict(float)
    links: dict[tuple[str, str, str], float] = defaultdict(float)
    engines: list[EngineInfo] = []
    protocols: set[str] = set()
    requests = 0.0
    for sample in samples(page):
        name, labels, value = sample.name.removeprefix(_PREFIX), sample.labels, float(sample.value)
        if not math.isfinite(value):
            continue
        if sample.name == INFO_SERIES:
            engines.append(of_labels(labels))
        elif sample.name in _REQUESTS:
            requests += value
        elif not sample.name.startswith(_PREFIX):
            continue
        elif name in _LINKS:
            links[_LINKS[name], labels.get("peer", ""), labels.get("transport", "")] += value
        elif name in _BY_REASON:
            failures[_BY_REASON[name] + labels.get("reason", "")] += value
        elif name == "transport_info":
            protocols.add(labels.get("protocol", ""))
        elif not {"le", "phase", "reason"} & labels.keys():
            values[name] += value
    if not engines:
        raise ProtocolError("/metrics: no instance with PDConnector that tells its metrics")
    return Look(url, at, tuple(engines), int(requests), values, failures, links, frozenset(protocols))


def instance_rows(now: Iterable[Look], before: Mapping[str, Look]) -> list[InstanceRow]:
    """A row for each look; `before` are earlier ones by URL."""
    return [_row(look, before.get(look.url)) for look in now]


def _row(look: Look, before: Look | None) -> InstanceRow:
    first = look.engines[0] if look.engines else None

    def whole(name: str) -> int:
        return int(look.values.get(name, 0))

    def rate(name: str) -> float | None:
        return None if look.problem else _rate(look, before, look.values.get(name, 0), _value(before, name))

    transport = "" if first is None else "/".join((first.transport, *sorted(look.protocols)))
    return InstanceRow(
        url=look.url,
        role=first.role if first else "",
        mode=first.mode if first else "",
        transport=transport,
        version=first.version if first else "",
        engines=len(look.engines),
        requests=look.requests,
        received_bytes=rate("received_bytes_total"),
        given_bytes=rate("given_bytes_total"),
        leases=whole("leases"),
        leased_blocks=whole("leased_blocks"),
        leased_blocks_limit=whole("leased_blocks_limit"),
        held_back=whole("prefills_held_back"),
        quarantined_blocks=whole("quarantined_blocks"),
        free_blocks=whole("free_blocks"),
        failures=", ".join(_failures(look)),
        problem=look.problem,
    )


def _failures(look: Look) -> Iterator[str]:
    yield from (f"{int(number)} {reason}" for reason, number in sorted(look.failures.items()) if number)
    if look.values.get("weights_unnamed"):
        yield "weights unnamed"


def link_rows(now: Iterable[Look], before: Mapping[str, Look]) -> list[LinkRow]:
    """What moves between whom, the busiest first; a peer that is among the looks is shown by its URL."""
    looks = list(now)
    places = {engine.engine_id: look.url for look in looks for engine in look.engines}
    rows = []
    for look in looks:
        earlier = before.get(look.url)
        for key, amount in look.links.items():
            way, peer, transport = key
            begun = earlier.links.get(key, 0.0) if earlier is not None else 0.0
            speed = _rate(look, earlier, amount, begun)
            rows.append(LinkRow(look.url, way, places.get(peer, peer[:_NAME]), transport, speed, amount))
    return sorted(rows, key=lambda row: (-(row.bytes_per_second or 0.0), -row.bytes, row.url, row.way, row.peer))


def _value(look: Look | None, name: str) -> float:
    return look.values.get(name, 0) if look is not None else 0.0


def _rate(look: Look, before: Look | None, value: float, was: float) -> float | None:
    if before is None or before.problem or look.at <= before.at or value < was:
        return None
    return (value - was) / (look.at - before.at)


def speed(rate: float | None) -> str:
    """A rate of bytes as people read it, empty if it is not known."""
    if rate is None:
        return ""
    for unit in ("B/s", "kB/s", "MB/s"):
        if rate < 1000:
            return f"{rate:.0f} {unit}" if unit == "B/s" else f"{rate:.1f} {unit}"
        rate /= 1000
    return f"{rate:.2f} GB/s"


INSTANCE_HEADS = (
    "instance", "role", "mode", "transport", "requests", "received", "given", "leases", "leased", "held back",
    "quarantine", "free", "failures",
)  # fmt: skip
LINK_HEADS = ("instance", "way", "peer", "transport", "now", "in all")


def instance_cells(row: InstanceRow) -> tuple[str, ...]:
    """What stands below `INSTANCE_HEADS`."""
    if row.problem:
        return (row.url, *[""] * (len(INSTANCE_HEADS) - 2), row.problem)
    leased = f"{row.leased_blocks}/{row.leased_blocks_limit}" if row.leased_blocks_limit else str(row.leased_blocks)
    return (
        row.url, row.role.removeprefix("kv_"), row.mode, row.transport, str(row.requests), speed(row.received_bytes),
        speed(row.given_bytes), str(row.leases), leased, str(row.held_back), str(row.quarantined_blocks),
        str(row.free_blocks), row.failures,
    )  # fmt: skip


def link_cells(row: LinkRow) -> tuple[str, ...]:
    """What stands below `LINK_HEADS`."""
    return (row.url, row.way, row.peer, row.transport, speed(row.bytes_per_second), f"{row.bytes / 1e6:.1f} MB")

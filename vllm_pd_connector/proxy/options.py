"""How a router is started."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from vllm_pd_connector.proxy.instance import InstanceRole
from vllm_pd_connector.proxy.legs import Limits

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

Handoff = Literal["auto", "serial", "concurrent"]
Policy = Literal["prefix", "kv-events"]


@dataclass(frozen=True, slots=True)
class Options:
    """Base URLs of instances by role, or of any role (`instances`, which must say theirs); times are seconds.

    `policy` is by what an instance's cache is judged: "prefix" (by what it was sent) or "kv-events" (by what it
    announces, at the endpoints that it says or that `kv_events` has by its URL: of events, and of replay or empty).
    `slack` is by how many requests in flight an instance that knows a prompt may exceed the least busy one.
    `drop_after`: of bad checks, while others' are good, after which one that was added while the router ran is removed.
    `conversations`: bring what decode instances keep of a turn to the prefill of the next. `introduce`: link instances
    before requests come. `otlp_traces_endpoint`: of a collector of spans.
    """

    prefill: Sequence[str] = ()
    decode: Sequence[str] = ()
    instances: Sequence[str] = ()
    limits: Limits = field(default_factory=lambda: Limits(connect_timeout=5.0, read_timeout=600.0))
    handoff: Handoff = "auto"
    check_interval: float = 2.0
    facts_interval: float = 30.0
    drop_after: float = 3600.0
    slack: int = 2
    policy: Policy = "prefix"
    conversations: bool = False
    introduce: bool = False
    kv_events: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    otlp_traces_endpoint: str | None = None

    def twice(self) -> str:
        """Why one of them cannot be routed to: it is given more than one role; empty if none is."""
        asked: dict[str, set[str]] = {}
        for url, role in self.given():
            asked.setdefault(url, set()).add(role or "instance")
        said = (
            f"{url} is given as --{' and as --'.join(sorted(roles))}; what does both: --instance"
            for url, roles in asked.items()
            if len(roles) > 1
        )
        return next(said, "")

    def given(self) -> Iterator[tuple[str, InstanceRole | None]]:
        """The instances, each with the role that it is to have; None for the one that it says."""
        by_role = (InstanceRole.PREFILL, self.prefill), (InstanceRole.DECODE, self.decode), (None, self.instances)
        return ((url, role) for role, urls in by_role for url in urls)

"""Which failures the restart of an instance excuses: those of requests that had a leg there while it went down.

Where the legs of a request were is in the log of this project's router (`--log-level debug`). An instance that refused
the connection has seen nothing of a request, so only the last one of each role counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEG = re.compile(r": request (\S+): (prefill|decode) at (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Sent:
    """One request: when it was under way (monotonic seconds), and its status, 0 for a broken connection."""

    request_id: str
    started: float
    ended: float
    status: int
    right: bool


@dataclass(frozen=True, slots=True)
class Down:
    """From when to when an instance went down (monotonic seconds)."""

    url: str
    began: float
    ended: float


def legs_of(log: str) -> dict[str, dict[str, str]]:
    """By request id and role: the URL of the instance that was asked last."""
    legs: dict[str, dict[str, str]] = {}
    for request_id, role, url in LEG.findall(log):
        legs.setdefault(request_id, {})[role] = url
    return legs


def unexcused(lost: Sequence[Sent], legs: Mapping[str, Mapping[str, str]], downs: Sequence[Down]) -> list[Sent]:
    """The failures of requests of which no leg was at an instance that went down meanwhile."""
    return [
        one
        for one in lost
        if not any(
            down.url in legs.get(one.request_id, {}).values() and one.started <= down.ended and one.ended >= down.began
            for down in downs
        )
    ]

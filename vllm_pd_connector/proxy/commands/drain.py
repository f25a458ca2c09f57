"""Waiting until an instance may be ended without loss: `vllm-pd drain`.

What an instance has to do shows on its `/metrics`, which vLLM renews with its engine's steps, and this connector asks
an idle engine for one when a lease ends:

    requests   running or waiting in its engine (a decode instance's include those whose caches are on their way)
    leases     finished prefills whose blocks a decode instance will still read; a conversation that is kept for a next
               turn is none: whoever wants it can compute it

Both must be 0 at every look for some seconds: a request that the API server is still reading is in neither. That no new
ones come is the routers' part. This project's are told to send none, and asked whether they still wait for an answer;
others are told by the operator before, and may have chosen a decode instance for a request whose prefill still runs.

A router knows an instance by a URL, and the same one may have several (a name, another interface). One that resolves
to the same address and port, or whose engine has the same id, is the same instance: while the router uses it by that
URL, it may not be ended.
"""

from __future__ import annotations

import http.client
import json
import math
import socket
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.errors import PDConnectorError, ProtocolError
from vllm_pd_connector.instance_info import MAX_PAGE_BYTES, opened, parse, samples

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_pd_connector.instance_info import EngineInfo

LOOK_EVERY_S = 0.25
REPLY_S = 10.0
REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
LEASES = "vllm:pd_leases"
LEAVING = "leaving"
"""What the router says of an instance that was removed and has requests in flight (`instance.InstanceState`)."""


class CannotTell(PDConnectorError):
    """Nobody there, or nobody who says what is left to do."""


class StillUsed(PDConnectorError):
    """The router sends requests to the instance by another URL."""


@dataclass(frozen=True, slots=True)
class Left:
    """What an instance has to do; `at_router`: requests to it whose answers routers wait for."""

    requests: int
    leases: int
    at_router: int = 0

    @property
    def nothing(self) -> bool:
        return not (self.requests or self.leases or self.at_router)

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.leases} leases, {self.at_router} requests at the router"


class Drain:
    """One instance, and the operators' interfaces of this project's routers that are to be told.

    Args:
        url: base URL of the instance.
        admins: base URL of each router's operators' interface; none if routers were told by other means.
    """

    def __init__(self, url: str, *admins: str) -> None:
        self._url = url
        self._admins = admins
        self._names = {url}  # by which the routers know it

    def leave(self) -> list[str]:
        """Have the routers send nothing more; those that do not know the instance by this URL (any more).

        Raises:
            CannotTell: one does not answer, or otherwise than this project's router does.
            StillUsed: one uses the instance by another URL.
        """
        return [admin for admin in self._admins if not self._leave(admin)]

    def _leave(self, admin: str) -> bool:
        where = f"{admin}/instances?url={urllib.parse.quote(self._url, safe='')}"
        status, content = _ask(where, method="DELETE")
        if status not in (202, 404):
            raise CannotTell(
                f"{where}: HTTP {status}: {content[:200]!r}; give the router's --admin-host and --admin-port"
            )
        for other, row in self._same(admin):
            self._names.add(other)
            if row.get("state") != LEAVING:
                raise StillUsed(f"{admin} still uses this instance, by another URL than {self._url}: drain {other}")
        return status == 202

    def _same(self, admin: str) -> list[tuple[str, Mapping[str, Any]]]:
        """The other URLs by which a router knows this instance, and what it says of each."""
        others = [(url, row) for url, row in _rows(admin).items() if url != self._url]
        if not others:
            return []
        own, ids = _places(self._url), [engine.engine_id for engine in self._page()[0].values()]
        return [(url, row) for url, row in others if row.get("engine_id") in ids or own & _places(url)]

    def look(self) -> Left:
        """What is left to do.

        Raises:
            CannotTell: see there.
        """
        _, sums = self._page()
        requests = int(sum(sums[name] for name in REQUESTS))
        return Left(requests, int(sums.get(LEASES, 0.0)), self._at_router())

    def _page(self) -> tuple[dict[int, EngineInfo], dict[str, float]]:
        """Its engines by index, and the gauges that are looked at."""
        where = f"{self._url}/metrics"
        status, content = _ask(where)
        if status != 200:
            raise CannotTell(f"{where}: HTTP {status}; is this an instance's base URL?")
        try:
            engines = parse(text := content.decode(errors="replace"))
            sums = _sums(text)
        except ProtocolError as error:
            raise CannotTell(f"{where}: {error}") from error
        if not engines or any(name not in sums for name in REQUESTS):
            raise CannotTell(f"{where}: no instance with PDConnector that tells its metrics (--disable-log-stats?)")
        if strange := [name for name, value in sums.items() if not math.isfinite(value)]:
            raise CannotTell(f"{where}: {strange[0]}: {sums[strange[0]]} there, a number here")
        return engines, sums

    def _at_router(self) -> int:
        # Removed, it stays in the list until the last of its requests has ended.
        rows = (row for admin in self._admins for row in _rows(admin).items())
        return sum(row["in_flight"] for url, row in rows if url in self._names)

    def wait(
        self, timeout: float, settle: float, tell: Callable[[Left], object] = lambda left: None
    ) -> tuple[Left, bool]:
        """Look until nothing has been left for `settle` seconds, at most `timeout` seconds: what was left at last, and
        whether the instance may be ended. `tell` hears of what changes.

        Raises:
            CannotTell: see `look`.
        """
        until = time.monotonic() + timeout
        before: Left | None = None
        since = math.inf  # nothing has been left from then on
        while True:
            left, now = self.look(), time.monotonic()
            if left != before:
                tell(left)
            since, before = (min(since, now) if left.nothing else math.inf), left
            if now >= since + settle or now >= until:
                return left, now >= since + settle
            time.sleep(min(LOOK_EVERY_S, until - now))


def _rows(admin: str) -> dict[str, Mapping[str, Any]]:
    """What a router says of instances, by URL."""
    where = f"{admin}/instances"
    status, content = _ask(where)
    if status != 200:
        raise CannotTell(f"{where}: HTTP {status}; give the router's --admin-host and --admin-port")
    try:
        rows: list[Mapping[str, Any]] = json.loads(content)["instances"]
        return {str(row["url"]): {**row, "in_flight": int(row["in_flight"])} for row in rows}
    except (ValueError, TypeError, KeyError) as error:
        raise CannotTell(f"{where}: not what this project's router says: {error}") from error


def _sums(page: str) -> dict[str, float]:
    """The gauges that are looked at, summed over engines."""
    found: dict[str, float] = {}
    for sample in samples(page):
        if sample.name in (*REQUESTS, LEASES):
            found[sample.name] = found.get(sample.name, 0.0) + float(sample.value)
    return found


def _places(url: str) -> set[tuple[str, int]]:
    """The addresses and the port that a URL stands for here; none if its name is not known."""
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port or {"https": 443}.get(parts.scheme, 80)
        return {
            (str(place[0]), port) for *_, place in socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM)
        }
    except (ValueError, OSError):
        return set()


def _ask(where: str, method: str = "GET") -> tuple[int, bytes]:
    """Status and content of an answer of bounded size."""
    try:
        with opened(urllib.request.Request(where, method=method), timeout=REPLY_S) as answer:
            content = answer.read(MAX_PAGE_BYTES + 1)
            if len(content) > MAX_PAGE_BYTES:
                raise CannotTell(f"{where}: more than {MAX_PAGE_BYTES} bytes")
            return int(answer.status), content
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(1000)
    except (OSError, http.client.HTTPException) as error:
        raise CannotTell(f"{where}: {error}") from error

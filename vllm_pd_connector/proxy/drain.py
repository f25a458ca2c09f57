"""Waiting until an instance may be ended without loss: `vllm-pd drain`.

What an instance has to do shows on its `/metrics`, which vLLM renews with its engine's steps, and this connector asks
an idle engine for one when a lease ends:

    requests   running or waiting in its engine (a decode instance's include those whose caches are on their way)
    leases     finished prefills whose blocks a decode instance will still read; a conversation that is kept for a next
               turn is none: whoever wants it can compute it

Both must be 0 at every look for some seconds: a request that the API server is still reading is in neither. That no new
ones come is the router's part. This project's is told to send none, and asked whether it still waits for an answer;
others are told by the operator before, and may have chosen a decode instance for a request whose prefill still runs.
"""

from __future__ import annotations

import http.client
import json
import math
import time
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from prometheus_client.parser import text_string_to_metric_families

from vllm_pd_connector.errors import PDConnectorError, ProtocolError
from vllm_pd_connector.instance_info import MAX_PAGE_BYTES, parse

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

LOOK_EVERY_S = 0.25
REPLY_S = 10.0
REQUESTS = ("vllm:num_requests_running", "vllm:num_requests_waiting")
LEASES = "vllm:pd_leases"


class CannotTell(PDConnectorError):
    """Nobody there, or nobody who says what is left to do."""


@dataclass(frozen=True, slots=True)
class Left:
    """What an instance has to do; `at_router`: requests to it whose answers the router waits for."""

    requests: int
    leases: int
    at_router: int = 0

    @property
    def nothing(self) -> bool:
        return not (self.requests or self.leases or self.at_router)

    def __str__(self) -> str:
        return f"{self.requests} requests, {self.leases} leases, {self.at_router} requests at the router"


class Drain:
    """One instance, and the operators' interface of this project's router if that is to be told.

    Args:
        url: base URL of the instance.
        admin: base URL of the router's operators' interface, None if the router was told by other means.
    """

    def __init__(self, url: str, admin: str | None = None) -> None:
        self._url = url
        self._admin = admin

    def leave(self) -> bool:
        """Have the router send nothing more; False if it does not know the instance (any more).

        Raises:
            CannotTell: it does not answer, or otherwise than this project's router does.
        """
        if self._admin is None:
            return True
        where = f"{self._admin}/instances?url={urllib.parse.quote(self._url, safe='')}"
        status, content = _ask(where, method="DELETE")
        if status not in (202, 404):
            raise CannotTell(
                f"{where}: HTTP {status}: {content[:200]!r}; give the router's --admin-host and --admin-port"
            )
        return status == 202

    def look(self) -> Left:
        """What is left to do.

        Raises:
            CannotTell: see there.
        """
        where = f"{self._url}/metrics"
        status, content = _ask(where)
        if status != 200:
            raise CannotTell(f"{where}: HTTP {status}; is this an instance's base URL?")
        try:
            engines = parse(text := content.decode(errors="replace"))
            sums = _sums(text)
            requests = int(sum(sums[name] for name in REQUESTS if name in sums))
            leases = int(sums.get(LEASES, 0.0))
        except (ProtocolError, ValueError, OverflowError, KeyError, IndexError) as error:
            raise CannotTell(f"{where}: {error}") from error
        if not engines or any(name not in sums for name in REQUESTS):
            raise CannotTell(f"{where}: no instance with PDConnector that tells its metrics (--disable-log-stats?)")
        return Left(requests, leases, self._at_router())

    def _at_router(self) -> int:
        if self._admin is None:
            return 0
        where = f"{self._admin}/instances"
        status, content = _ask(where)
        try:
            rows: list[Mapping[str, Any]] = json.loads(content)["instances"] if status == 200 else []
            found = {str(row["url"]): row for row in rows}
            # Removed, it stays in the list until the last of its requests has ended.
            return int(found[self._url]["in_flight"]) if self._url in found else 0
        except (ValueError, TypeError, KeyError) as error:
            raise CannotTell(f"{where}: HTTP {status}: not what this project's router says: {error}") from error

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


def _sums(page: str) -> dict[str, float]:
    """The gauges that are looked at, summed over engines."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name in (*REQUESTS, LEASES):
                found[sample.name] = found.get(sample.name, 0.0) + float(sample.value)
    return found


def _ask(where: str, method: str = "GET") -> tuple[int, bytes]:
    """Status and content of an answer of bounded size."""
    try:
        with urllib.request.urlopen(urllib.request.Request(where, method=method), timeout=REPLY_S) as answer:
            content = answer.read(MAX_PAGE_BYTES + 1)
            if len(content) > MAX_PAGE_BYTES:
                raise CannotTell(f"{where}: more than {MAX_PAGE_BYTES} bytes")
            return int(answer.status), content
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(1000)
    except (OSError, http.client.HTTPException) as error:
        raise CannotTell(f"{where}: {error}") from error

"""Introductions: engines of instances are linked before a client's request needs it.

Two engines link at the first hand-off between them: they compare manifests, transports connect, memory to convert in
is made, and `mode: auto` tries both ways. So each prefill engine hands one short prompt to each decode engine, as a
client's would be: the instances need no interface for it, and a pair that does not work shows before a client meets
it. The prompt is salted, so that no cache holds it. The hand-off is serial, which every mode takes.

In a round no engine takes part twice: of M and N engines each gets at most max(M, N) prompts, one at a time.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
import uuid
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

from vllm_pd_connector.errors import PDConnectorError, ProtocolError
from vllm_pd_connector.proxy.exchange import check_finished, end, parsed_json
from vllm_pd_connector.proxy.fleet import Fleet
from vllm_pd_connector.proxy.instance import (
    DATA_PARALLEL_RANK,
    MAX_PREFILL_BYTES,
    Instance,
    InstanceRole,
    InstanceState,
    LegError,
    read_whole,
)
from vllm_pd_connector.proxy.legs import Limits, encoded_body, make_session
from vllm_pd_connector.proxy.metrics import ProxyMetrics
from vllm_pd_connector.routing.handoff import Body, decode_body, prefill_body

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

logger = logging.getLogger(__name__)

PROMPT_TOKENS = 32
LIMIT_S = 60.0
"""For one leg of an introduction; a first forward may compile."""
STARTUP_S = 10.0
"""For which a router that starts takes no request until those who are there have met."""


@dataclass(frozen=True, slots=True)
class Engine:
    """A data-parallel engine of an instance, as its API server counts them; `rank` is None where it has no other."""

    url: str
    rank: int | None
    engine_id: str

    def __str__(self) -> str:
        return self.url if self.rank is None else f"{self.url} engine {self.rank}"


@dataclass(frozen=True, slots=True)
class Introduction:
    """What became of one: seconds for both legs, and why it failed, empty if it did not."""

    prefill: Engine
    decode: Engine
    seconds: float
    failure: str = ""

    def __str__(self) -> str:
        pair = f"{self.prefill} and {self.decode}"
        return f"{pair}: {self.failure}" if self.failure else f"{pair}: {self.seconds * 1e3:.0f} ms"


class Introductions:
    """Which engines of a fleet have met; a pair that failed is not tried again until one of the two is another.

    Instances with an API key (`vllm serve --api-key`) get that of the environment, VLLM_API_KEY, as vLLM has it.
    """

    def __init__(self, fleet: Fleet, session: aiohttp.ClientSession):
        self._fleet = fleet
        self._session = session
        api_key = os.environ.get("VLLM_API_KEY")
        self._credentials = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._met: set[tuple[Engine, Engine]] = set()
        self.caught_up = asyncio.Event()
        """Set as long as all that are usable have met."""

    async def run(self) -> None:
        """Introduce whoever becomes usable, for ever."""
        while True:
            await self.all()
            self.caught_up.set()
            await self._fleet.changed.wait()
            self.caught_up.clear()

    async def all(self) -> list[Introduction]:
        """Introduce all usable engines that have not met."""
        self._fleet.changed.clear()
        prefills, decodes = (engines(self._fleet.usable(role)) for role in InstanceRole)
        self._met &= set(itertools.product(prefills, decodes))
        done: list[Introduction] = []
        for pairs in rounds(prefills, decodes):
            new = [pair for pair in pairs if pair not in self._met and pair[0].engine_id != pair[1].engine_id]
            self._met.update(new)
            done += await asyncio.gather(*itertools.starmap(self._introduce, new))
        return done

    async def _introduce(self, prefill: Engine, decode: Engine) -> Introduction:
        name, started = f"introduction-{uuid.uuid4().hex}", time.monotonic()
        try:
            body: Body = {"model": await self._model(prefill), "prompt": [1] * PROMPT_TOKENS, "max_tokens": 1,
                          "cache_salt": name}  # fmt: skip
            answer = await self._ask(prefill, prefill_body(body), name)
            await self._ask(decode, decode_body(body, answer), name)
        except (aiohttp.ClientError, TimeoutError, PDConnectorError, LegError, ValueError) as error:
            failed = Introduction(prefill, decode, time.monotonic() - started, str(error) or type(error).__name__)
            logger.warning("introduction of %s", failed)
            return failed
        done = Introduction(prefill, decode, time.monotonic() - started)
        logger.info("introduction of %s", done)
        return done

    async def _model(self, engine: Engine) -> str:
        found = await self._answer(engine, "GET", "/v1/models")
        try:
            return str(found["data"][0]["id"])
        except (TypeError, LookupError) as error:
            raise ProtocolError(f"{engine}: /v1/models names no model: {str(found)[:200]}") from error

    async def _ask(self, engine: Engine, body: Body, name: str) -> Any:
        rank = {} if engine.rank is None else {DATA_PARALLEL_RANK: str(engine.rank)}
        headers = {"Content-Type": "application/json", "X-Request-Id": name, **rank}
        answer = await self._answer(engine, "POST", "/v1/completions", headers=headers, data=encoded_body(body))
        check_finished(answer, str(engine))
        return answer

    async def _answer(self, engine: Engine, method: str, path: str, **request: Any) -> Any:
        """What an instance answers, None if it is not JSON.

        Raises:
            ProtocolError: another status than 200.
            LegError: it is longer than such an answer can be.
        """
        request["headers"] = {**self._credentials, **request.get("headers", {})}
        limit = aiohttp.ClientTimeout(LIMIT_S)
        asked = self._session.request(method, engine.url + path, timeout=limit, allow_redirects=False, **request)
        async with asked as response:
            content = await read_whole(response, str(engine), MAX_PREFILL_BYTES)
            if response.status == 401:
                raise ProtocolError(f"{engine} wants its API key; set VLLM_API_KEY")
            if response.status != 200:
                said = content[:300].decode(errors="replace")
                raise ProtocolError(f"{engine}: {path}: HTTP {response.status}: {said}")
            return parsed_json(content)


async def begun(introductions: Introductions) -> asyncio.Task[None]:
    """Introduce whoever becomes usable, in a task; those who are usable now have met, if that took no longer than
    STARTUP_S."""
    task = asyncio.create_task(introductions.run())
    try:
        async with asyncio.timeout(STARTUP_S):
            await introductions.caught_up.wait()
    except TimeoutError:
        pass
    except asyncio.CancelledError:
        await end(task)
        raise
    return task


async def introduce(urls: Sequence[str]) -> tuple[list[Introduction], list[str]]:
    """Introduce the instances at these base URLs, which say themselves what they are; also why others cannot be."""
    fleet = Fleet(ProxyMetrics(), check_interval=LIMIT_S, facts_interval=LIMIT_S, slack=0)
    for url in urls:
        fleet.add(url, None)
    async with make_session(Limits(connect_timeout=5.0, read_timeout=LIMIT_S)) as session:
        await fleet.check_all(session)
        done = await Introductions(fleet, session).all()
    rows = (row for row in fleet.describe() if row["state"] != InstanceState.UP)
    return done, [f"{row['url']}: {row['state']}, {row['why']}" for row in rows]


def engines(instances: Sequence[Instance]) -> list[Engine]:
    """All engines of instances; one that says nothing of itself counts as one."""
    found = []
    for instance in instances:
        several = len(instance.engines) > 1
        ids = [engine.engine_id for _, engine in sorted(instance.engines.items())] or [instance.url]
        found += [Engine(instance.url, rank if several else None, engine_id) for rank, engine_id in enumerate(ids)]
    return found


def rounds(prefills: Sequence[Engine], decodes: Sequence[Engine]) -> Iterator[list[tuple[Engine, Engine]]]:
    """Every pair once, in rounds in which no engine takes part twice."""
    most = max(len(prefills), len(decodes))
    for shift in range(most if prefills and decodes else 0):
        partners = ((p, (i + shift) % most) for i, p in enumerate(prefills))
        yield [(p, decodes[j]) for p, j in partners if j < len(decodes)]

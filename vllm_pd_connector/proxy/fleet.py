"""The instances behind a router: which there are, what they are, which are usable, and how busy each is.

An instance is added by its URL, with a role or without one. Whatever it says of itself on `/metrics`
(`instance_info`) is learned: its role where none was given, and the engine id, address and parallel sizes
that a concurrent hand-off needs. An instance that says another role than it was added with is never used.

A check is `GET /health`. What an instance says is read at its first good check, whenever it comes back, and every
`facts_interval` seconds, so that an instance restarted between two checks is not addressed by its old engine id for
long.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import math
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import aiohttp

from vllm_pd_connector.errors import InvalidConfig, ProtocolError
from vllm_pd_connector.instance_info import MAX_PAGE_BYTES, parse
from vllm_pd_connector.proxy.choice import Candidate, Chooser, PromptPrefix
from vllm_pd_connector.proxy.instance import (
    Answers,
    Instance,
    InstanceRole,
    InstanceState,
    Wait,
    contradiction,
    is_our_own,
    lacking,
    unlike_modes,
)
from vllm_pd_connector.proxy.kv_events.known_prefixes import KnownPrefixes
from vllm_pd_connector.proxy.kv_events.subscriber import Subscriptions, source_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Mapping

    from vllm_pd_connector.instance_info import EngineInfo
    from vllm_pd_connector.proxy.metrics import ProxyMetrics

logger = logging.getLogger(__name__)

FAILURES = 2
GONE_FAILURES = 30
"""After so many bad checks in a row nothing is known any more of an instance's cache: it will be another process."""
LOOK_S = 10.0  # for what an instance says of itself, which it does at once
LOADS_S = 3600.0
"""An instance that was added before it listened may take so long for that, whatever `drop_after` is."""
MAX_REASONS = 8
"""Instances that an error message names."""


class Fleet:
    """All instances of one router. Everything runs in one event loop. `changed` is set when an instance's state or its
    engines are others."""

    def __init__(
        self,
        metrics: ProxyMetrics,
        *,
        check_interval: float,
        facts_interval: float,
        slack: int,
        drop_after: float = math.inf,
        kv_events: Mapping[str, tuple[str, str]] | None = None,
    ):
        """`drop_after`: seconds for which one that was added by request (`joined`) fails its checks while others pass
        theirs, after which it is removed; `LOADS_S` at least where it never passed one.
        `kv_events`: endpoints of events and of their replay by instance, of those that do not say theirs; None to
        listen to no events."""
        self._metrics = metrics
        self._check_interval = check_interval
        self._facts_interval = facts_interval
        self._drop_after = drop_after
        self._instances: dict[str, Instance] = {}
        self._choosers = {role: Chooser(slack) for role in InstanceRole}
        self._given_endpoints = kv_events or {}
        self._known = KnownPrefixes()
        self._subscriptions = None if kv_events is None else Subscriptions(self._known, self._show_known)
        self._session: aiohttp.ClientSession | None = None
        self._warned: set[str] = set()
        self._wake = asyncio.Event()
        self.changed = asyncio.Event()

    # -- who is there -------------------------------------------------------------------------------------------------

    def add(self, url: str, role: InstanceRole | None, *, joined: bool = False) -> Instance:
        """Add an instance, to be used from its first good check on. One that is leaving stays; one that
        was there has its time to load anew, since it may have begun again. `joined`: while the router runs, by who
        will do so again when another takes its place.

        Raises:
            ValueError: it is there already with another role.
        """
        known = self._instances.get(url)
        if known is not None and known.asked is not role:
            raise ValueError(f"{url} is there already as {known.asked or 'what it says'}; remove it first")
        if known is None:
            known = self._instances[url] = Instance(url, role, joined=joined)
        else:
            known.added_at, known.seen_at = time.monotonic(), math.inf
            if known.state is InstanceState.LEAVING:
                known.state, known.why = InstanceState.NEW, "added again, not checked yet"
        self._show(known)
        self._wake.set()
        return known

    def remove(self, url: str) -> Instance | None:
        """Give an instance no more requests; it is gone when those in flight have ended. None: it is not there."""
        instance = self._instances.get(url)
        if instance is None:
            return None
        instance.state, instance.why = InstanceState.LEAVING, "removed"
        self._show(instance)
        self._drop_if_left(instance)
        return instance

    def describe(self) -> list[dict[str, Any]]:
        return [instance.describe() for instance in self._instances.values()]

    async def pages(self) -> dict[str, str | Exception]:
        """The `/metrics` page of each instance, or why it cannot be had."""

        async def page(instance: Instance) -> str | Exception:
            try:
                return await self._get(instance, "/metrics")
            except (aiohttp.ClientError, TimeoutError, ProtocolError) as error:
                return error

        instances = list(self._instances.values())
        found = await asyncio.gather(*map(page, instances))
        return {instance.url: content for instance, content in zip(instances, found, strict=True)}

    def usable(self, role: InstanceRole) -> list[Instance]:
        return [i for i in self._instances.values() if i.state is InstanceState.UP and i.does(role)]

    def reasons(self, role: InstanceRole) -> str:
        """Why no instance of a role is usable, for an error message."""
        others = [i for i in self._instances.values() if i.does(role) or not i.engines]
        others.sort(key=lambda i: i.seen_at == math.inf)  # who was never there says the least
        named = [f"{i.url}: {i.state}, {i.why}" for i in others[:MAX_REASONS]]
        more = [f"and {len(others) - len(named)} more"] if len(others) > len(named) else []
        why = lacking(role, self._instances.values())
        return "; ".join(named + more) or f"there is none{why and ': '}{why}"

    # -- choosing -----------------------------------------------------------------------------------------------------

    def choose(self, role: InstanceRole, prefix: PromptPrefix, without: set[str]) -> Instance | None:
        """The instance to ask next, None when none is left but those in `without`."""
        usable = [i for i in self.usable(role) if i.url not in without]
        if not usable:
            return None
        candidates = [Candidate(i.url, i.in_flight) for i in usable]
        held = self._known.lengths(prefix.blocks, [i.url for i in usable])
        url, for_its_cache = self._choosers[role].choose(candidates, prefix.keys, held)
        if for_its_cache:
            self._metrics.affinity.labels(role).inc()
        return self._instances[url]

    @contextmanager
    def busy(self, instance: Instance, role: InstanceRole, prefix: PromptPrefix) -> Iterator[None]:
        """Count a request at an instance as long as the context lasts."""
        self._choosers[role].took(instance.url, prefix.keys)
        self._metrics.legs.labels(instance.url, role).inc()
        instance.in_flight += 1
        self._show(instance)
        try:
            yield
        finally:
            instance.in_flight -= 1
            self._show(instance)
            self._drop_if_left(instance)

    @asynccontextmanager
    async def answering(self, instance: Instance) -> AsyncIterator[Wait]:
        """The wait for an instance's answer; ends by TimeoutError when nobody listens there any more.

        vLLM's server ends its engine first when it is told to end, and then waits for its open requests for ever; of a
        stream it has sent the headers before its engine knew of the request.
        """
        async with asyncio.timeout(None) as limit:
            wait = Wait(limit)
            instance.waits.add(wait)
            try:
                yield wait
            finally:
                instance.waits.discard(wait)

    def refused(self, instance: Instance, why: str) -> None:
        """An instance did not take a connection: use no more until a check is good."""
        self._set(instance, InstanceState.DOWN, why)
        self._wake.set()

    def suspect(self) -> None:
        """An instance broke off: look at all of them now rather than at the next interval."""
        self._wake.set()

    async def close(self) -> None:
        """Listen to nobody any more."""
        if self._subscriptions is not None:
            await self._subscriptions.close()

    # -- checking -----------------------------------------------------------------------------------------------------

    async def run(self, session: aiohttp.ClientSession) -> None:
        """Check all instances for ever, beginning after one interval; one that is slow to answer delays no other."""
        self._session = session
        under_way: dict[Instance, asyncio.Task[None]] = {}  # not by URL: one may be removed and added again meanwhile
        try:
            while True:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._check_interval):  # `wait_for` may swallow this task's cancellation
                        await self._wake.wait()
                    # Requests that fail at once would otherwise make checks follow each other without pause.
                    await asyncio.sleep(min(0.1, self._check_interval))
                self._wake.clear()
                under_way = {instance: task for instance, task in under_way.items() if not task.done()}
                for instance in self._to_check():
                    if instance not in under_way:
                        under_way[instance] = asyncio.create_task(self._check(instance))
        finally:
            for task in under_way.values():
                task.cancel()
            await asyncio.gather(*under_way.values(), return_exceptions=True)

    async def check_all(self, session: aiohttp.ClientSession | None = None) -> None:
        """Check all instances once."""
        self._wake.clear()
        self._session = session or self._session
        await asyncio.gather(*(self._check(instance) for instance in self._to_check()))

    def _to_check(self) -> list[Instance]:
        return [i for i in self._instances.values() if i.state is not InstanceState.LEAVING or i.waits]

    async def _check(self, instance: Instance) -> None:
        try:
            await self._get(instance, "/health")
            known = instance.state in (InstanceState.UP, InstanceState.LEAVING)
            fresh = known and time.monotonic() - instance.asked_at < self._facts_interval
            # In a thread: reading a page takes 35 ms per engine, for which streams would stand still.
            engines = (
                instance.engines if fresh else await asyncio.to_thread(parse, await self._get(instance, "/metrics"))
            )
        except (aiohttp.ClientError, TimeoutError, ProtocolError) as error:
            if instance not in self._instances.values():
                return
            if is_our_own(error):
                logger.warning("%s is not checked: %s; see ulimit -n", instance.url, error)
                return
            instance.failures += 1
            instance.deaf = instance.deaf + 1 if _nobody_listens(error) else 0
            if instance.deaf == FAILURES or instance.failures == GONE_FAILURES:
                self._forget(instance)
            if instance.deaf >= FAILURES:
                for wait in list(instance.waits):
                    wait.end()
            if instance.state is InstanceState.LEAVING:
                return
            if instance.state is not InstanceState.UP or instance.failures >= FAILURES:
                self._set(instance, InstanceState.DOWN, str(error) or type(error).__name__)
            if self._is_lost(instance):
                what = "no good check since it was added" if instance.seen_at == math.inf else "no good check any more"
                logger.warning("%s: %s: removed until added again", instance.url, what)
                self.remove(instance.url)
            return
        if instance not in self._instances.values():
            return
        instance.failures = instance.deaf = 0
        instance.seen_at = time.monotonic()
        if instance.state is InstanceState.LEAVING:
            return
        if not fresh:
            self._learn(instance, engines)
        if wrong := contradiction(instance) or self._follow(instance):
            self._set(instance, InstanceState.WRONG, wrong)
        else:
            self._set(instance, InstanceState.UP, "healthy")
        if not fresh:
            self._warn()

    def _warn(self) -> None:
        """Say once of what instances are that no request gets over, and again where it was mended meanwhile."""
        instances = self._instances.values()
        none = ((role, lacking(role, instances)) for role in InstanceRole)
        found = {f"no {role} instance: {why}" for role, why in none if why} | ({unlike_modes(instances)} - {""})
        for text in sorted(found - self._warned):
            logger.warning("%s", text)
        self._warned = found

    def _is_lost(self, instance: Instance) -> bool:
        """With none that passes its checks it may be the router that is cut off; who never passed may be loading."""
        since, wait = instance.seen_at, self._drop_after
        if since == math.inf:
            since, wait = instance.added_at, max(wait, LOADS_S)
        others = (one.seen_at for one in self._instances.values() if one.seen_at < math.inf)
        return instance.joined and any(seen_at - since >= wait for seen_at in others)

    async def _get(self, instance: Instance, path: str) -> str:
        assert self._session is not None
        look = aiohttp.ClientTimeout(LOOK_S)
        async with self._session.get(instance.url + path, timeout=look, allow_redirects=False) as response:
            # An instance without metrics can still serve a hand-off that needs no facts.
            if path == "/metrics" and response.status == 404:
                return ""
            if response.status != 200:
                raise ProtocolError(f"{path} answered {response.status}")
            page = bytearray()
            async for chunk in response.content.iter_any():
                page += chunk
                if len(page) > MAX_PAGE_BYTES:
                    raise ProtocolError(f"{path} has more than {MAX_PAGE_BYTES} bytes")
            return page.decode(errors="replace")

    def _learn(self, instance: Instance, engines: dict[int, EngineInfo]) -> None:
        instance.asked_at = time.monotonic()
        if instance.engines != engines:
            self._forget(instance)
            instance.engines = engines
            self.changed.set()
            for index, engine in engines.items():
                logger.info("%s engine %d: %s", instance.url, index, engine)

    def _forget(self, instance: Instance) -> None:
        """It is another process, or gone: its cache is not the one that is known, and what failed was the other."""
        instance.answers = Answers()
        for chooser in self._choosers.values():
            chooser.forget(instance.url)
        if self._subscriptions is not None:
            self._subscriptions.leave(instance.url)
            self._metrics.unknown(instance.url)

    def _follow(self, instance: Instance) -> str:
        """Listen to what an instance announces of its cache; why that cannot be, empty if it can or need not."""
        if self._subscriptions is None:
            return ""
        if len(instance.engines) > 1:
            return (
                f"it has {len(instance.engines)} data-parallel engines, of which vLLM's API server chooses one; start "
                "each as an instance of its own (--data-parallel-external-lb), or use --policy prefix"
            )
        told = [(engine.kv_events, engine.kv_events_replay) for engine in instance.engines.values()]
        try:
            source = source_of(instance.url, *self._given_endpoints.get(instance.url, (told or [("", "")])[0]))
        except InvalidConfig as error:
            return str(error)
        self._subscriptions.follow(instance.url, source)
        return ""

    def _show_known(self, url: str) -> None:
        known = self._known.of(url)
        self._metrics.known_blocks.labels(url).set(len(known.held))
        for loss, count in known.losses.items():
            self._metrics.event_losses.labels(url, loss).set(count)

    def _set(self, instance: Instance, state: InstanceState, why: str) -> None:
        if (instance.state, instance.why) != (state, why):
            level = logging.INFO if state is InstanceState.UP else logging.WARNING
            logger.log(level, "%s is %s: %s", instance.url, state, why)
            self.changed.set()
        if instance.state is not InstanceState.LEAVING:
            instance.state, instance.why = state, why
        self._show(instance)

    def _show(self, instance: Instance) -> None:
        if self._instances.get(instance.url) is not instance:
            return  # removed: a check or a leg of its ended later
        self._metrics.in_flight.labels(instance.url).set(instance.in_flight)
        if instance.state is not InstanceState.LEAVING:
            self._metrics.usable.labels(instance.url).set(instance.state is InstanceState.UP)
        else:  # as planned: nobody is to be alarmed
            self._metrics.leaves(instance.url)

    def _drop_if_left(self, instance: Instance) -> None:
        if instance.state is InstanceState.LEAVING and not instance.in_flight and instance.url in self._instances:
            del self._instances[instance.url]
            self._forget(instance)
            self._metrics.forget(instance.url)


def _nobody_listens(error: Exception) -> bool:
    """Whether the machine there said so, at one of its name's addresses and none took the connection (errors that
    differ come as one of text). That a name is not known, or that this machine has no port left,
    says nothing of who is there."""
    if not isinstance(error, aiohttp.ClientConnectorError):
        return False
    why = error.os_error
    return why.errno == errno.ECONNREFUSED or (why.errno is None and f"[Errno {errno.ECONNREFUSED}]" in str(why))

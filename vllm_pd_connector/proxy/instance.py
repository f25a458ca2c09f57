"""One instance behind a router: what it was added as, what it says of itself, its state, and who waits for it.

An instance that was removed stays until its requests have ended, and one that is down may come back:

    state      is chosen   becomes
    NEW        no          UP after its first good check
    UP         yes         DOWN after a refused connection or `FAILURES` bad checks in a row
    DOWN       no          UP after a good check; it is then asked anew what it is, for it may be another process
    WRONG      no          UP when a later check finds that it says what it should
    LEAVING    no          gone when its last request has ended

Nothing that it answers takes the router's memory: what is longer than an honest answer can be is 502, and a failure of
that instance.
"""

from __future__ import annotations

import asyncio
import errno
import io
import math
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import aiohttp

from vllm_pd_connector.routing.handoff import fetches_media
from vllm_pd_connector.routing.prompt_ids import MOST_IDS

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from vllm_pd_connector.instance_info import EngineInfo

SILENT_S = 5.0
"""A stream of which nothing came for so long has ended where nobody listens any more: one that brings something goes on
behind an address that takes no new connections."""
ASKED_LAST_S, FAILS = 30.0, 3
"""For so many seconds an instance that aborts requests or fails is asked only where there is no other; it fails after
so many answers of it in a row that say so."""
FULL_S = 1.0
"""So long one that takes no more requests for now is asked last: in a second some of its requests have ended."""
ENGINE_FAILED = b'"Internal server error"'
"""vLLM's message, in JSON, where an engine's request failed. A reason that another host gave stands within others."""
DATA_PARALLEL_RANK = "X-data-parallel-rank"
"""Header by which vLLM 0.32's API server gives a request to one of its engines."""
MAX_PREFILL_BYTES = (64 << 20) + 8 * MOST_IDS
"""Of a prefill instance's answer: one token, the ids of a prompt's blocks, and those of its tokens, which take up to 8
bytes each (seven digits and a comma): of the longest context, too, a healthy prefill is not to be blamed for them."""
MAX_ANSWER_BYTES = 256 << 20
"""Of a decode instance's answer in one piece, and of an event of its stream. An echoed prompt of 128 Ki tokens with 20
log-probabilities each takes about 200 MB."""
MAX_REFUSAL_BYTES = 1 << 20
"""Of an answer with another status than 200."""


def is_our_own(error: Exception) -> bool:
    """Whether a connection failed because this process or machine has no file left for it, which says nothing of who is
    there."""
    why = error.os_error.errno if isinstance(error, aiohttp.ClientConnectorError) else None
    return why in (errno.EMFILE, errno.ENFILE)


def counts_against(status: int, said: bytes, body: Mapping[str, Any]) -> bool:
    """Whether an instance that answered so, or so that the client gets it, has failed itself. A status below 500 tells
    of the request. So does 501, vLLM's for what its model does not do. So does 500 where it gets media from elsewhere:
    it says that when their host is away or fails (and 422 when that says 4xx). Its engine's failures it says otherwise.

    Source: vLLM 0.32, `multimodal/media/connector.py` (`_wrap_media_fetch_error`), `GenerationError`.
    """
    if status < 500 or status == 501:
        return False
    return status != 500 or ENGINE_FAILED in said or not fetches_media(body)


def pinned(engines: Collection[int], index: int) -> dict[str, str]:
    """Headers by which an API server gives a request to one of its data-parallel engines. It counts those that it has,
    from 0; with hybrid load balancing others come before them."""
    return {DATA_PARALLEL_RANK: str(sorted(engines).index(index))} if len(engines) > 1 else {}


class InstanceRole(StrEnum):
    """What an instance does for a request."""

    PREFILL = "prefill"
    DECODE = "decode"


SAYS: dict[str, frozenset[InstanceRole]] = {
    "kv_producer": frozenset({InstanceRole.PREFILL}),
    "kv_consumer": frozenset({InstanceRole.DECODE}),
    "kv_both": frozenset(InstanceRole),
}
"""What an instance can be used for, by its `kv_role`."""


class InstanceState(StrEnum):
    """See the module."""

    NEW = "new"
    UP = "up"
    DOWN = "down"
    WRONG = "wrong"
    LEAVING = "leaving"


@dataclass(eq=False, slots=True)
class Wait:
    """A leg that waits for what an instance answers; `heard_at`: when it last brought something of a stream, by the
    event loop's clock."""

    limit: asyncio.Timeout
    heard_at: float | None = None

    def heard(self) -> None:
        self.heard_at = asyncio.get_running_loop().time()

    def over(self) -> None:
        """Nothing more is waited for."""
        self.heard_at = math.inf

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Who waits is busy with its client meanwhile: that time does not count."""
        before, began = self.heard_at, asyncio.get_running_loop().time()
        self.over()
        yield
        self.heard_at = None if before is None else before + asyncio.get_running_loop().time() - began

    def end(self) -> None:
        """Nobody listens there: it ends by TimeoutError, unless it still brings something."""
        now = asyncio.get_running_loop().time()
        if self.limit.when() is None and (self.heard_at is None or now - self.heard_at >= SILENT_S):
            self.limit.reschedule(now)


@dataclass(eq=False, slots=True)
class Answers:
    """Why an instance is asked only where there is no other: it has aborted a request, which it does for a while, or
    is paused, or `FAILS` answers in a row have said that it failed. That one gets a request in `ASKED_LAST_S`, and is
    asked as before when it has answered one. It may fail in one role alone. What decode instances fail with, of all
    that a prefill instance hands over with good answers, is counted by itself: they alone tell. Or it has just taken no
    more requests, which is no failure. `now` is seconds of the monotonic clock."""

    _aborts_until: float = -math.inf
    _full_until: float = -math.inf
    _failed: Counter[InstanceRole] = field(default_factory=Counter)
    _next_at: dict[InstanceRole, float] = field(default_factory=dict)
    _unread: int = 0
    unread_by: frozenset[str] = frozenset()
    """URLs of decode instances that have failed with what it handed over since one has answered."""

    def aborted(self, now: float) -> None:
        self._aborts_until = now + ASKED_LAST_S

    def aborts(self, now: float) -> bool:
        return now < self._aborts_until

    def took_none(self, now: float) -> None:
        self._full_until = now + FULL_S

    def is_full(self, now: float) -> bool:
        return now < self._full_until

    def failed(self, role: InstanceRole, now: float) -> bool:
        """Returns whether it is asked last from now on, and was not before."""
        self._failed[role] += 1
        self._next_at[role] = now + ASKED_LAST_S
        return self._failed[role] == FAILS

    def answered(self, role: InstanceRole) -> bool:
        """It has answered a request well. Returns whether it was asked last for its failures."""
        return self._failed.pop(role, 0) >= FAILS

    def unread(self, by: str, now: float, *, others: bool) -> bool:
        """A decode instance has failed with what was handed over, and it may be the one to blame: with `others` to ask,
        it alone does not have this one asked last. Returns as `failed`."""
        before, self.unread_by = self._unread, self.unread_by | {by}
        if before < FAILS - 1 or len(self.unread_by) > 1 or not others:
            self._unread += 1
        self._next_at[InstanceRole.PREFILL] = now + ASKED_LAST_S
        return before < FAILS <= self._unread

    def read(self) -> bool:
        """A decode instance has answered well with what was handed over. Returns as `answered`."""
        before, self._unread, self.unread_by = self._unread, 0, frozenset()
        return before >= FAILS

    def fails(self, role: InstanceRole, now: float) -> bool:
        count = max(self._failed[role], self._unread) if role is InstanceRole.PREFILL else self._failed[role]
        return count >= FAILS and now < self._next_at[role]

    def asked_last(self, role: InstanceRole, now: float) -> bool:
        return self.aborts(now) or self.is_full(now) or self.fails(role, now)

    def chosen(self, role: InstanceRole, now: float) -> None:
        """It gets a request: one that fails gets no other meanwhile."""
        self._next_at[role] = now + ASKED_LAST_S


@dataclass(eq=False, slots=True)
class Instance:
    """One instance. `asked` is the role that it was added with, None to use what it says; `deaf` counts checks in a row
    for which nobody listened there; `waits` are the legs whose answers are not there as a whole; `at_engine` counts
    those that were given to one of its engines (`conversations`). `joined`: see `Fleet.add`; `added_at`, and
    `seen_at`: when it last passed a check, infinite before the first time; both by the monotonic clock."""

    url: str
    asked: InstanceRole | None
    state: InstanceState = InstanceState.NEW
    engines: dict[int, EngineInfo] = field(default_factory=dict)
    in_flight: int = 0
    why: str = "not checked yet"
    failures: int = 0
    asked_at: float = 0.0
    turn: int = 0
    at_engine: Counter[int] = field(default_factory=Counter)
    deaf: int = 0
    waits: set[Wait] = field(default_factory=set)
    answers: Answers = field(default_factory=Answers)
    joined: bool = False
    added_at: float = field(default_factory=time.monotonic)
    seen_at: float = math.inf

    def does(self, role: InstanceRole) -> bool:
        """Whether requests of a role may go here, as far as it is known."""
        if self.asked is not None:
            return self.asked is role
        return any(role in SAYS[engine.role] for engine in self.engines.values())

    def next_engine(self) -> tuple[int, EngineInfo] | None:
        """The data-parallel engine whose turn it is, None where the instance said nothing of itself."""
        order = self.in_turn()
        return (order[0], self.engines[order[0]]) if order else None

    def in_turn(self) -> list[int]:
        """Its data-parallel engines, first the one whose turn it is."""
        self.turn += 1
        order = sorted(self.engines)
        first = self.turn % max(len(order), 1)
        return order[first:] + order[:first]

    def describe(self) -> dict[str, Any]:
        """What the admin interface tells."""
        first = next(iter(self.engines.values()), None)
        roles = [str(role) for role in InstanceRole if self.does(role)]
        facts = {**first.labels(), "engines": len(self.engines)} if first else {}
        now = {"state": str(self.state), "why": self.why, "in_flight": self.in_flight}
        return {"url": self.url, "roles": roles, **now, **facts}


def contradiction(instance: Instance) -> str:
    """Why an instance cannot be used as it was meant, empty if it can."""
    said = {engine.role for engine in instance.engines.values()}
    if instance.asked is None:
        return "" if said else "it does not say its role; run PDConnector there, or add it with a role"
    if any(instance.asked not in SAYS[role] for role in said):
        return f"added as {instance.asked}, but its kv_role is {', '.join(sorted(said))}"
    return ""


def lacking(role: InstanceRole, instances: Iterable[Instance]) -> str:
    """Why none of these instances is there for a role, all of which say theirs; empty if one may be."""
    said: set[str] = set()
    for instance in instances:
        if instance.does(role) or not instance.engines:
            return ""
        roles = {engine.role for engine in instance.engines.values()}
        if any(role in SAYS[name] for name in roles):
            kept = f"{instance.url} is {', '.join(sorted(roles))} and was added as {instance.asked} alone"
            return f"{kept}; add it without a role (--instance), or another as {role}"
        said |= roles
    if not said:
        return ""
    wanted = " or ".join(sorted(name for name, roles in SAYS.items() if role in roles))
    return f"those that are there are {', '.join(sorted(said))}; start one with kv_role {wanted}"


def unlike_modes(instances: Iterable[Instance]) -> str:
    """Which decode instance asks which prefill instance to write, and that one does not; empty if none."""
    known = [one for one in instances if one.state in (InstanceState.UP, InstanceState.DOWN)]

    def first(role: InstanceRole, mode: str) -> Instance | None:
        fits = (one for one in known if one.does(role) and any(e.mode == mode for e in one.engines.values()))
        return next(fits, None)

    prefill, decode = first(InstanceRole.PREFILL, "pull"), first(InstanceRole.DECODE, "push")
    if prefill is None or decode is None:
        return ""
    return (
        f"mode: pull on prefill instance {prefill.url}, push on decode instance {decode.url}: requests that go to both "
        "fail; set mode push or auto on the first, or pull on the second"
    )


class LegError(Exception):
    """A leg that gave no usable answer; what the client is told."""

    content = b""

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class SentAgain(Exception):
    """A leg that may go well elsewhere, with all that came before it. `elsewhere`: whether there is another instance
    for it, of which the same is not known."""

    elsewhere = False


class Aborted(SentAgain, LegError):
    """The instance aborted the request, which nobody else did: it is ending, or its operator pauses it."""


class InstanceRefusal(Exception):
    """An instance answered with another status than 200; the client gets what it said. Of `headers` its type counts."""

    def __init__(self, who: str, status: int, content: bytes, headers: Mapping[str, str]):
        super().__init__(f"{who} answered {status}: {content[:500].decode(errors='replace')}")
        self.status = status
        self.content = content
        self.headers = headers


class Full(SentAgain, InstanceRefusal):
    """The instance takes no more requests for now."""


class Paused(Full):
    """It takes none until its operator lets it go on."""


class NothingHandedOver(SentAgain, LegError):
    """A prefill instance answered well, and no cache can be had of it."""


def refusal_kind(status: int, content: bytes) -> type[InstanceRefusal]:
    """`Full` or `Paused` where vLLM says so; what stands before it may answer 503 for a request that has begun."""
    words = {b"again later or on a different instance": Full, b"Generation is paused": Paused}
    return next((kind for said, kind in words.items() if status == 503 and said in content), InstanceRefusal)


def require_good(who: str, response: aiohttp.ClientResponse, content: bytes) -> None:
    """Raises:
    InstanceRefusal: an answer with another status than 200.
    """
    if response.status != 200:
        raise refusal_kind(response.status, content)(who, response.status, content, response.headers)


async def read_whole(response: aiohttp.ClientResponse, who: str, most: int) -> bytes:
    """What `who` answered, of at most so many bytes; with another status than 200 at most MAX_REFUSAL_BYTES. It is in
    memory once: what `io.BytesIO` collects it gives away, of a bytearray bytes would be a copy.

    Raises:
        LegError: it is longer.
    """
    limit = most if response.status == 200 else min(most, MAX_REFUSAL_BYTES)
    content, told = io.BytesIO(), response.content_length or 0
    require_short(who, response.status, told, limit)
    async for chunk in response.content.iter_any():
        content.write(chunk)
        require_short(who, response.status, max(content.tell(), told), limit)
    return content.getvalue()


def require_short(who: str, status: int, size: int, limit: int) -> None:
    """Raises:
    LegError: an answer, or an event of it, of which so many bytes are known is longer than the limit.
    """
    if size > limit:
        raise LegError(502, f"{who} answered {status} with {size} bytes or more in one piece, at most {limit} are read")

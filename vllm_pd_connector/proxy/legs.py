"""One leg of a request: choose an instance, send, and say what went wrong in words and a status for the client.

An instance that refuses the connection has seen nothing of the request, so another is asked. Any other failure is
final for the leg, because the request may have been run: 502 for an instance that breaks off, or at which nobody
listens any more before its answer is whole, 504 for one that stays silent, 503 when none can be reached. A leg whose
task is cancelled closes its connection, and vLLM aborts a request whose connection is closed.

vLLM that was told to end goes on to answer `/health` with 200 and each new request with an abort (`EngineCoreProc.
_reject_add_in_shutdown`), until what it has is done. It would be the least busy of all; so who has aborted a request of
ours is asked last for a while. So is, until it answers one, who answers with one failure of its own (500 and above)
after another, as with weights that no prefill instance has: it is healthy, and fails at once.

A prefill instance whose caches nobody can read (its side channel is cut off, it has other weights than all) answers
well each time, and it is decode that fails. So a decode's failure counts against both. That the prefill is to blame is
believed when a second decode instance has failed with what it handed over, which is asked next, or where there is none.
Then it is asked last until a decode instance answers with what it handed over; its own answers do not count for that.

An instance that takes no more requests for now (vLLM's `--max-num-queued-reqs`, `--max-num-queued-tokens`) says so with
503, to a stream also by its first event, before it has begun anything. That is no failure; the request is sent again to
others, from its prefill on, because what a decode instance refuses is given back. It is asked last for a second. So is
a prefill instance that answers well and hands nothing over, where that is needed; it counts as a failure, too. One that
is paused says so in the same way, from vLLM 0.33 on, and is asked last as one that aborts.

An instance of both roles that has prefilled a request loads nothing for it, and may have to compute the prompt again.
It decodes where there is no other.

vLLM tells its connector of a decode leg that it refuses, and that gives the prefill's blocks back. Of some it does not:
of those whose form it refuses before it has read the parameters (which prefill has run, since fields that only shape
the answer are taken out of its leg), of those that an engine refuses because it ends, and of those that nobody took.
Their blocks would be held for the time of their lease, and a client that goes on so has prefill hold back everybody's.
So `give_back` sends a decode instance the parameters once more, with a request that it surely refuses and of which it
tells its connector; where that was told before, it is told twice, which changes nothing.

Source: vLLM 0.32 and 0.33, `entrypoints/generate/base/serving.py` (`_with_kv_transfer_rejection_cleanup`,
`_preflight`), `exceptions.py` (`QueueOverflowError`, `MaxQueuedTokensError`), `v1/engine/core.py` (0.33,
`_reject_add_while_paused`).
"""

from __future__ import annotations

import io
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import aiohttp

from vllm_pd_connector.proxy.instance import (
    ASKED_LAST_S,
    FAILS,
    MAX_REFUSAL_BYTES,
    Aborted,
    Full,
    Instance,
    InstanceRefusal,
    InstanceRole,
    LegError,
    NothingHandedOver,
    Paused,
    Wait,
    counts_against,
    is_our_own,
    read_whole,
    refusal_kind,
)
from vllm_pd_connector.routing.handoff import Body

if TYPE_CHECKING:
    from types import SimpleNamespace

    from vllm_pd_connector.proxy.choice import PromptPrefix
    from vllm_pd_connector.proxy.fleet import Fleet
    from vllm_pd_connector.proxy.metrics import ProxyMetrics
    from vllm_pd_connector.proxy.tracing import Untraced

logger = logging.getLogger(__name__)

IDLE_CONNECTION = 2.0
"""Seconds for which a connection without a request is kept. vLLM closes it after five (VLLM_HTTP_TIMEOUT_KEEP_ALIVE),
and a request that meets it closing would have to fail, because nobody knows whether it has been run."""

GONE_S = 60
"""For so long the machine of an instance acknowledges nothing until its connections end. One that lost its power ends
none itself, and a leg would wait for it as long as for a silent instance."""

REFUSED: Body = {"prompt": "given back", "max_tokens": 1, "temperature": -1}
"""No engine samples at a temperature below 0."""

TELLS, TELL_S = 3, 2.0
"""So many decode instances are asked to give a prefill back, for so many seconds each; then its lease is left."""

Headers = dict[str, str]
Prepare = Callable[[Instance], tuple[Body, Headers]]
"""Body and headers for the instance that was chosen."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Seconds. `read_timeout` is the longest silence: for a prefill the wait in its queue and the whole computation,
    for a decode's stream the gap between bytes, and for an answer that is not streamed the wait and all of it."""

    connect_timeout: float
    read_timeout: float


class Sent(Protocol):
    """A client's request, as far as its legs need it; `prefilled_at` is the URL of who got its first leg, `told`: an
    event within its stream has said that it failed."""

    body: Body
    prefix: PromptPrefix
    trace: Untraced
    prefilled_at: str
    told: bool

    @property
    def path(self) -> str: ...


class Legs:
    """Sends legs; one per router, made when its event loop runs."""

    def __init__(self, fleet: Fleet, metrics: ProxyMetrics, session: aiohttp.ClientSession, limits: Limits):
        self._fleet = fleet
        self._metrics = metrics
        self._session = session
        self._limits = limits

    @asynccontextmanager
    async def send(
        self,
        role: InstanceRole,
        request: Sent,
        prepare: Prepare,
        on_sent: Callable[[Instance], None] | None = None,
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, Wait]]:
        """The answer of the first instance, in order of preference, that takes the connection, and the wait for it,
        which is to hear of what a stream brings.

        `on_sent` is called when a connection stands and the request is on its way.

        Raises:
            LegError: see the module.
        """
        with request.trace.leg(role) as traced:
            async with self._send(role, request, traced(prepare), on_sent) as answer:
                yield answer

    @asynccontextmanager
    async def _send(
        self, role: InstanceRole, request: Sent, prepare: Prepare, on_sent: Callable[[Instance], None] | None
    ) -> AsyncIterator[tuple[aiohttp.ClientResponse, Wait]]:
        refused: dict[str, str] = {}
        while (instance := self._choose(role, request, set(refused))) is not None:
            if role is InstanceRole.PREFILL:
                request.prefilled_at = instance.url
            content, headers = encoded_leg(*prepare(instance))
            logger.debug("request %s: %s at %s", headers["X-Request-Id"], role, instance.url)
            sent = None if on_sent is None else lambda chosen=instance: on_sent(chosen)
            try:
                with self._fleet.busy(instance, role, request.prefix):
                    async with AsyncExitStack() as stack:
                        wait = await stack.enter_async_context(self._fleet.answering(instance))
                        posted = self._session.post(
                            instance.url + request.path,
                            data=io.BytesIO(content),  # in pieces: of bytes aiohttp writes megabytes at once
                            headers=headers, trace_request_ctx=sent, allow_redirects=False,
                        )  # fmt: skip
                        response = await stack.enter_async_context(posted)
                        del content  # nobody is asked after this one, and a stream may last for minutes
                        require_here(role, instance, response)
                        yield response, wait
                        if not request.told:
                            self._note_answer(role, instance, request)
                        return
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                if is_our_own(error):  # each instance would be taken for one that refuses, until none is left
                    raise LegError(503, f"the router has no connection left to give: {error}; see ulimit -n") from error
                refused[instance.url] = str(error)
                self._fleet.refused(instance, str(error))
                self._metrics.retries.labels(role).inc()
            except TimeoutError as error:
                if wait.limit.expired():
                    answered = "and it has not answered" if wait.heard_at is None else "and its answer stands still"
                    raise LegError(
                        502, f"{role} instance {instance.url} ends: nobody listens there, {answered}"
                    ) from error
                silence = f"{self._limits.read_timeout:g} s"
                self._note_failure(role, instance, request, 504)
                raise LegError(504, f"{role} instance {instance.url} sent nothing for {silence}") from error
            except (Aborted, Paused) as error:
                instance.answers.aborted(now := time.monotonic())
                logger.warning("asked last for %g s: %s", ASKED_LAST_S, error)
                error.elsewhere = any(not other.answers.aborts(now) for other in self._fleet.usable(role))
                raise
            except (Full, NothingHandedOver) as error:
                if isinstance(error, NothingHandedOver):
                    self._note_failure(role, instance, request, error.status)
                instance.answers.took_none(now := time.monotonic())
                error.elsewhere = any(not other.answers.asked_last(role, now) for other in self._fleet.usable(role))
                raise
            except (LegError, InstanceRefusal) as error:
                self._note_failure(role, instance, request, error.status, error.content)
                raise
            except aiohttp.ClientError as error:
                self._fleet.suspect()
                self._note_failure(role, instance, request, 502)
                raise LegError(502, f"{role} instance {instance.url} broke off: {error!r}") from error
        raise unreachable(self._fleet, role)

    async def give_back(self, request_id: str, headers: Headers, body: Body) -> None:
        """Have what the parameters in a decode leg's `body` describe given back, by a decode instance that does not
        abort requests where there is one. Raises nothing: a lease ends by itself."""
        name, said = f"{request_id}-given-back", "there is no decode instance"
        now, decode = time.monotonic(), InstanceRole.DECODE
        usable = sorted(self._fleet.usable(decode), key=lambda instance: instance.answers.asked_last(decode, now))
        for instance in usable[:TELLS]:
            try:
                async with self._session.post(
                    f"{instance.url}/v1/completions",
                    json=REFUSED | {"kv_transfer_params": body["kv_transfer_params"]},
                    headers=headers | {"X-Request-Id": name},
                    timeout=aiohttp.ClientTimeout(TELL_S),
                    allow_redirects=False,
                ) as response:
                    content = await read_whole(response, instance.url, MAX_REFUSAL_BYTES)
                    kind = refusal_kind(response.status, content)
                    if response.status == 400 or issubclass(kind, Full):
                        logger.debug("request %s: %s was told that its prefill is given back", name, instance.url)
                        return
                    said = f"{instance.url} answered {response.status}"
            except (aiohttp.ClientError, TimeoutError, LegError) as error:
                said = f"{instance.url}: {str(error) or type(error).__name__}"
        logger.warning("request %s: what was prefilled is held until its lease ends: %s", request_id, said)

    def _choose(self, role: InstanceRole, request: Sent, without: set[str]) -> Instance | None:
        now, usable = time.monotonic(), self._fleet.usable(role)
        ending = without | {one.url for one in usable if one.answers.aborts(now)}
        failing = ending | {one.url for one in usable if one.answers.asked_last(role, now)}
        own = {request.prefilled_at} if role is InstanceRole.DECODE else set()
        if (prefill := self._prefill_of(role, request)) is not None:  # another shows which of the two it is
            own |= prefill.answers.unread_by
        avoided = (failing | own, failing, ending, without)
        tries = (self._fleet.choose(role, request.prefix, urls) for urls in avoided)
        if (found := next((found for found in tries if found is not None), None)) is not None:
            found.answers.chosen(role, now)
        return found

    def _note_failure(
        self, role: InstanceRole, instance: Instance, request: Sent, status: int, said: bytes = b""
    ) -> None:
        if not counts_against(status, said, request.body):
            return
        if instance.answers.failed(role, now := time.monotonic()):
            logger.warning("%s instance %s has failed %d times in a row: asked last until it answers", role,
                           instance.url, FAILS)  # fmt: skip
        if (prefill := self._prefill_of(role, request, instance)) is not None:
            known = (instance.url, prefill.url)
            found = [one.answers for one in self._fleet.usable(role) if one.url not in known]
            others = any(not one.fails(role, now) and not one.aborts(now) for one in found)
            if prefill.answers.unread(instance.url, now, others=others):
                logger.warning("prefill instance %s: decode instances have failed with what it handed over %d times "
                               "in a row: asked last until one answers; see their logs for why", prefill.url,
                               FAILS)  # fmt: skip

    def _note_answer(self, role: InstanceRole, instance: Instance, request: Sent) -> None:
        """An instance has answered a request."""
        if instance.answers.answered(role):
            logger.info("%s instance %s answers again", role, instance.url)
        if (prefill := self._prefill_of(role, request, instance)) is not None and prefill.answers.read():
            logger.info("a decode instance has answered again with what prefill instance %s handed over", prefill.url)

    def _prefill_of(self, role: InstanceRole, request: Sent, reader: Instance | None = None) -> Instance | None:
        """Whose caches a decode leg reads, None where it reads none: `reader` has prefilled them itself."""
        if role is not InstanceRole.DECODE or (reader is not None and reader.url == request.prefilled_at):
            return None
        usable = self._fleet.usable(InstanceRole.PREFILL)
        return next((one for one in usable if one.url == request.prefilled_at), None)


def unreachable(fleet: Fleet, role: InstanceRole) -> LegError:
    """Why a leg cannot be sent to anyone."""
    return LegError(503, f"no {role} instance can be reached: {fleet.reasons(role)}")


def require_here(role: InstanceRole, instance: Instance, response: aiohttp.ClientResponse) -> None:
    """A prompt goes to whom the router was told of and to nobody else, and to the client a way around the router is of
    no use.

    Raises:
        LegError: the instance sends its clients elsewhere.
    """
    if 300 <= response.status < 400:
        place = response.headers.get("Location", "")
        raise LegError(
            502,
            f"{role} instance {instance.url} answered {response.status}, which sends its clients elsewhere, to "
            f"{place!r:.200}; give the router the URL at which requests are served",
        )


def encoded_leg(body: Body, headers: Headers) -> tuple[bytes, Headers]:
    """What is sent. The body itself is not kept: it may have token ids, which take more than their text."""
    return encoded_body(body), {**headers, "Content-Type": "application/json"}


def encoded_body(body: Body) -> bytes:
    """A leg's body.

    Raises:
        LegError: it is nested too deeply to be written, though it could be read.
    """
    try:
        return json.dumps(body).encode()
    except RecursionError as error:
        raise LegError(400, "the request is nested too deeply to be passed on") from error


def make_session(limits: Limits) -> aiohttp.ClientSession:
    """The HTTP client of a router. Close it."""
    # `connect` counts the name's lookup, too; nobody waits for a connection that others use.
    timeout = aiohttp.ClientTimeout(total=None, connect=limits.connect_timeout, sock_read=limits.read_timeout)
    tracing = aiohttp.TraceConfig()
    tracing.on_request_headers_sent.append(_on_headers_sent)
    # No limit on connections: waiting in the router would hide a queue from the instances' own metrics.
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=IDLE_CONNECTION, socket_factory=_probed)
    # No cookies: one that an instance gave for a client's request would go with those of all others.
    jar = aiohttp.DummyCookieJar()
    return aiohttp.ClientSession(timeout=timeout, connector=connector, cookie_jar=jar, trace_configs=[tracing])


def _probed(place: aiohttp.AddrInfoType) -> socket.socket:
    """A connection that the kernel ends when the other machine is gone."""
    family, kind, protocol, *_ = place
    made = socket.socket(family, kind, protocol)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in ((socket.TCP_KEEPIDLE, GONE_S // 2), (socket.TCP_KEEPINTVL, GONE_S // 6)):
        made.setsockopt(socket.IPPROTO_TCP, option, value)
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    # It does not probe while something is unacknowledged, such as a request on a connection that was kept.
    made.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000)
    return made


async def _on_headers_sent(_session: aiohttp.ClientSession, context: SimpleNamespace, _params: Any) -> None:
    if context.trace_request_ctx is not None:
        context.trace_request_ctx()

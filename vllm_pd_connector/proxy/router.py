"""The router's HTTP side: two legs per request, errors with the right status, nothing left running.

Until the first byte of the answer is sent, every failure is an HTTP status: an instance's own error is passed on as it
is, the others are those of `legs`. vLLM begins a stream with status 200 before it knows whether it can answer, so the
client's headers wait for the first event, and an event that is an error becomes a status too. After the first byte
only an event in the stream can tell the client. A client that goes away cancels its handler, which closes the legs.

Which hand-off is used (`handoff`): "serial" asks prefill, then decode; "concurrent" asks both at once, prefill first,
so that nothing was sent to anyone when a prefill instance refuses the connection; "auto" is concurrent while all usable
instances say that they can do with it. There the two find each other by a name that is drawn for each attempt: the
client's id may come again while a former attempt under it still ends, as from a gateway that tries again.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from typing import TYPE_CHECKING, Any

import aiohttp
from aiohttp import web

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.proxy.commands.introduce import Introductions, begun
from vllm_pd_connector.proxy.conversations import Conversations, Turn
from vllm_pd_connector.proxy.exchange import (
    Exchange,
    Passage,
    credentials,
    end,
    error_object,
    error_response,
    for_client,
    is_end,
    named,
    not_here,
    passed_on,
    read_exchange,
    read_to_its_end,
    refuse,
    require_handed_over,
    stream_for_client,
    to_client,
    told_if_it_failed,
    whole_answer,
    whole_events,
)
from vllm_pd_connector.proxy.fleet import LOOK_S, Fleet
from vllm_pd_connector.proxy.instance import (
    MAX_ANSWER_BYTES,
    MAX_PREFILL_BYTES,
    Instance,
    InstanceRefusal,
    InstanceRole,
    LegError,
    SentAgain,
    Wait,
    is_our_own,
    pinned,
    read_whole,
    require_good,
)
from vllm_pd_connector.proxy.legs import Headers, Legs, make_session, require_here, unreachable
from vllm_pd_connector.proxy.metrics import ProxyMetrics
from vllm_pd_connector.proxy.tracing import Tracer, Untraced
from vllm_pd_connector.routing.handoff import Body, computes_prompt, decode_body, decode_body_beside, prefill_body

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    from vllm_pd_connector.instance_info import EngineInfo
    from vllm_pd_connector.proxy.options import Options

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 64 * 1024 * 1024
COMPLETION_PATHS = ("/v1/completions", "/v1/chat/completions")
CLIENT_LEFT = 499
TRAILING_S = 2.0
ATTEMPTS = 3
"""For a request whose instances are told to end: by then somebody of a rolling update has come back."""


class Router:
    """One router; `application()` is what an aiohttp server runs, `fleet` who it routes to."""

    def __init__(self, options: Options):
        self.metrics = ProxyMetrics()
        self.fleet = Fleet(
            self.metrics,
            check_interval=options.check_interval,
            facts_interval=options.facts_interval,
            drop_after=options.drop_after,
            slack=options.slack,
            kv_events=options.kv_events if options.policy == "kv-events" else None,
        )
        self._options, self._tracer = options, Tracer(options.otlp_traces_endpoint)
        self._legs: Legs
        self._session: aiohttp.ClientSession
        self._conversations = Conversations() if options.conversations else None
        self._trailing: set[asyncio.Task[None]] = set()
        self._healthy = ""  # what was logged last of it

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.cleanup_ctx.append(self._run)
        for path in COMPLETION_PATHS:
            app.router.add_post(path, self._complete)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/v1/models", self._models)
        app.router.add_route("*", "/{path:.*}", not_here)
        return app

    async def _run(self, _app: web.Application) -> AsyncIterator[None]:
        fleet, options = self.fleet, self._options
        for url, role in options.given():
            fleet.add(url, role)
        async with make_session(options.limits) as session:
            self._session = session
            self._legs = Legs(fleet, self.metrics, session, options.limits)
            await fleet.check_all(session)
            tasks = [asyncio.create_task(fleet.run(session))]
            try:
                tasks += [await begun(Introductions(fleet, session))] if options.introduce else []
                for task in tasks:
                    task.add_done_callback(told_if_it_failed)
                yield
            finally:
                if self._trailing:  # prefills that are given back
                    await asyncio.wait(self._trailing, timeout=TRAILING_S)
                for task in (*tasks, *self._trailing):
                    await end(task)
                await fleet.close()
                await asyncio.to_thread(self._tracer.close)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        status, started = CLIENT_LEFT, time.monotonic()
        request_id = request.headers.get("X-Request-Id") or uuid.uuid4().hex
        trace = self._tracer.begin(request.headers, request_id, request.path)
        try:
            response = await self._answer_or_refuse(request, request_id, started, trace)
            status = response.status
            return response
        except Exception as error:
            if not isinstance(error, ConnectionError):
                status = 500  # a defect of ours
            raise
        finally:
            trace.end(status)
            self.metrics.requests.labels(status).inc()
            self.metrics.seconds.labels("total").observe(time.monotonic() - started)

    async def _answer_or_refuse(
        self, request: web.Request, request_id: str, started: float, trace: Untraced
    ) -> web.StreamResponse:
        try:
            exchange = await read_exchange(request, request_id, started, trace)
        except ProtocolError as error:
            return refuse(request_id, 400, str(error))
        except web.HTTPRequestEntityTooLarge as error:
            return refuse(request_id, error.status, error.text or error.reason)
        try:
            return await self._hand_off(exchange)
        except (InstanceRefusal, LegError, ProtocolError) as error:
            status = 502 if isinstance(error, ProtocolError) else error.status
            if exchange.answer is None and isinstance(error, InstanceRefusal):
                logger.warning("request %s: %s", request_id, error)
                return passed_on(status, error.content, error.headers, request_id)
            if exchange.answer is None:
                return refuse(request_id, status, str(error))
            logger.warning("request %s: after the first byte: %s", request_id, error)
            last = "data: [DONE]\n\n"
            if not exchange.told:
                self.metrics.broken_streams.inc()
                last = f"data: {json.dumps(error_object(status, str(error)))}\n\n{last}"
            async with to_client(request, self._options.limits.read_timeout):
                await exchange.answer.write(last.encode())
                await exchange.answer.write_eof()
            return exchange.answer

    async def _hand_off(self, exchange: Exchange) -> web.StreamResponse:
        if self._conversations is None:
            return await self._by_both(exchange)
        there = {e.engine_id for i in self.fleet.usable(InstanceRole.DECODE) for e in i.engines.values()}
        with Turn(self._conversations, exchange.body, there, self._options.slack) as exchange.turn:
            self.metrics.turns.labels("found" if exchange.turn.found else "new").inc()
            return await self._by_both(exchange)

    async def _by_both(self, exchange: Exchange) -> web.StreamResponse:
        """Once more by other instances where one that is ending has aborted a leg, one is full, or a prefill has handed
        nothing over: the client has had nothing of it."""
        if not self.fleet.usable(InstanceRole.DECODE):  # nothing is computed for nobody, and held for its lease
            raise unreachable(self.fleet, InstanceRole.DECODE)
        for _ in range(ATTEMPTS - 1):
            try:
                return await self._once(exchange)
            except SentAgain as error:
                if exchange.answer is not None or not error.elsewhere:
                    raise
                logger.info("request %s: sent again: %s", exchange.request_id, error)
        return await self._once(exchange)

    def _concurrent(self) -> bool:
        if self._options.handoff != "auto":
            return self._options.handoff == "concurrent"
        prefills = self.fleet.usable(InstanceRole.PREFILL)
        decodes = [engine for i in self.fleet.usable(InstanceRole.DECODE) for engine in i.engines.values()]
        if not prefills or any(engine.mode == "pull" for engine in decodes):  # they read what an answer names
            return False
        return all(i.engines and all(e.handoff == "concurrent" for e in i.engines.values()) for i in prefills)

    async def _once(self, exchange: Exchange) -> web.StreamResponse:
        """One attempt. Two have nothing in common, also where both legs go at once: each has a name of its own."""
        if computes_prompt(exchange.body):
            return await self._decode(exchange, exchange.body, "")
        if not self._concurrent():
            return await self._serial(exchange)
        answer, prefill = await self._side_by_side(exchange)
        self._trail(read_to_its_end(prefill, exchange.request_id))
        return answer

    async def _serial(self, exchange: Exchange) -> web.StreamResponse:
        def prepare(instance: Instance) -> tuple[Body, Headers]:
            leg = prefill_body(exchange.body, turn=exchange.turn.brought_to(instance))
            return exchange.ids.ask(leg, exchange.body, instance.engines), exchange.headers

        answer = exchange.ids.take(await self._prefill(exchange, prepare), exchange.prefilled_at)
        name = uuid.uuid4().hex if self._conversations is not None else ""
        return await self._decode(exchange, decode_body(exchange.body, answer, name), name, held=True)

    async def _side_by_side(self, exchange: Exchange) -> tuple[web.StreamResponse, asyncio.Task[Any]]:
        """The complete answer, and the prefill's leg, which may still run."""
        name = f"{exchange.request_id}.{uuid.uuid4().hex}"  # with the id, since instances' logs have the name
        sent: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        chosen: list[EngineInfo] = []

        def prepare(instance: Instance) -> tuple[Body, Headers]:
            found = instance.next_engine()
            if found is None:
                raise LegError(503, f"prefill instance {instance.url} does not say its engine id; a concurrent "
                               "hand-off needs PDConnector there, with metrics on")  # fmt: skip
            index, engine = found
            chosen[:] = [engine]
            turn, headers = exchange.turn.brought_to(instance), pinned(instance.engines, index)
            return prefill_body(exchange.body, name, turn), {**exchange.headers, **headers}

        def on_sent(_instance: Instance) -> None:
            if not sent.done():
                sent.set_result(chosen[0])

        prefill = asyncio.create_task(self._prefill(exchange, prepare, on_sent))
        decode: asyncio.Task[web.StreamResponse] | None = None
        try:
            await asyncio.wait({sent, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if not sent.done():
                prefill.result()  # raises: it can only have failed
            engine = await sent
            body = decode_body_beside(exchange.body, engine, name)
            decode = asyncio.create_task(self._decode(exchange, body, name))
            await asyncio.wait({decode, prefill}, return_when=asyncio.FIRST_COMPLETED)
            if not decode.done() and exchange.answer is None:
                prefill.result()  # without a prefill the decode instance waits in vain
            return await decode, prefill
        except BaseException:
            try:
                await end(prefill)
            finally:
                if decode is not None:
                    await end(decode)
            raise

    def _trail(self, work: Coroutine[Any, Any, None]) -> None:
        """What is left to do when a request is answered."""
        task = asyncio.create_task(work)
        self._trailing.add(task)
        task.add_done_callback(self._trailing.discard)

    async def _prefill(self, exchange: Exchange, prepare: Any, on_sent: Any = None) -> Any:
        """What the prefill instance answers, read."""

        def sent(instance: Instance) -> None:
            exchange.turn.was_brought()
            if on_sent is not None:
                on_sent(instance)

        async with self._legs.send(InstanceRole.PREFILL, exchange, prepare, sent) as (response, _):
            who = named(InstanceRole.PREFILL, response)
            content = await read_whole(response, who, MAX_PREFILL_BYTES)
            require_good(who, response, content)
            self._observe("prefill", exchange)
            answer = whole_answer(content, who)
            if on_sent is None:  # else nothing is taken from it
                require_handed_over(answer, who)
            return answer

    async def _decode(self, exchange: Exchange, body: Body, name: str, *, held: bool = False) -> web.StreamResponse:
        """Answer the client from a decode instance, which knows the request by `name`; `held`: prefill has answered.
        Without parameters in `body` nothing was prefilled."""

        def prepare(instance: Instance) -> tuple[Body, Headers]:
            return exchange.ids.give(body, instance.engines), {**exchange.headers, **exchange.turn.sent_to(instance)}

        try:
            async with self._legs.send(InstanceRole.DECODE, exchange, prepare, exchange.ids.forget) as (response, wait):
                if response.status == 200 and response.content_type == "text/event-stream":
                    return await self._stream(exchange, response, wait, name)
                who = named(InstanceRole.DECODE, response)
                content = await read_whole(response, who, MAX_ANSWER_BYTES)
                self._observe("first_byte", exchange)
                require_good(who, response, content)
                answer = whole_answer(content, who)
                exchange.turn.ended(name, answer)
                return passed_on(200, for_client(content, answer, who), response.headers, exchange.request_id)
        except (LegError, InstanceRefusal, asyncio.CancelledError) as error:
            begun = held or not isinstance(error, asyncio.CancelledError)  # else the client leaves
            if exchange.answer is None and begun and body.get("kv_transfer_params") is not None:
                self._trail(self._legs.give_back(exchange.request_id, exchange.headers, body))
            raise

    async def _stream(
        self, exchange: Exchange, response: aiohttp.ClientResponse, wait: Wait, name: str
    ) -> web.StreamResponse:
        """Pass events on as they come."""
        answer = stream_for_client(response.headers, exchange.request_id)
        passage, silence = Passage(named(InstanceRole.DECODE, response)), self._options.limits.read_timeout
        async for event in whole_events(response.content.iter_any(), passage.who):
            if not event.startswith(b":"):  # a comment comes whether the engine lives or not
                wait.heard()
            passed = passage.take(event)
            if passage.failed and not exchange.told:
                logger.warning("request %s: %s, after the first byte: %.500r", exchange.request_id, passage.who, event)
                self.metrics.broken_streams.inc()
                exchange.told = True
            if not passed:
                continue
            if exchange.answer is None:
                self._observe("first_byte", exchange)
                exchange.answer = answer
                async with to_client(exchange.request, silence):
                    await answer.prepare(exchange.request)
            if is_end(event) and not exchange.told:  # the client may go on with the conversation as soon as it has this
                exchange.turn.ended(name)
            with wait.elsewhere():
                async with to_client(exchange.request, silence):
                    await answer.write(passed)
            if passage.ended:
                wait.over()
        if not passage.ended:
            raise LegError(502, f"{passage.who} ended its stream without data: [DONE], so in the midst of its answer")
        async with to_client(exchange.request, silence):
            await answer.write_eof()
        return answer

    def _observe(self, phase: str, exchange: Exchange) -> None:
        if phase == "first_byte":
            exchange.trace.first_byte()
        self.metrics.seconds.labels(phase).observe(time.monotonic() - exchange.started)

    async def _models(self, request: web.Request) -> web.StreamResponse:
        limit, failed = aiohttp.ClientTimeout(LOOK_S), ""
        for instance in self.fleet.usable(InstanceRole.DECODE):
            where = f"{instance.url}/v1/models"
            try:
                asked = self._session.get(where, headers=credentials(request), timeout=limit, allow_redirects=False)
                async with asked as response:
                    require_here(InstanceRole.DECODE, instance, response)
                    content = await read_whole(response, where, MAX_PREFILL_BYTES)
                    return passed_on(response.status, content, response.headers)
            except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
                if is_our_own(error):
                    return refuse("-", 503, f"the router has no connection left to give: {error}; see ulimit -n")
                self.fleet.refused(instance, str(error))
            except (aiohttp.ClientError, TimeoutError, LegError) as error:  # one that is slow still takes requests
                self.fleet.suspect()
                failed = f"{where}: {str(error) or type(error).__name__}; "
        return refuse("-", 503, f"no decode instance can be reached: {failed}{self.fleet.reasons(InstanceRole.DECODE)}")

    async def _health(self, _request: web.Request) -> web.StreamResponse:
        """200 while at least one instance of each role can be used; a change is logged, not each answer."""
        lacking = [role for role in InstanceRole if not self.fleet.usable(role)]
        state = f"no usable {' and no usable '.join(lacking)} instance" if lacking else "every role has an instance"
        if state != self._healthy:
            self._healthy = state
            logger.log(logging.WARNING if lacking else logging.INFO, "health: %s", state)
        if not lacking:
            return web.Response()
        return error_response(503, f"no usable {lacking[0]} instance: {self.fleet.reasons(lacking[0])}")

    async def _metrics_page(self, _request: web.Request) -> web.StreamResponse:
        return web.Response(body=self.metrics.exposition(), headers={"Content-Type": "text/plain; version=0.0.4"})

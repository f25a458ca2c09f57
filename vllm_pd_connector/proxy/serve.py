"""Command line of the router, and the servers that it runs: one for clients and, if asked for, one for operators.

Operators' routes have a port of their own, by default on loopback: who may add an instance may read every prompt. A
browser on that machine reaches loopback, too, in the name of any page that it shows; it says so (Origin), and may look
only. What it is answered such a page cannot read, unless its own name leads to loopback: then the browser says that
name (Host), and is told nothing.

    GET    /ui                                      a page for a browser: instances, links, failures
    GET    /instances                               what is known of each
    POST   /instances  {"url": …, "role": …}        add one; without a role it is used as what it says
    DELETE /instances?url=…                         give it no more requests; those in flight end
"""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import logging
import resource
import signal
from typing import TYPE_CHECKING, Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from vllm_pd_connector.arguments import base_url, count, listening_port, seconds
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.proxy.exchange import end, error_object
from vllm_pd_connector.proxy.instance import InstanceRole
from vllm_pd_connector.proxy.kv_events.subscriber import source_of
from vllm_pd_connector.proxy.legs import Limits
from vllm_pd_connector.proxy.options import Options
from vllm_pd_connector.proxy.router import Router
from vllm_pd_connector.proxy.ui.page import Page

if TYPE_CHECKING:
    from collections.abc import Sequence

    from aiohttp.typedefs import Handler

logger = logging.getLogger(__name__)

FILES, WAITING = 65535, 2048
"""Open files, and connections that wait to be taken: as vLLM's server has them."""
MAX_HEADER = 65536
"""Bytes of a request's line and of each header: tokens and clients' certificates need more than aiohttp's 8190."""
IDLE_CLIENT_S = 3630.0
"""For so long a client's connection without a request is kept: longer than gateways keep theirs (Envoy an hour,
Google's load balancers ten minutes), which would write a request on one that closes. It costs a file."""
TWICE_S = 1.0
"""For which a second signal is the first one again: wrappers pass on what the terminal has sent to all."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The router's options."""
    _add_places(parser)
    _add_times(parser)
    _add_choices(parser)
    parser.add_argument(
        "--otlp-traces-endpoint", metavar="URL",
        help="collector of OpenTelemetry spans, as for vllm serve (extra tracing)",
    )  # fmt: skip
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning"), default="info",
        help="debug also says to which instances each request is sent (default: info)",
    )  # fmt: skip


def _add_places(parser: argparse.ArgumentParser) -> None:
    """Who is routed to, and where the router listens."""
    for kind in InstanceRole:
        parser.add_argument(
            f"--{kind}", action="append", default=[], metavar="URL", type=base_url,
            help=f"base URL of a {kind} instance; repeat for several",
        )  # fmt: skip
    parser.add_argument(
        "--instance", action="append", default=[], metavar="URL", type=base_url,
        help="base URL of an instance that says itself what it is (PDConnector); repeat for several",
    )  # fmt: skip
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="where it listens (default: 127.0.0.1, this host alone; 0.0.0.0: all IPv4 addresses, ::: all IPv6 ones)",
    )
    parser.add_argument("--port", type=listening_port, default=8000)
    parser.add_argument("--admin-host", default="127.0.0.1", help="where operators' routes listen")
    parser.add_argument(
        "--admin-port", type=listening_port, help="port of operators' routes; without it there are none"
    )


def _add_times(parser: argparse.ArgumentParser) -> None:
    """How long the router waits, and how often it looks."""
    defaults = Options()
    for name, value, text in (
        ("connect-timeout", defaults.limits.connect_timeout, "for an instance to take a connection"),
        (
            "read-timeout",
            defaults.limits.read_timeout,
            "longest silence of an instance; an answer that is not streamed is one from its queue to its end",
        ),
        ("check-interval", defaults.check_interval, "between two health checks"),
        ("facts-interval", defaults.facts_interval, "after which an instance is asked anew what it is"),
        (
            "drop-after",
            defaults.drop_after,
            "of bad checks, while others' are good, after which an added instance is removed",
        ),
    ):
        parser.add_argument(f"--{name}", type=seconds, default=value, help=f"seconds {text} (default: {value:g})")
    parser.add_argument(
        "--shutdown-timeout", type=seconds, default=5.0,
        help="seconds that requests have to end when the router is told to stop; it takes no new ones (default: 5)",
    )  # fmt: skip


def _add_choices(parser: argparse.ArgumentParser) -> None:
    """How requests are handed over, and to whom."""
    defaults = Options()
    parser.add_argument(
        "--handoff", choices=("auto", "serial", "concurrent"), default="auto",
        help="serial for pull, concurrent for push without keys; auto: what the prefill instances say (default)",
    )  # fmt: skip
    parser.add_argument(
        "--slack", type=count, default=defaults.slack,
        help="by how many requests an instance that knows a prompt may exceed the least busy one "
        f"(default: {defaults.slack}; 0: by load alone)",
    )  # fmt: skip
    parser.add_argument(
        "--policy", choices=("prefix", "kv-events"), default=defaults.policy,
        help="by what an instance knows a prompt: that it was sent its beginning (prefix, default), or that it "
        "announces to hold it (kv-events: needs --kv-events-config at the instances)",
    )  # fmt: skip
    parser.add_argument(
        "--kv-events", action="append", default=[], metavar="URL=EVENTS[,REPLAY]", type=event_endpoints,
        help="where an instance that does not say it (no PDConnector) publishes and replays its events, as in "
        "http://10.0.0.7:8100=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558; repeat for several",
    )  # fmt: skip
    parser.add_argument(
        "--conversations", choices=("on", "off"), default="off",
        help="bring what decode instances keep of a finished turn to the prefill of the conversation's next one "
        "(needs conversations: true at the instances; default: off)",
    )  # fmt: skip
    parser.add_argument(
        "--introduce", choices=("on", "off"), default="off",
        help="have instances that become usable hand a short prompt over between every two, so that a client's first "
        "request finds them linked (default: off)",
    )  # fmt: skip


def options_of(arguments: argparse.Namespace) -> Options:
    return Options(
        prefill=arguments.prefill,
        decode=arguments.decode,
        instances=arguments.instance,
        limits=Limits(arguments.connect_timeout, arguments.read_timeout),
        handoff=arguments.handoff,
        check_interval=arguments.check_interval,
        facts_interval=arguments.facts_interval,
        drop_after=arguments.drop_after,
        slack=arguments.slack,
        policy=arguments.policy,
        kv_events=dict(arguments.kv_events),
        conversations=arguments.conversations == "on",
        introduce=arguments.introduce == "on",
        otlp_traces_endpoint=arguments.otlp_traces_endpoint,
    )


def event_endpoints(text: str) -> tuple[str, tuple[str, str]]:
    """An instance's URL and its endpoints of events and, or empty, of their replay.

    Raises:
        argparse.ArgumentTypeError: not URL=EVENTS[,REPLAY].
    """
    url, _, endpoints = text.partition("=")
    events, _, replay = endpoints.partition(",")
    url = base_url(url)
    try:
        source_of(url, events, replay)
    except InvalidConfig as error:
        raise argparse.ArgumentTypeError(f"{text!r}: {error}") from error
    return url, (events, replay)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal ends it; returns the exit code: 2 if it cannot listen."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    logging.getLogger("vllm_pd_connector").setLevel(arguments.log_level.upper())  # and not the libraries'
    logging.getLogger("aiohttp.server").addFilter(without_headers)
    if arguments.kv_events and arguments.policy != "kv-events":
        logger.error("--kv-events: nobody listens with --policy %s; give --policy kv-events", arguments.policy)
        return 2
    if arguments.admin_port is None and not (arguments.prefill or arguments.decode or arguments.instance):
        logger.error("no instance is given, and none can be added: give --prefill and --decode, --instance, or "
                     "--admin-port")  # fmt: skip
        return 2
    if twice := options_of(arguments).twice():
        logger.error("%s", twice)
        return 2
    _allow_files()
    try:
        return asyncio.run(_serve(arguments))
    except KeyboardInterrupt:
        return 130


def without_headers(record: logging.LogRecord) -> bool:
    """Of a request that cannot be read, as with too long a header, one line without what it says: it may be a key.
    aiohttp logs a traceback, and the beginning of the header in it."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, HttpProcessingError):
        record.msg, record.args = "%s: %s, answered with 400", (record.getMessage(), type(error).__name__)
        record.exc_info, record.levelno, record.levelname = None, logging.WARNING, "WARNING"
    return True


def _allow_files() -> None:
    """As many files as `vllm serve` allows itself: each request takes two, and shells allow 1024."""
    files, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = FILES if most == resource.RLIM_INFINITY else min(FILES, most)
    if files != resource.RLIM_INFINITY and files < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))
    if wanted < FILES:
        logger.warning(
            "the hard limit of open files is %d (ulimit -Hn), enough for %d requests at once", most, most // 3
        )


def admin_application(router: Router) -> web.Application:
    """The operators' routes of a router."""

    async def show(_request: web.Request) -> web.Response:
        return web.json_response({"instances": router.fleet.describe()})

    async def add(request: web.Request) -> web.Response:
        try:
            body = await request.json()
            if not isinstance(body, dict) or not set(body) <= {"url", "role"}:
                raise ValueError('send {"url": …} or {"url": …, "role": "prefill" | "decode"}')
            url = base_url(str(body.get("url")))
            role = None if body.get("role") is None else InstanceRole(body["role"])
            instance = router.fleet.add(url, role, joined=True)
        except (json.JSONDecodeError, UnicodeDecodeError, ValueError, argparse.ArgumentTypeError) as error:
            return web.json_response(error_object(400, str(error)), status=400)
        return web.json_response(instance.describe(), status=202)

    async def remove(request: web.Request) -> web.Response:
        url = request.query.get("url", "").rstrip("/")
        instance = router.fleet.remove(url)
        if instance is None:
            return web.json_response(error_object(404, f"url: {url!r} is not here"), status=404)
        return web.json_response(instance.describe(), status=202)

    app = web.Application(middlewares=[_no_pages])
    app.router.add_get("/ui", Page(router.fleet).show)
    app.router.add_get("/instances", show)
    app.router.add_post("/instances", add)
    app.router.add_delete("/instances", remove)
    return app


@web.middleware
async def _no_pages(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Nothing is changed by a page that a browser shows: none of ours does, and any other could."""
    if request.method not in ("GET", "HEAD") and (origin := request.headers.get("Origin")) is not None:
        said = f"Origin: {origin!r:.200}: no page in a browser may change instances; use vllm-pd, curl or the like"
        return web.json_response(error_object(403, said), status=403)
    if _came_by_loopback(request) and not _is_plain(request.host):
        said = f"Host: {request.host!r:.200}: on loopback this is asked by its address or as localhost alone"
        return web.json_response(error_object(421, said), status=421)
    return await handler(request)


def _came_by_loopback(request: web.Request) -> bool:
    address, *_ = request.get_extra_info("sockname", ("",))
    return _is_address(address) and ipaddress.ip_address(address).is_loopback


def _is_plain(host: str) -> bool:
    """Whether a Host header has an address or "localhost", which nobody can have lead to somebody else's machine."""
    name = host[: host.find("]") + 1] if host.startswith("[") else host.partition(":")[0]
    return name.lower() == "localhost" or _is_address(name.strip("[]"))


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


async def _serve(arguments: argparse.Namespace) -> int:
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    try:
        router = Router(options_of(arguments))
    except InvalidConfig as error:
        logger.error("%s", error)
        return 2
    places = [(router.application(), arguments.host, arguments.port)]
    if arguments.admin_port is not None:
        places.append((admin_application(router), arguments.admin_host, arguments.admin_port))
    limit = arguments.shutdown_timeout / 2  # aiohttp waits for handlers twice as long before it cancels them
    # Without handler_cancellation aiohttp runs a handler to its end after the client has gone.
    settings: dict[str, Any] = {"handler_cancellation": True, "access_log": None, "shutdown_timeout": limit}
    settings |= {"keepalive_timeout": IDLE_CLIENT_S, "max_line_size": MAX_HEADER, "max_field_size": MAX_HEADER}
    runners = [web.AppRunner(app, **settings) for app, _, _ in places]
    servers: list[asyncio.Server] = []
    listening = asyncio.create_task(_listen(runners, [place[1:] for place in places], servers))
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({listening, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if listening.done() and not listening.result():
            return 2
        await stopping
        return 0
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):  # who sends another later does not want to wait
            loop.call_later(TWICE_S, loop.remove_signal_handler, number)
        stopping.cancel()
        await end(listening)
        await _take_no_more(servers)
        await asyncio.gather(*(runner.cleanup() for runner in runners))


async def _take_no_more(servers: Sequence[asyncio.Server]) -> None:
    """No client comes in any more, whatever the others take. Those who came in just now have begun before the servers
    are closed: until then neither asyncio nor aiohttp would answer them or close their connections."""
    for listener in [listener for server in servers for listener in server.sockets]:
        asyncio.get_running_loop().remove_reader(listener)
    await asyncio.sleep(0.05)
    for server in servers:
        server.close()


async def _listen(
    runners: Sequence[web.AppRunner], places: Sequence[tuple[str, int]], servers: list[asyncio.Server]
) -> bool:
    """Begin to serve; False if a port cannot be had, which the log says."""
    for runner, (host, port) in zip(runners, places, strict=True):
        await runner.setup()
        assert runner.server is not None
        try:
            loop = asyncio.get_running_loop()
            servers.append(await loop.create_server(runner.server, host, port, backlog=WAITING, start_serving=False))
            await servers[-1].start_serving()
        except OSError as error:
            logger.error("cannot listen on %s:%d: %s", host, port, error.strerror)
            return False
        logger.info("listening on %s:%d", host, port)
    return True

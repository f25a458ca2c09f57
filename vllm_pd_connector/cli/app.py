"""The command line itself: which commands there are, and what becomes of their failures.

Typer reads the words and writes help and completion. What it would print of a failure in a box is printed by us as one
line, or as JSON where the words ask for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from vllm_pd_connector import __version__
from vllm_pd_connector.arguments import base_url, http_address, seconds
from vllm_pd_connector.cli.doctor import doctor
from vllm_pd_connector.cli.explain import explain, manifest
from vllm_pd_connector.cli.keygen import keygen
from vllm_pd_connector.cli.load.bench import bench
from vllm_pd_connector.cli.load.plan import plan
from vllm_pd_connector.cli.options import Address, Json, Urls, taken
from vllm_pd_connector.cli.output import CommandError, Exit, Late, NotReached, emit, emit_json, say_failure
from vllm_pd_connector.cli.settings import check_config, migrate
from vllm_pd_connector.cli.top import top
from vllm_pd_connector.cli.trace.commands import app as trace
from vllm_pd_connector.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Sequence

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)

_Usage: type[typer.BadParameter] = typer.BadParameter.__bases__[0]  # the class of all wrong words has no public name


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["proxy"]:  # its words are the router's, which can be run without this package's other parts
        return _router(words[1:])
    command = next((word for word in words if not word.startswith("-")), "")
    as_json = "--json" in words
    try:
        try:
            return int(app(words, prog_name="vllm-pd", standalone_mode=False) or Exit.OK)
        except _Usage as error:
            return say_failure(command, Exit.USAGE, error.format_message(), as_json=as_json)
        except CommandError as error:
            return say_failure(command, error.code, str(error), as_json=as_json)
        except InvalidConfig as error:
            return say_failure(command, Exit.UNREADABLE, str(error), as_json=as_json)
    except typer.Exit as end:  # nobody reads what is printed
        return end.exit_code


def _version(asked: bool) -> None:
    if asked:
        emit(f"vllm-pd {__version__}")
        raise typer.Exit(Exit.OK)


@app.callback()
def vllm_pd(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_version, help="print the version and end")
    ] = False,
) -> None:
    """Looks at instances of vLLM with PDConnector, checks their configuration, makes their keys and routes requests.

    Exit codes: 0 done, 1 refused, 2 wrong usage, 3 nobody answered, 4 an input that cannot be read,
    5 not done in time (drain).
    """


def _router(words: Sequence[str]) -> int:
    from vllm_pd_connector.proxy.__main__ import main as run_router

    return run_router(words)


def announce(
    router: Address,
    urls: Annotated[
        list[str], typer.Argument(parser=taken(http_address), metavar="URL...", help="http://host:port of an instance")
    ],
) -> Exit:
    """Tell vLLM's router, in its discovery mode (--vllm-discovery-address ROUTER), which instances there are."""
    from vllm_pd_connector.proxy.commands.announce import announce as announce_all

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        announce_all(router, urls)
    return Exit.OK


def drain(
    url: Annotated[str, typer.Argument(parser=taken(base_url), metavar="URL", help="base URL of the instance")],
    router: Annotated[
        list[str] | None,
        typer.Option(
            parser=taken(base_url),
            metavar="URL",
            help="operators' interface of vllm-pd proxy, which then sends nothing more there; again for each router",
        ),
    ] = None,
    timeout: Annotated[
        float, typer.Option(parser=taken(seconds), metavar="SECONDS", help="how long to wait at most")
    ] = 300.0,
    settle: Annotated[
        float,
        typer.Option(
            parser=taken(seconds),
            metavar="SECONDS",
            help="for how long nothing may be left; with other routers as long as a prefill may take",
        ),
    ] = 2.0,
    json: Json = False,
) -> Exit:
    """Wait until an instance has nothing left to do and may be ended without loss."""
    from vllm_pd_connector.proxy.commands.drain import CannotTell, Drain, StillUsed

    if settle >= timeout:
        raise typer.BadParameter(f"{settle:g} is not below --timeout ({timeout:g})", param_hint="--settle")
    draining = Drain(url, *(router or ()))
    try:
        strangers = draining.leave()
        left, drained = draining.wait(timeout, settle, lambda left: None if json else emit(str(left)))
    except StillUsed as error:
        raise CommandError(str(error)) from error
    except CannotTell as error:
        raise NotReached(str(error)) from error
    if not drained:
        raise Late(f"{url} is not drained after {timeout:g} s: {left}")
    if json:
        emit_json("drain", {"url": url, "drained": True, "known_to_router": not strangers if router else None})
    else:
        unknown = "".join(f"; {one} does not know it, or not any more" for one in strangers)
        emit(f"{url} has nothing left to do: end it{unknown}")
    return Exit.OK


def introduce(urls: Urls, json: Json = False) -> Exit:
    """Link prefill and decode instances before requests come, and see that every two of them work."""
    try:
        from vllm_pd_connector.proxy.commands.introduce import introduce as introduce_all
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        raise CommandError("aiohttp is missing; pip install vllm-pd-connector[proxy]") from error
    done, unusable = asyncio.run(introduce_all(urls))
    if not done:
        raise CommandError("; ".join(unusable) or "no prefill and decode instance among these: name one of each")
    if json:
        pairs = [(str(one.prefill), str(one.decode), one.seconds, one.failure) for one in done]
        rows = [dict(zip(("prefill", "decode", "seconds", "failure"), pair, strict=True)) for pair in pairs]
        emit_json("introduce", {"pairs": rows, "unusable": unusable})
    else:
        for line in (*done, *unusable):
            emit(str(line))
    return Exit.REFUSED if unusable or any(one.failure for one in done) else Exit.OK


def proxy() -> None:
    """Route requests to prefill and decode instances; see vllm-pd proxy --help."""


_COMMANDS = (
    explain,
    manifest,
    doctor,
    plan,
    bench,
    check_config,
    migrate,
    keygen,
    announce,
    drain,
    introduce,
    top,
    proxy,
)
for _command in _COMMANDS:
    app.command()(_command)
app.add_typer(trace, name="trace")

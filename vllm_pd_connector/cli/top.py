"""`vllm-pd top`: instances, links and failures in the terminal, renewed while one looks.

It asks each instance for its `/metrics`, and a router's operators' interface for the instances behind it. An instance
that does not answer is a line that says so: it may come.
"""

from __future__ import annotations

import argparse
import dataclasses
import http.client
import json as json_
import time
import urllib.error
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vllm_pd_connector.arguments import base_url, seconds
from vllm_pd_connector.cli.options import Json, taken
from vllm_pd_connector.cli.output import Exit, NotReached, emit, emit_json, printable, table
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.instance_info import MAX_PAGE_BYTES, opened
from vllm_pd_connector.routing.overview import (
    INSTANCE_HEADS,
    LINK_HEADS,
    Look,
    instance_cells,
    instance_rows,
    link_cells,
    link_rows,
    read,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REPLY_S = 5.0
AT_ONCE = 16


def top(
    urls: Annotated[
        list[str] | None, typer.Argument(parser=taken(base_url), metavar="[URL...]", help="base URL of an instance")
    ] = None,
    router: Annotated[
        str | None,
        typer.Option(
            parser=taken(base_url), metavar="URL", help="operators' interface of vllm-pd proxy: its instances, too"
        ),
    ] = None,
    interval: Annotated[float, typer.Option(parser=taken(seconds), metavar="SECONDS", help="between two looks")] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="print two looks' worth and end")] = False,
    json: Json = False,
) -> Exit:
    """Show what instances move, hold and fail, and who moves what with whom."""
    if not urls and router is None:
        raise typer.BadParameter("give URLs of instances, or --router")
    before = look(urls or [], router)
    if once or json:
        time.sleep(interval)
        now = look(urls or [], router)
        if all(one.problem for one in now.values()):
            raise NotReached("; ".join(f"{one.url}: {one.problem}" for one in now.values()) or f"{router} knows none")
        _print(list(now.values()), before, as_json=json)
        return Exit.OK
    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        now = before
        while True:
            live.update(view(list(now.values()), before), refresh=True)
            time.sleep(interval)
            before, now = now, look(urls or [], router)


def look(urls: Sequence[str], router: str | None) -> dict[str, Look]:
    """All instances at once, by URL.

    Raises:
        NotReached: the router does not say which there are.
    """
    wanted = dict.fromkeys([*urls, *(_behind(router) if router is not None else ())])
    with ThreadPoolExecutor(AT_ONCE) as pool:
        return {one.url: one for one in pool.map(_look, wanted)}


def _look(url: str) -> Look:
    now = time.monotonic()
    try:
        return read(_get(f"{url}/metrics").decode(errors="replace"), url, now)
    except (ProtocolError, OSError, http.client.HTTPException) as error:
        return Look(url, now, problem=str(error) or type(error).__name__)


def _behind(router: str) -> list[str]:
    where = f"{router}/instances"
    try:
        rows = json_.loads(_get(where))["instances"]
        return [base_url(str(row["url"])) for row in rows]
    except (OSError, http.client.HTTPException, ProtocolError) as error:
        raise NotReached(f"{where}: {error}; give the router's --admin-host and --admin-port") from error
    except (ValueError, TypeError, KeyError, RecursionError, argparse.ArgumentTypeError) as error:
        raise NotReached(f"{where}: not what this project's router says: {error}") from error


def _get(where: str) -> bytes:
    """Raises: OSError, HTTPException, ProtocolError (another status, or more than may be)."""
    try:
        with opened(where, timeout=REPLY_S) as answer:
            content: bytes = answer.read(MAX_PAGE_BYTES + 1)
    except urllib.error.HTTPError as error:
        with error:
            raise ProtocolError(f"HTTP {error.code}") from error
    if len(content) > MAX_PAGE_BYTES:
        raise ProtocolError(f"more than {MAX_PAGE_BYTES} bytes")
    return content


def view(looks: Sequence[Look], before: Mapping[str, Look]) -> Group:
    """Both tables, for a terminal."""
    instances, links = Table(*INSTANCE_HEADS, box=None), Table(*LINK_HEADS, box=None)
    for row in instance_rows(looks, before):
        style = "red" if row.wrong else ""
        instances.add_row(*map(Text, instance_cells(row)), style=style)  # Text: no markup of others is obeyed
    for link in link_rows(looks, before):
        links.add_row(*map(Text, link_cells(link)))
    return Group(instances, "", links)


def _print(looks: Sequence[Look], before: Mapping[str, Look], *, as_json: bool) -> None:
    rows, links = instance_rows(looks, before), link_rows(looks, before)
    if as_json:
        emit_json(
            "top", {"instances": list(map(dataclasses.asdict, rows)), "links": list(map(dataclasses.asdict, links))}
        )
        return
    lines = table([INSTANCE_HEADS, *map(instance_cells, rows)])
    if links:
        lines += ["", *table([LINK_HEADS, *map(link_cells, links)])]
    emit("\n".join(map(printable, lines)))

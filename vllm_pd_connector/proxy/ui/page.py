"""`/ui`: all instances of the router at one look, as a page that loads itself again.

No script, no file and no other host: the tables are made here, and a browser is told to run and load nothing. Names
are other processes' words, so every cell is escaped. Whoever looks, instances are asked at most once in `LOOK_EVERY_S`.
"""

from __future__ import annotations

import asyncio
import time
from html import escape
from typing import TYPE_CHECKING

from aiohttp import web

from vllm_pd_connector.errors import ProtocolError
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
    from collections.abc import Iterable, Mapping, Sequence
    from typing import Any

    from vllm_pd_connector.proxy.fleet import Fleet

LOOK_EVERY_S = 1.0
LOAD_EVERY_S = 2
ROUTER_HEADS = ("instance", "roles", "state", "why", "in flight")
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
}
_STYLE = """
body{font:14px system-ui,sans-serif;margin:1.5em;color:#1a1a1a;background:#fff}
h1{font-size:1.3em} h2{font-size:1.05em;margin:1.5em 0 .4em} p{color:#555}
table{border-collapse:collapse} th{font-weight:600} tr.bad td{color:#b00020}
td,th{padding:.25em .8em .25em 0;text-align:left;border-bottom:1px solid #ddd;white-space:nowrap}
td:last-child{white-space:normal}
@media(prefers-color-scheme:dark){
body{color:#e8e8e8;background:#161616} td,th{border-color:#333} tr.bad td{color:#ff6b6b}}
"""


class Page:
    """Looks at a fleet's instances, and shows the last look beside the one before."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._now: dict[str, Look] = {}
        self._before: dict[str, Look] = {}
        self._looked = float("-inf")
        self._lock = asyncio.Lock()

    async def show(self, _request: web.Request) -> web.Response:
        async with self._lock:
            if time.monotonic() >= self._looked + LOOK_EVERY_S:
                pages = await self._fleet.pages()
                self._before, self._now = self._now, await asyncio.to_thread(_looks, pages, time.monotonic())
                self._looked = time.monotonic()
        text = render(self._fleet.describe(), list(self._now.values()), self._before)
        return web.Response(text=text, content_type="text/html", headers=HEADERS)


def _looks(pages: Mapping[str, str | Exception], at: float) -> dict[str, Look]:
    """In a thread: reading a page takes some 35 ms per engine, for which streams would stand still."""
    found = {}
    for url, page in pages.items():
        try:
            if isinstance(page, Exception):
                raise ProtocolError(str(page) or type(page).__name__)
            found[url] = read(page, url, at)
        except ProtocolError as error:
            found[url] = Look(url, at, problem=str(error))
    return found


def render(known: Sequence[Mapping[str, Any]], looks: Sequence[Look], before: Mapping[str, Look]) -> str:
    """The page, of what the router knows (`Fleet.describe`) and what instances say."""
    routed = [
        (str(i["url"]), ", ".join(i["roles"]), str(i["state"]), str(i["why"]), str(i["in_flight"])) for i in known
    ]
    rows = instance_rows(looks, before)
    instances = [instance_cells(row) for row in rows]
    bad = {row.url for row in rows if row.wrong}
    links = [link_cells(row) for row in link_rows(looks, before)]
    return "".join(
        (
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="refresh" content="{LOAD_EVERY_S}"><title>vllm-pd</title><style>{_STYLE}</style></head>',
            "<body><h1>vLLM prefill/decode</h1>",
            _table("router", "Router", ROUTER_HEADS, routed, {str(i["url"]) for i in known if i["state"] != "up"}),
            _table("instances", "Instances", INSTANCE_HEADS, instances, bad),
            _table("links", "Links", LINK_HEADS, links, set()),
            f"<p>Loaded again every {LOAD_EVERY_S} s. Failures count since an instance's start.</p></body></html>",
        )
    )


def _table(name: str, title: str, heads: Sequence[str], rows: Iterable[Sequence[str]], bad: set[str]) -> str:
    head = "".join(f"<th>{escape(one)}</th>" for one in heads)
    body = ""
    for row in rows:
        cells = "".join(f"<td>{escape(cell)}</td>" for cell in row)
        body += f'<tr class="bad">{cells}</tr>' if row[0] in bad else f"<tr>{cells}</tr>"
    return f'<h2>{title}</h2><table id="{name}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>'

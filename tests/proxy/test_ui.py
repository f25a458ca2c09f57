"""`/ui`: what the router and its instances say, as a page in which nobody's words are obeyed."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from tests.support.ports import free_port
from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import HANDS_OVER, exposition, info
from vllm_pd_connector.proxy.serve import admin_application
from vllm_pd_connector.proxy.ui import page as ui

EVIL = "<script>alert(1)</script>"
GAVE = 'vllm:pd_peer_given_bytes_total{engine="0",peer="' + EVIL + '",transport="nixl"} 4096.0\n'


class Tables(HTMLParser):
    """The cells of each table, by its id, and every element that there is."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.rows: dict[str, list[list[str]]] = {}
        self.elements: set[str] = set()
        self.bad = 0
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.add(tag)
        self.bad += ("class", "bad") in attrs
        if tag == "table":
            self._now = self.rows.setdefault(str(dict(attrs)["id"]), [])
        elif tag == "tr":
            self._now.append([])
        elif tag in ("td", "th"):
            self._now[-1].append("")
            self._cell = True

    def handle_endtag(self, tag: str) -> None:
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._cell:
            self._now[-1][-1] += data


@over_bench
async def test_the_page_shows_instances_links_and_who_is_away(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER, info(engine_id="p"))
    prefill.page = (exposition(info(engine_id="p")) + GAVE).encode()
    away = f"http://127.0.0.1:{free_port()}"
    await bench.route([prefill.url], [away])
    admin = await bench.serve(admin_application(bench.router))
    async with bench.client.get(f"{admin}/ui") as response:
        text = await response.text()
        assert response.status == 200 and "default-src 'none'" in response.headers["Content-Security-Policy"]
    tables = Tables(text)
    states = {row[0]: row[1:3] for row in tables.rows["router"][1:]}
    assert states == {prefill.url: ["prefill", "up"], away: ["decode", "down"]}
    found = {row[0]: row for row in tables.rows["instances"][1:]}
    assert found[prefill.url][1:4] == ["producer", "push", "nixl"] and "onnect" in found[away][-1]
    assert [row[:4] for row in tables.rows["links"][1:]] == [[prefill.url, "to", EVIL, "nixl"]]
    assert "script" not in tables.elements and tables.bad == 2


@over_bench
async def test_instances_are_asked_no_more_often_however_many_look(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER, info(engine_id="p"))
    await bench.route([prefill.url])
    fleet, asked = bench.router.fleet, 0
    pages = fleet.pages

    async def counted() -> dict[str, str | Exception]:
        nonlocal asked
        asked += 1
        return await pages()

    fleet.pages = counted  # type: ignore[method-assign]
    admin = await bench.serve(admin_application(bench.router))
    for _ in range(5):
        async with bench.client.get(f"{admin}/ui") as response:
            assert response.status == 200
    assert asked <= 1 + 5 * ui.LOOK_EVERY_S and asked < 5


@over_bench
async def test_clients_of_the_router_do_not_see_the_page(bench: Bench) -> None:
    await bench.route()
    assert (await bench.get("/ui"))[0] == 404


@pytest.mark.parametrize("path", ["/ui", "/instances"])
@over_bench
async def test_a_page_whose_own_name_leads_to_loopback_sees_nothing(bench: Bench, path: str) -> None:
    await bench.pair()
    admin = await bench.serve(admin_application(bench.router)) + path
    for host, status in (
        ("elsewhere.example:80", 421),
        ("", 421),
        ("127.0.0.1:1", 200),
        ("[::1]", 200),
        ("LocalHost:1", 200),
    ):
        async with bench.client.get(admin, headers={"Host": host}) as response:
            assert response.status == status, host
            assert status == 200 or "http://" not in await response.text()

"""`/ui` in a real browser: it shows rows, loads itself again, obeys nobody's words, and complains of nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from tests.support.patience import PATIENCE_S
from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.browser import NoBrowser, Page, open_browser
from tests.support.proxy.stand_ins import HANDS_OVER, exposition, info
from vllm_pd_connector.proxy.fleet import FAILURES
from vllm_pd_connector.proxy.serve import admin_application

pytestmark = pytest.mark.browser

RED = "rgb(176, 0, 32)"
HOSTILE = (
    "<script>document.title='owned'</script>",
    "<img src=x onerror=document.title='owned'>",
    "</td></tr></table><h1>owned</h1>",
    "&lt;b&gt;&#x22; onmouseover=alert(1)",
)


def gave(peer: str) -> str:
    return f'vllm:pd_peer_given_bytes_total{{engine="0",peer="{peer}",transport="nixl"}} 4096.0\n'


def in_browser(test: Callable[[Bench, Page], Awaitable[None]]) -> Callable[[Path], None]:
    def run(tmp_path: Path) -> None:
        async def both(bench: Bench) -> None:
            async with open_browser(tmp_path) as page:
                await test(bench, page)

        over_bench(both, 3 * PATIENCE_S)()

    run.__name__ = test.__name__
    return run


async def seen(what: str, holds: Callable[[], Awaitable[bool]]) -> None:
    try:
        async with asyncio.timeout(PATIENCE_S):
            while not await holds():
                await asyncio.sleep(0.05)
    except TimeoutError:
        pytest.fail(f"not within {PATIENCE_S:g} s: {what}")


@in_browser
async def test_rows_are_seen_and_an_instance_that_goes_away_is_seen_to_go(bench: Bench, page: Page) -> None:
    prefill = await bench.instance(HANDS_OVER, info(engine_id="p"))
    decode = await bench.instance(HANDS_OVER, info(engine_id="d", role="kv_consumer"))
    stays, goes = prefill.url, decode.url
    await bench.route([stays], [goes])
    await bench.check()
    await page.open(f"{await bench.serve(admin_application(bench.router))}/ui")

    async def states() -> dict[str, str]:
        return {row[0]: row[2] for row in await page.rows("router")}

    async def both_up() -> bool:
        both = await states() == {stays: "up", goes: "up"}
        return both and {row[0] for row in await page.rows("instances")} == {stays, goes}

    await seen("both instances", both_up)  # whole: the page is loaded again in between
    await decode.server.close()
    for _ in range(FAILURES):
        await bench.check()

    async def one_down() -> bool:  # the page loads itself again; nobody reloads it here
        marked = "[...document.querySelectorAll('#router tr.bad td')].map(cell => getComputedStyle(cell).color)[0]"
        one = await page.value("document.querySelectorAll('#router tr.bad').length") == 1
        return one and await page.value(marked) == RED and await states() == {stays: "up", goes: "down"}

    await seen("the one that went away", one_down)
    assert page.complaints == []


@in_browser
async def test_hostile_names_are_text(bench: Bench, page: Page) -> None:
    prefill = await bench.instance(HANDS_OVER, info(engine_id="p"))
    prefill.page = (exposition(info(engine_id="p")) + "".join(map(gave, HOSTILE))).encode()
    await bench.route([prefill.url])
    await bench.check()
    await page.open(f"{await bench.serve(admin_application(bench.router))}/ui")

    async def shown() -> bool:
        names = {row[2] for row in await page.rows("links")}
        came = await page.value("document.querySelectorAll('script, img, h1 ~ h1').length")
        assert not came
        if came is None:  # the page is renewed
            return False
        return names == set(HOSTILE) and await page.value("document.title") == "vllm-pd"

    await seen("each name as it is", shown)
    assert page.complaints == []


@in_browser
async def test_even_a_script_that_came_through_would_not_run(bench: Bench, page: Page) -> None:
    """The page's policy is the second wall: what is put into it as markup is not run, and the browser says so."""
    await bench.route()
    await page.open(f"{await bench.serve(admin_application(bench.router))}/ui")

    async def loaded() -> bool:
        return await page.value("document.querySelector('#router') !== null") is True

    await seen("the page", loaded)
    await page.value("document.body.insertAdjacentHTML('beforeend', `<img src=x onerror=\"document.title='owned'\">`)")

    async def refused() -> bool:
        return any("Content Security Policy" in one for one in page.complaints)

    await seen("the browser's refusal", refused)

    async def titled() -> bool:
        title = await page.value("document.title")
        assert title in (None, "", "vllm-pd")
        return bool(title)

    await seen("the title", titled)


def test_without_a_browser_it_is_said_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    async def start() -> None:
        async with open_browser(tmp_path):
            pytest.fail("there is a browser")

    with pytest.raises(NoBrowser, match="make test-browser"):
        asyncio.run(start())

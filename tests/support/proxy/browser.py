"""A headless Chromium, by its DevTools protocol: opens a page, says what a reader sees of it and what it complains of.

aiohttp has all that the protocol takes, so no driver of another project stands between. Debian's `chromium`, which
`make test-browser` installs.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.patience import PATIENCE_S

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--disable-dev-shm-usage", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--remote-debugging-port=0",
)  # fmt: skip
NAMES = ("chromium", "chromium-browser", "google-chrome")
_COMPLAINTS = {"Log.entryAdded", "Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Page.javascriptDialogOpening"}


class NoBrowser(Exception):
    """None is installed, or it does not start."""


class Page:
    """One tab. `complaints` are what its console, its scripts and its dialogs said."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.complaints: list[str] = []
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._reader = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for message in self._socket:
            said = message.json()
            if (waiting := self._answers.pop(said.get("id"), None)) is not None:
                if not waiting.done():  # whoever asked may have waited long enough
                    waiting.set_result(said)
            elif said.get("method") in _COMPLAINTS:
                self.complaints.append(f"{said['method']}: {said['params']}")
        for waiting in self._answers.values():
            waiting.cancel("the browser has gone")

    async def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        async with asyncio.timeout(PATIENCE_S):
            answer = await self._answers[number]
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    async def open(self, url: str) -> None:
        for domain in ("Page", "Runtime", "Log"):
            await self.ask(f"{domain}.enable")
        found = await self.ask("Page.navigate", url=url)
        if "errorText" in found:
            raise RuntimeError(f"{url}: {found['errorText']}")

    async def value(self, expression: str) -> Any:
        """Of a JavaScript expression in the page; None while the page is loaded anew."""
        try:
            found = await self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        except RuntimeError as error:
            if "context" in str(error):
                return None
            raise
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    async def rows(self, table: str) -> list[list[str]]:
        """The text of a table's cells as a reader sees it, without its head; nothing while there is none."""
        cells = "Array.from(row.cells, cell => cell.innerText.trim())"
        found = await self.value(f"Array.from(document.querySelectorAll('#{table} tbody tr'), row => {cells})")
        return [list(row) for row in found or ()]

    async def close(self) -> None:
        await self._socket.close()
        await self._reader


@contextlib.asynccontextmanager
async def open_browser(profile: Path) -> AsyncIterator[Page]:
    """A browser with an empty profile in this directory, and its one tab.

    Raises:
        NoBrowser: see the class.
    """
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found is None:
        raise NoBrowser(f"none of {', '.join(NAMES)} is installed; `make test-browser` does it, or says how")
    log = profile / "log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            found, *FLAGS, f"--user-data-dir={profile}", "about:blank", stdout=output, stderr=output
        )
    try:
        async with aiohttp.ClientSession() as session:
            page = Page(await session.ws_connect(await _tab(session, process, profile, log), max_msg_size=0))
            try:
                yield page
            finally:
                await page.close()
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _tab(session: aiohttp.ClientSession, process: asyncio.subprocess.Process, profile: Path, log: Path) -> str:
    """The address at which its tab is spoken to, once it has one."""
    told = profile / "DevToolsActivePort"
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while process.returncode is None:
                if told.exists() and (words := told.read_text().split()):
                    async with session.get(f"http://127.0.0.1:{words[0]}/json/list") as response:
                        for target in await response.json(content_type=None):
                            if target["type"] == "page":
                                return str(target["webSocketDebuggerUrl"])
                await asyncio.sleep(0.05)
    raise NoBrowser(f"it does not start (exit status {process.returncode}): {log.read_text(errors='replace')[-2000:]}")

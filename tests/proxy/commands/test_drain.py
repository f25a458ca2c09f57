"""`vllm-pd drain`: when an instance may be ended, told by stand-ins of an instance and by a real router's interface."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from aiohttp import web

from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, exposition, info
from vllm_pd_connector import cli
from vllm_pd_connector.cli.output import Exit
from vllm_pd_connector.proxy.commands import drain
from vllm_pd_connector.proxy.commands.drain import CannotTell, Drain, Left
from vllm_pd_connector.proxy.serve import admin_application


class StandIn:
    """An HTTP server whose `/metrics` is made by `page`, and `/instances` by `instances`; it notes what is deleted."""

    def __init__(self) -> None:
        self.page: Callable[[], str] = lambda: idle()
        self.instances: Callable[[], str] = lambda: '{"instances": []}'
        self.status, self.removal = 200, 202
        self.removed: list[str] = []
        self.looks = 0
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                stand_in.looks += 1
                page = stand_in.instances if self.path.startswith("/instances") else stand_in.page
                self._answer(stand_in.status, page())

            def do_DELETE(self) -> None:
                stand_in.removed.append(self.path)
                self._answer(stand_in.removal, "{}")

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture
def there() -> Iterator[StandIn]:
    made = StandIn()
    yield made
    made.close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "LOOK_EVERY_S", 0.02)


QUICK = ("--settle", "0.1")


def page(running: int = 0, waiting: int = 0, leases: int = 0, engine: int = 0) -> str:
    rows = {"vllm:num_requests_running": running, "vllm:num_requests_waiting": waiting, "vllm:pd_leases": leases}
    return exposition(info(), engine) + "".join(f'{name}{{engine="{engine}"}} {n}.0\n' for name, n in rows.items())


def idle() -> str:
    return page()


def test_an_idle_instance_may_be_ended_when_it_was_idle_for_a_while(there: StandIn) -> None:
    began = time.monotonic()
    assert cli.main(["drain", there.url, *QUICK]) == 0
    assert time.monotonic() - began >= 0.1 and there.looks >= 2


@pytest.mark.parametrize("busy", [page(running=1), page(waiting=1), page(leases=1), page() + page(leases=1, engine=1)])
def test_it_waits_for_requests_and_for_leases_of_every_engine(there: StandIn, busy: str) -> None:
    there.page = lambda: busy if there.looks < 4 else idle()
    told: list[Left] = []
    left, drained = Drain(there.url).wait(10.0, 0.1, told.append)
    assert drained and left.nothing and len(told) == 2 and not told[0].nothing


def test_an_instance_that_gets_work_in_between_was_not_idle(there: StandIn) -> None:
    there.page = lambda: idle() if there.looks % 2 else page(running=1)
    assert Drain(there.url).wait(0.5, settle=0.2)[1] is False


def test_what_does_not_end_in_time_has_an_exit_code_of_its_own(
    there: StandIn, capsys: pytest.CaptureFixture[str]
) -> None:
    there.page = lambda: page(waiting=2, leases=3)
    assert cli.main(["drain", there.url, *QUICK, "--timeout", "0.2"]) == Exit.LATE == 5
    assert "2 requests, 3 leases" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "vllm:num_requests_running 0.0\n", exposition(info()), page(leases=1).replace("1.0", "NaN"), "{", "<html>"],
)
def test_who_does_not_say_what_is_left_is_never_called_drained(there: StandIn, text: str) -> None:
    there.page = lambda: text
    assert cli.main(["drain", there.url, *QUICK, "--timeout", "5"]) == Exit.UNREACHABLE


def test_what_cannot_settle_in_time_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["drain", "http://127.0.0.1:9", "--timeout", "5", "--settle", "5"]) == Exit.USAGE
    assert "--settle" in capsys.readouterr().err


def test_nobody_there_is_not_drained() -> None:
    with pytest.raises(CannotTell):
        Drain("http://127.0.0.1:1").look()


def test_the_router_is_told_first_and_asked_for_what_it_waits_for(there: StandIn) -> None:
    router = StandIn()
    try:
        leaving = f'{{"instances": [{{"url": "{there.url}", "in_flight": 1}}]}}'
        router.instances = lambda: leaving if router.looks < 4 else '{"instances": []}'
        assert cli.main(["drain", there.url, *QUICK, "--router", router.url]) == 0
        assert len(router.removed) == 1 and router.looks >= 4
        router.instances = lambda: leaving
        assert cli.main(["drain", there.url, *QUICK, "--router", router.url, "--timeout", "0.3"]) == Exit.LATE
        router.instances, router.removal = (lambda: '{"instances": []}'), 404
        assert cli.main(["drain", there.url, *QUICK, "--router", router.url]) == 0, "as a second time"
        router.removal = 405
        assert cli.main(["drain", there.url, *QUICK, "--router", router.url]) == Exit.UNREACHABLE, (
            "no operators' interface"
        )
        router.removal, router.instances = 202, lambda: '{"instances": [1]}'
        assert cli.main(["drain", there.url, *QUICK, "--router", router.url]) == Exit.UNREACHABLE
    finally:
        router.close()


def rows(*of: tuple[str, str, str, int]) -> str:
    """What the router says of instances: URL, state, first engine's id and requests in flight."""
    names = ("url", "state", "engine_id", "in_flight")
    return json.dumps({"instances": [dict(zip(names, row, strict=True)) for row in of]})


@pytest.mark.parametrize("removal", [404, 202], ids=["by that name alone", "by both"])
def test_an_instance_that_the_router_uses_by_another_name_may_not_be_ended(
    there: StandIn, removal: int, capsys: pytest.CaptureFixture[str]
) -> None:
    router, port = StandIn(), there.server.server_port
    router.removal = removal
    words = ["drain", there.url, *QUICK, "--router", router.url]
    own = (there.url, "leaving", "e-0", 0)
    try:
        same_place = (f"http://localhost:{port}", "used", "another", 0)
        same_engine = ("http://prefill.example:8000", "used", info().engine_id, 0)
        for other in (same_place, same_engine):
            router.instances = lambda other=other: rows(own, other) if removal == 202 else rows(other)
            assert cli.main(words) == Exit.REFUSED == 1
            assert other[0] in capsys.readouterr().err
        router.instances = lambda: rows(("http://127.0.0.1:1", "used", "another", 3), ("http://x.invalid", "", "", 0))
        assert cli.main(words) == 0, "others are others"
    finally:
        router.close()


def test_what_is_left_at_another_name_that_was_removed_is_waited_for(there: StandIn) -> None:
    router = StandIn()
    router.removal = 404
    other = f"http://localhost:{there.server.server_port}"
    try:
        router.instances = lambda: rows((other, "leaving", "", 2))
        leaving = Drain(there.url, router.url)
        assert leaving.leave() == [router.url]
        assert leaving.wait(0.2, 0.1) == (Left(0, 0, at_router=2), False)
        router.instances = lambda: rows((other, "leaving", "", 0))
        assert leaving.wait(10.0, 0.1) == (Left(0, 0), True)
    finally:
        router.close()


def test_of_several_routers_each_is_told_and_waited_for(there: StandIn, capsys: pytest.CaptureFixture[str]) -> None:
    """Routers beside each other know nothing of each other: the other one would go on sending."""
    routers = [StandIn(), StandIn()]
    try:
        routers[1].instances = lambda: rows((there.url, "leaving", "", 1))
        leaving = Drain(there.url, *(router.url for router in routers))
        assert leaving.leave() == []
        assert leaving.wait(0.2, 0.1) == (Left(0, 0, at_router=1), False)
        routers[1].instances = lambda: rows()
        routers[0].removal = 404
        words = ["drain", there.url, "--settle", "0.1", *(f"--router={router.url}" for router in routers)]
        assert cli.main(words) == 0
        assert f"{routers[0].url} does not know it" in (said := capsys.readouterr().out) and routers[1].url not in said
    finally:
        for router in routers:
            router.close()


@over_bench
async def test_this_project_s_router_sends_nothing_more_and_says_when_its_last_answer_came(bench: Bench) -> None:
    let_go = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        await let_go.wait()
        return await HANDS_OVER(request)

    p, d = await bench.instance(answer), await bench.instance(DONE)
    p.page = idle().encode()
    await bench.route([p.url], [d.url], handoff="serial")
    leaving = Drain(p.url, await bench.serve(admin_application(bench.router)))
    under_way = asyncio.create_task(bench.ask())
    await p.arrived.wait()
    assert await asyncio.to_thread(leaving.leave) == []
    assert await asyncio.to_thread(leaving.wait, 0.3, 0.1) == (Left(0, 0, at_router=1), False)
    assert (await bench.ask())[0] == 503
    let_go.set()
    assert (await under_way)[0] == 200
    assert await asyncio.to_thread(leaving.wait, 10.0, 0.1) == (Left(0, 0), True)
    assert await asyncio.to_thread(leaving.leave), "it is gone from there"

"""The router's instances come, go and say what they are."""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import struct
import threading
import time

import pytest
from aiohttp import ClientError, web

from tests.support.ports import probes_due
from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import DONE, HANDS_OVER, LIMIT, answers, info
from vllm_pd_connector.instance_info import MAX_PAGE_BYTES, EngineInfo, parse
from vllm_pd_connector.proxy.choice import PromptPrefix
from vllm_pd_connector.proxy.instance import InstanceRole, LegError
from vllm_pd_connector.proxy.legs import GONE_S, Limits, encoded_body, make_session
from vllm_pd_connector.proxy.serve import admin_application

_SO_ATTACH_FILTER = 26  # asm-generic/socket.h


@over_bench
async def test_an_instance_that_went_away_is_passed_over_and_used_again_when_it_is_back(bench: Bench) -> None:
    prefills = [await bench.instance(HANDS_OVER) for _ in range(2)]
    decode = await bench.instance(DONE)
    await bench.route([one.url for one in prefills], [decode.url])
    port = prefills[0].server.port
    await prefills[0].server.close()
    assert [(await bench.ask())[0] for _ in range(4)] == [200] * 4
    assert [len(one.asked) for one in prefills] == [0, 4]
    back = await bench.instance(HANDS_OVER, port=port)
    await bench.check()
    assert [(await bench.ask())[0] for _ in range(2)] == [200] * 2
    assert len(back.asked) == 1


ABORTS = answers({"choices": [{"text": "", "finish_reason": "abort"}]})
"""vLLM that was told to end, while it lets run what it has; its `/health` is good."""


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@over_bench
async def test_an_instance_that_is_ending_loses_no_request_and_is_asked_last(bench: Bench, leg: str) -> None:
    usual = {"prefill": HANDS_OVER, "decode": DONE}
    ending, other = await bench.instance(ABORTS), await bench.instance(usual[leg])
    rest = await bench.instance(usual["decode" if leg == "prefill" else "prefill"])
    both, one = [ending.url, other.url], [rest.url]
    await bench.route(*((both, one) if leg == "prefill" else (one, both)))
    assert [(await bench.ask())[0] for _ in range(6)] == [200] * 6
    await bench.check()
    assert [(await bench.ask())[0] for _ in range(2)] == [200] * 2
    assert (len(ending.asked), len(other.asked)) == (1, 8)


@over_bench
async def test_an_ending_instance_is_asked_where_there_is_no_other_and_once(bench: Bench) -> None:
    prefill, decode = await bench.pair(decode=ABORTS)
    for count in (1, 2):
        assert (await bench.ask())[0] == 502
        assert len(decode.asked) == len(prefill.asked) == count


@over_bench
async def test_an_unhealthy_instance_gets_nothing_until_it_is_healthy(bench: Bench) -> None:
    sick, prefill, decode = [await bench.instance(h) for h in (HANDS_OVER, HANDS_OVER, DONE)]
    sick.health = 503
    await bench.route([sick.url, prefill.url], [decode.url])
    for _ in range(2):
        await bench.ask()
    assert (len(sick.asked), len(prefill.asked)) == (0, 2)
    sick.health = 200
    await bench.check()
    for _ in range(2):
        await bench.ask()
    assert (len(sick.asked), len(prefill.asked)) == (1, 3)


@over_bench
async def test_one_bad_check_is_forgiven_and_a_second_is_not(bench: Bench) -> None:
    prefill, _ = await bench.pair()
    prefill.health = 503
    await bench.check()
    assert (await bench.get("/health"))[0] == 200
    await bench.check()
    status, text = await bench.get("/health")
    assert status == 503 and prefill.url in text and "503" in text


@over_bench
async def test_a_leg_that_is_being_ended_is_not_ended_again(bench: Bench) -> None:
    prefill, _ = await bench.pair()
    fleet = bench.router.fleet
    instance = fleet.choose(InstanceRole.PREFILL, PromptPrefix(), set())
    assert instance is not None
    begun, ending, let_go = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def leg() -> None:
        async with fleet.answering(instance):
            try:
                begun.set()
                await asyncio.Event().wait()
            finally:
                ending.set()
                await let_go.wait()  # as a connection does that takes its time to close

    ended = asyncio.create_task(leg())
    await begun.wait()
    await prefill.server.close()
    for _ in range(2):
        await bench.check()
    await ending.wait()
    await bench.check()
    let_go.set()
    with pytest.raises(TimeoutError):
        await ended


@over_bench
async def test_the_kernel_asks_whether_the_machine_of_an_instance_that_says_nothing_is_there(bench: Bench) -> None:
    decode = await bench.instance(DONE)
    async with make_session(Limits(LIMIT, LIMIT)) as session, session.get(decode.url + "/health") as response:
        while not (due := probes_due(int(decode.url.rpartition(":")[2]))):  # until all that was sent is acknowledged
            await asyncio.sleep(0.01)
        assert all(0 < ticks <= GONE_S * os.sysconf("SC_CLK_TCK") for ticks in due)
        await response.read()


def test_a_request_to_a_machine_that_is_gone_ends_though_it_went_over_a_connection_that_was_kept(monkeypatch) -> None:
    """The kernel asks for nothing as long as it sends the request itself again."""
    monkeypatch.setattr("vllm_pd_connector.proxy.legs.GONE_S", 6)
    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # a filter that takes no packet

    def serve() -> socket.socket:
        taken, _ = listener.accept()
        taken.recv(65536)
        taken.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", 1, ctypes.addressof(nothing)))
        taken.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
        return taken

    async def ask_twice() -> None:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        served = asyncio.create_task(asyncio.to_thread(serve))
        async with make_session(Limits(LIMIT, 6 * LIMIT)) as session, asyncio.timeout(3 * LIMIT):
            async with session.post(url) as response:
                await response.read()
            with await served, pytest.raises(ClientError):
                await session.post(url)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(ask_twice())


@over_bench
async def test_an_instance_that_does_not_answer_its_check_delays_no_other(bench: Bench) -> None:
    hangs, prefill, decode = [await bench.instance(h) for h in (HANDS_OVER, HANDS_OVER, DONE)]
    await bench.route([hangs.url, prefill.url], [decode.url], check_interval=0.05)
    hangs.held, prefill.health = asyncio.Event(), 503
    fleet, checks = bench.router.fleet, hangs.checks
    while hangs.checks == checks or any(i.url == prefill.url for i in fleet.usable(InstanceRole.PREFILL)):
        await asyncio.sleep(0)
    assert hangs.checks == checks + 1  # which is still under way


@over_bench
async def test_a_connection_that_an_instance_may_be_closing_is_not_used(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 0.0
    monkeypatch.setattr("aiohttp.connector.monotonic", lambda: time.monotonic() + ahead)
    connections = []

    async def note(request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        connections.append(request.transport.get_extra_info("peername"))
        return await HANDS_OVER(request)

    await bench.pair(note)
    assert (await bench.ask())[0] == 200
    ahead = 4.5  # vLLM's servers close a connection that was idle for five seconds
    assert [(await bench.ask())[0] for _ in range(2)] == [200] * 2
    assert connections[0] != connections[1] == connections[2]


@over_bench
async def test_a_page_that_is_no_text_or_has_no_end_is_that_instances_problem(bench: Bench) -> None:
    strange, endless, prefill = [await bench.instance(HANDS_OVER) for _ in range(3)]
    decode = await bench.instance(DONE)
    strange.page, endless.page = b"\xff\xfe{", b"# endless\n" * (MAX_PAGE_BYTES // 8)
    await bench.route([strange.url, endless.url, prefill.url], [decode.url])
    said = {row["url"]: (row["state"], row["why"]) for row in bench.router.fleet.describe()}
    assert said[strange.url][0] == said[endless.url][0] == "down"
    assert "not a Prometheus exposition" in said[strange.url][1] and "bytes" in said[endless.url][1]
    assert (await bench.ask())[0] == 200 and len(prefill.asked) == 1


@pytest.mark.parametrize(
    "body",
    ['{"prompt": [1], "seed": ' + "9" * 5000 + "}", '{"prompt": ' + "[" * 5000 + "]" * 5000 + "}"],
    ids=["a number of 5000 digits", "5000 brackets"],
)
@over_bench
async def test_json_that_python_does_not_read_is_the_clients_error(bench: Bench, body: str) -> None:
    prefill, _ = await bench.pair()
    async with bench.client.post(bench.url, data=body.encode()) as response:
        assert response.status == 400 and "is not JSON" in await response.text()
    assert not prefill.asked


def test_a_body_that_can_be_read_but_not_written_is_the_clients_error() -> None:
    nested: object = 1
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(LegError, match="nested too deeply") as refusal:
        encoded_body({"messages": nested})
    assert refusal.value.status == 400


@over_bench
async def test_streams_do_not_stand_still_while_the_page_of_an_instance_is_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    readers = set()

    def note(page: str) -> dict[int, EngineInfo]:
        readers.add(threading.current_thread())
        return parse(page)

    monkeypatch.setattr("vllm_pd_connector.proxy.fleet.parse", note)
    await bench.pair(says=(info(mode="pull"), None))
    assert readers and threading.current_thread() not in readers


@over_bench
async def test_instances_say_their_roles(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER, info(mode="pull"))
    decode = await bench.instance(DONE, info(role="kv_consumer", mode="pull"))
    await bench.route(instances=[decode.url, prefill.url])
    assert (await bench.ask())[0] == 200
    assert (len(prefill.asked), len(decode.asked)) == (1, 1)


@over_bench
async def test_an_instance_with_another_role_than_it_was_given_is_not_used(bench: Bench) -> None:
    prefill, _ = await bench.pair(says=(info(role="kv_consumer"), None))
    status, answer, _ = await bench.ask()
    assert status == 503 and "kv_consumer" in answer["error"]["message"]
    assert prefill.asked == []


@over_bench
async def test_a_restarted_engine_is_addressed_by_its_new_id(bench: Bench) -> None:
    prefill, decode = await bench.pair(says=(info(), None), facts_interval=1e-9)
    await bench.ask()
    prefill.says = info(engine_id="p-1")
    await bench.check()
    await bench.ask()
    assert [asked["kv_transfer_params"]["remote_engine_id"] for asked in decode.asked] == ["p-0", "p-1"]


@over_bench
async def test_instances_are_added_and_removed_while_requests_run(bench: Bench) -> None:
    waits = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await waits.wait()
        return await HANDS_OVER(request)

    first, second = await bench.instance(wait), await bench.instance(HANDS_OVER)
    decode = await bench.instance(DONE)
    await bench.route([first.url], [decode.url])
    admin = await bench.serve(admin_application(bench.router)) + "/instances"
    running = asyncio.create_task(bench.ask())
    await first.arrived.wait()
    async with bench.client.delete(admin, params={"url": first.url}) as response:
        assert (response.status, (await response.json())["in_flight"]) == (202, 1)
    assert (await bench.ask())[0] == 503
    _, page = await bench.get("/metrics")
    row = f'vllm_pd_proxy_instance_usable{{instance="{first.url}"}}'
    assert row not in page, "what is removed on purpose alarms nobody"
    assert f'vllm_pd_proxy_in_flight{{instance="{first.url}"}} 1.0' in page
    async with bench.client.post(admin, json={"url": second.url + "/", "role": "prefill"}) as response:
        assert response.status == 202
    await bench.check()
    assert (await bench.ask())[0] == 200
    waits.set()
    assert (await running)[0] == 200
    async with bench.client.get(admin) as response:
        shown = {one["url"]: one for one in (await response.json())["instances"]}
    assert set(shown) == {second.url, decode.url}
    assert shown[second.url]["state"] == "up"


@over_bench
async def test_a_removed_instance_stays_out_of_the_metrics_though_a_check_of_it_ends_later(bench: Bench) -> None:
    gone, decode = await bench.pair()
    gone.held, gone.health, checks = asyncio.Event(), 503, gone.checks
    checking = asyncio.create_task(bench.check())
    while gone.checks == checks:
        await asyncio.sleep(0)
    bench.router.fleet.remove(gone.url)
    gone.held.set()
    await checking
    _, page = await bench.get("/metrics")
    assert gone.url not in page and decode.url in page


@over_bench
async def test_a_pod_that_vanished_is_removed_and_one_of_the_routers_own_list_is_not(bench: Bench) -> None:
    """Who was added while the router ran is added again in its next life, under another address."""
    pods = [await bench.instance(handler) for handler in (HANDS_OVER, DONE)]
    await bench.route([pods[0].url], [])
    admin = await bench.serve(admin_application(bench.router)) + "/instances"
    async with bench.client.post(admin, json={"url": pods[1].url, "role": "decode"}) as response:
        assert response.status == 202
    await bench.check()
    assert (await bench.ask())[0] == 200
    for pod in pods:
        pod.health = 503
    await bench.check()
    assert {one["url"] for one in bench.router.fleet.describe()} == {pod.url for pod in pods}
    for pod in pods:
        bench.router.fleet._instances[pod.url].seen_at -= 3601.0
    await bench.check()
    assert len(bench.router.fleet.describe()) == 2, "with none that passes it may be the router that is cut off"
    other = await bench.instance(DONE)
    bench.router.fleet.add(other.url, InstanceRole.DECODE)
    bench.router.fleet.add("http://127.0.0.1:9", InstanceRole.DECODE, joined=True)  # and one that never was there
    await bench.check()
    await bench.check()
    here = {one["url"] for one in bench.router.fleet.describe()}
    assert here == {pods[0].url, other.url, "http://127.0.0.1:9"}
    page = (await bench.get("/metrics"))[1]
    assert pods[1].url not in page and pods[0].url in page


@pytest.mark.parametrize(
    ("method", "body", "query", "status"),
    [
        ("POST", {"url": "no"}, "", 400),
        ("POST", {}, "", 400),
        ("POST", [], "", 400),
        ("POST", {"url": "http://h:1", "role": "both"}, "", 400),
        ("POST", {"url": "http://h:1", "other": 1}, "", 400),
        ("DELETE", None, "?url=http://h:1", 404),
    ],
)
@over_bench
async def test_operators_mistakes_are_told(bench: Bench, method: str, body: object, query: str, status: int) -> None:
    await bench.route()
    admin = await bench.serve(admin_application(bench.router)) + "/instances" + query
    async with bench.client.request(method, admin, json=body) as response:
        assert response.status == status
        assert (await response.json())["error"]["message"]


@pytest.mark.parametrize("method", ["POST", "DELETE"])
@over_bench
async def test_a_page_that_an_operator_s_browser_shows_changes_nothing(bench: Bench, method: str) -> None:
    prefill, _ = await bench.pair()
    admin = await bench.serve(admin_application(bench.router)) + "/instances"
    headers = {"Origin": "https://elsewhere.example", "Content-Type": "text/plain"}  # what needs no leave of ours
    async with bench.client.request(
        method, admin, params={"url": prefill.url}, data='{"url": "http://127.0.0.1:1"}', headers=headers
    ) as response:
        assert response.status == 403 and "elsewhere.example" in (await response.json())["error"]["message"]
    assert [one["state"] for one in bench.router.fleet.describe()] == ["up", "up"]


@over_bench
async def test_who_asks_for_health_all_the_time_finds_a_change_in_the_log(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm_pd_connector.proxy.router")
    prefill, _ = await bench.pair()
    for health in (200, 503, 200):
        prefill.health = health
        for _ in range(2):
            await bench.check()
        assert [(await bench.get("/health"))[0] for _ in range(3)] == [health] * 3
    assert [record.getMessage() for record in caplog.records if record.name.endswith("router")] == [
        "health: every role has an instance",
        "health: no usable prefill instance",
        "health: every role has an instance",
    ]


@over_bench
async def test_the_log_says_which_instance_failed_and_how(bench: Bench, caplog: pytest.LogCaptureFixture) -> None:
    _, decode = await bench.pair(decode=answers({"error": "no tea"}, 418))
    assert (await bench.ask())[0] == 418
    [line] = [record.getMessage() for record in caplog.records if "418" in record.getMessage()]
    assert f"decode instance {decode.url} answered 418: " in line and "no tea" in line

"""The router between instances that answer, fail, stall and vanish, as its clients see it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from router_stand_ins import (
    DONE,
    HANDS_OVER,
    LIMIT,
    NOBODY,
    PARAMS,
    Handler,
    Instance,
    answers,
    break_off,
    info,
    stall,
    streams,
)

from ports import free_port
from vllm_pd_connector.observability.instance import EngineInfo
from vllm_pd_connector.proxy.fleet import Role
from vllm_pd_connector.proxy.legs import Limits
from vllm_pd_connector.proxy.router import Options, Router
from vllm_pd_connector.proxy.serve import admin_application


class Bench:
    """A router in front of stand-ins, and a client of it."""

    def __init__(self, stack: AsyncExitStack):
        self._stack = stack
        self.client: aiohttp.ClientSession
        self.router: Router
        self.url = ""

    async def instance(self, handler: Handler, says: EngineInfo | None = None, **more: Any) -> Instance:
        instance = Instance(handler, says, **more)
        await instance.server.start_server()
        self._stack.push_async_callback(instance.server.close)
        return instance

    async def route(
        self, prefill: Sequence[str] = (), decode: Sequence[str] = (), *, read_timeout: float = LIMIT, **options: Any
    ) -> None:
        # Checks after the first one happen only where a test asks for them.
        usual: dict[str, Any] = {"check_interval": 1000.0, "limits": Limits(LIMIT, read_timeout)}
        self.router = Router(Options(prefill, decode, **(usual | options)))
        self.client = await self._stack.enter_async_context(aiohttp.ClientSession())
        self.url = await self.serve(self.router.application()) + "/v1/completions"

    async def serve(self, app: web.Application) -> str:
        server = TestServer(app)
        await server.start_server()
        self._stack.push_async_callback(server.close)
        return str(server.make_url("")).rstrip("/")

    async def check(self) -> None:
        await self.router.fleet.check_all()

    async def get(self, path: str) -> tuple[int, str]:
        async with self.client.get(self.url.replace("/v1/completions", path)) as response:
            return response.status, await response.text()

    async def ask(self, body: object = None, **headers: str) -> tuple[int, Any, Mapping[str, str]]:
        body = {"prompt": [1, 2]} if body is None else body
        async with self.client.post(self.url, json=body, headers=headers) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text, response.headers


def over_bench(test: Callable[[Bench], Awaitable[None]]) -> Callable[[], None]:
    """Run a test as a coroutine, within the limit of time."""

    async def main() -> None:
        async with asyncio.timeout(3 * LIMIT), AsyncExitStack() as stack:
            await test(Bench(stack))

    def run() -> None:
        asyncio.run(main())

    run.__name__ = test.__name__
    return run


@over_bench
async def test_the_decode_instance_gets_the_parameters_of_the_prefill_instance(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    status, answer, headers = await bench.ask({"prompt": [1, 2], "max_tokens": 9}, **{"X-Request-Id": "id-1"})
    assert (status, answer) == (200, {"choices": [{"text": "abc"}]})
    assert prefill.asked[0]["max_tokens"] == 1
    assert decode.asked == [{"prompt": [1, 2], "max_tokens": 9, "kv_transfer_params": PARAMS}]
    assert prefill.request_ids == decode.request_ids == ["id-1"]
    assert headers["X-Request-Id"] == "id-1"


@over_bench
async def test_both_legs_carry_one_new_request_id_when_the_client_gives_none(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    await bench.ask()
    await bench.ask()
    assert prefill.request_ids == decode.request_ids
    assert None not in prefill.request_ids
    assert len(set(prefill.request_ids)) == 2


@over_bench
async def test_chat_goes_to_the_chat_route(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    bench.url = bench.url.replace("/v1/completions", "/v1/chat/completions")
    status, _, _ = await bench.ask({"messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 7})
    assert status == 200
    assert prefill.asked[0]["max_completion_tokens"] == 1
    assert decode.asked[0]["max_completion_tokens"] == 7


@over_bench
async def test_a_stream_is_passed_on_byte_by_byte(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER)
    decode = await bench.instance(streams(b"data: 1\n\n", b"data: [DONE]\n\n"))
    await bench.route([prefill.url], [decode.url])
    status, text, headers = await bench.ask({"prompt": "x", "stream": True})
    assert (status, text) == (200, "data: 1\n\ndata: [DONE]\n\n")
    assert headers["Content-Type"].startswith("text/event-stream")


@over_bench
async def test_an_event_reaches_the_client_before_the_stream_ends(bench: Bench) -> None:
    seen = asyncio.Event()

    async def wait_until_seen(_request: web.Request) -> None:
        await seen.wait()

    prefill = await bench.instance(HANDS_OVER)
    decode = await bench.instance(streams(b"data: 1\n\n", then=wait_until_seen))
    await bench.route([prefill.url], [decode.url])
    async with bench.client.post(bench.url, json={"prompt": "x", "stream": True}) as response:
        assert await response.content.readany() == b"data: 1\n\n"
        seen.set()
        assert await response.content.read() == b""


@over_bench
async def test_instances_take_turns(bench: Bench) -> None:
    prefills = [await bench.instance(HANDS_OVER) for _ in range(2)]
    decodes = [await bench.instance(DONE) for _ in range(3)]
    await bench.route([one.url for one in prefills], [one.url for one in decodes])
    for _ in range(6):
        await bench.ask()
    assert [len(one.asked) for one in prefills] == [3, 3]
    assert [len(one.asked) for one in decodes] == [2, 2, 2]


@over_bench
async def test_an_instance_that_refuses_the_connection_is_passed_over(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    nobody = [NOBODY.format(free_port()) for _ in range(2)]
    await bench.route([nobody[0], prefill.url], [nobody[1], decode.url])
    assert [(await bench.ask())[0] for _ in range(4)] == [200] * 4


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_no_reachable_instance_is_503(kind: str) -> None:
    async def test(bench: Bench) -> None:
        prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
        urls = {"prefill": prefill.url, "decode": decode.url, kind: NOBODY.format(free_port())}
        await bench.route([urls["prefill"]], [urls["decode"]])
        status, answer, _ = await bench.ask()
        assert status == 503
        assert kind in answer["error"]["message"]

    over_bench(test)()


@over_bench
async def test_an_error_of_the_prefill_instance_reaches_the_client(bench: Bench) -> None:
    prefill = await bench.instance(answers({"error": {"message": "too long"}}, status=422))
    decode = await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    status, answer, _ = await bench.ask()
    assert (status, answer) == (422, {"error": {"message": "too long"}})
    assert decode.asked == []


@over_bench
async def test_an_error_of_the_decode_instance_reaches_the_client(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER)
    decode = await bench.instance(answers({"error": {"message": "no cache"}}, status=500))
    await bench.route([prefill.url], [decode.url])
    status, answer, _ = await bench.ask({"prompt": "x", "stream": True})
    assert (status, answer) == (500, {"error": {"message": "no cache"}})


@over_bench
async def test_a_prefill_that_hands_nothing_over_is_502_and_decodes_nothing(bench: Bench) -> None:
    prefill, decode = await bench.instance(DONE), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    status, answer, _ = await bench.ask()
    assert status == 502
    assert "kv_transfer_params" in answer["error"]["message"]
    assert decode.asked == []


@over_bench
async def test_a_silent_instance_is_504(bench: Bench) -> None:
    prefill, decode = await bench.instance(stall), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url], read_timeout=0.2)
    assert (await bench.ask())[0] == 504


@over_bench
async def test_an_instance_that_breaks_off_before_an_answer_is_502(bench: Bench) -> None:
    async def vanish(request: web.Request) -> web.StreamResponse:
        await break_off(request)
        return web.Response()

    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(vanish)
    await bench.route([prefill.url], [decode.url])
    assert (await bench.ask())[0] == 502


@over_bench
async def test_a_stream_that_breaks_off_ends_with_an_error_event(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER)
    decode = await bench.instance(streams(b"data: 1\n\n", then=break_off))
    await bench.route([prefill.url], [decode.url])
    status, text, _ = await bench.ask({"prompt": "x", "stream": True})
    events = [event.removeprefix("data: ") for event in text.strip().split("\n\n")]
    assert status == 200
    assert (events[0], events[-1]) == ("1", "[DONE]")
    assert json.loads(events[1])["error"]["code"] == 502


@pytest.mark.parametrize("leg", ["prefill", "decode"])
def test_a_client_that_leaves_cancels_the_leg_in_progress(leg: str) -> None:
    async def test(bench: Bench) -> None:
        prefill = await bench.instance(stall if leg == "prefill" else HANDS_OVER)
        decode = await bench.instance(stall if leg == "decode" else DONE)
        await bench.route([prefill.url], [decode.url])
        waiting = prefill if leg == "prefill" else decode
        client = asyncio.create_task(bench.ask())
        await waiting.arrived.wait()
        client.cancel()
        await waiting.cancelled.wait()

    over_bench(test)()


@over_bench
async def test_a_client_that_leaves_its_stream_cancels_the_decode(bench: Bench) -> None:
    async def wait(_request: web.Request) -> None:
        await asyncio.Event().wait()

    prefill = await bench.instance(HANDS_OVER)
    decode = await bench.instance(streams(b"data: 1\n\n", then=wait))
    await bench.route([prefill.url], [decode.url])
    async with bench.client.post(bench.url, json={"prompt": "x", "stream": True}) as response:
        await response.content.readany()
        response.close()
    await decode.cancelled.wait()


@pytest.mark.parametrize("content", [b"", b"{", b"[1]", b'{"n": 2}', b"\xff\xfe"])
def test_a_bad_body_is_400_and_reaches_no_instance(content: bytes) -> None:
    async def test(bench: Bench) -> None:
        prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
        await bench.route([prefill.url], [decode.url])
        async with bench.client.post(bench.url, data=content) as response:
            assert response.status == 400
            assert (await response.json())["error"]["message"]
        assert prefill.asked == decode.asked == []

    over_bench(test)()


@over_bench
async def test_health_needs_one_instance_of_each_kind(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    nobody, no_one = (NOBODY.format(free_port()) for _ in range(2))
    for prefills, decodes, expected in (
        ([prefill.url, nobody], [no_one, decode.url], 200),
        ([nobody], [decode.url], 503),
        ([prefill.url], [nobody], 503),
    ):
        await bench.route(prefills, decodes)
        async with bench.client.get(bench.url.replace("/v1/completions", "/health")) as response:
            assert response.status == expected


# -- concurrent hand-off ----------------------------------------------------------------------------------------------


@over_bench
async def test_a_pushing_prefill_gets_its_leg_beside_the_decode(bench: Bench) -> None:
    together = asyncio.Barrier(2)

    def meets(handler: Handler) -> Handler:
        async def meet(request: web.Request) -> web.StreamResponse:
            await together.wait()
            return await handler(request)

        return meet

    prefill = await bench.instance(meets(HANDS_OVER), info())
    decode = await bench.instance(meets(DONE), info(role="kv_consumer", engine_id="d-0"))
    await bench.route(instances=[prefill.url, decode.url])
    status, answer, _ = await bench.ask({"prompt": "x", "max_tokens": 9}, **{"X-Request-Id": "id-7"})
    assert (status, answer) == (200, {"choices": [{"text": "abc"}]})
    assert prefill.request_ids == decode.request_ids == ["id-7"]
    assert prefill.asked[0]["max_tokens"] == 1
    assert prefill.asked[0]["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.asked[0]["kv_transfer_params"] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_engine_id": "p-0",
        "remote_host": "h",
        "remote_port": 5600,
        "remote_request_id": "id-7",
        "tp_size": 2,
        "pp_size": 1,
        "dcp_size": 1,
        "transfer_id": "id-7",
    }


@pytest.mark.parametrize("leg", ["prefill", "decode"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_leg_ends_the_other_and_reaches_the_client(leg: str, stream: bool) -> None:
    async def test(bench: Bench) -> None:
        other_waits = asyncio.Event()

        async def fail_when_the_other_waits(request: web.Request) -> web.StreamResponse:
            await other_waits.wait()
            return await answers({"error": {"message": "no"}}, status=500)(request)

        async def wait(request: web.Request) -> web.StreamResponse:
            other_waits.set()
            # As vLLM does: headers of a stream are sent before there is an event.
            return await (streams(then=stall) if stream else stall)(request)

        prefill = await bench.instance(fail_when_the_other_waits if leg == "prefill" else wait, info())
        decode = await bench.instance(fail_when_the_other_waits if leg == "decode" else wait)
        await bench.route([prefill.url], [decode.url])
        status, answer, _ = await bench.ask({"prompt": "x", "stream": stream})
        assert (status, answer) == (500, {"error": {"message": "no"}})
        await (decode if leg == "prefill" else prefill).cancelled.wait()

    over_bench(test)()


@over_bench
async def test_a_prefill_that_fails_after_the_first_byte_does_not_end_the_answer(bench: Bench) -> None:
    seen = asyncio.Event()

    async def fail_late(request: web.Request) -> web.StreamResponse:
        await seen.wait()
        return web.Response(status=500)

    async def wait_until_prefill_failed(_request: web.Request) -> None:
        seen.set()
        while bench.router.fleet.choose(Role.PREFILL, (), set()).in_flight:
            await asyncio.sleep(0)

    prefill = await bench.instance(fail_late, info())
    decode = await bench.instance(streams(b"data: 1\n\n", then=wait_until_prefill_failed))
    await bench.route([prefill.url], [decode.url])
    assert (await bench.ask({"prompt": "x", "stream": True}))[:2] == (200, "data: 1\n\n")


@over_bench
async def test_a_client_that_leaves_cancels_both_legs(bench: Bench) -> None:
    prefill, decode = await bench.instance(stall, info()), await bench.instance(stall)
    await bench.route([prefill.url], [decode.url])
    client = asyncio.create_task(bench.ask())
    await asyncio.gather(prefill.arrived.wait(), decode.arrived.wait())
    client.cancel()
    await asyncio.gather(prefill.cancelled.wait(), decode.cancelled.wait())


@over_bench
async def test_nothing_is_sent_to_decode_before_a_prefill_took_the_connection(bench: Bench) -> None:
    gone, prefill = await bench.instance(HANDS_OVER, info(engine_id="gone")), await bench.instance(HANDS_OVER, info())
    decode = await bench.instance(DONE)
    await bench.route([gone.url, prefill.url], [decode.url])
    await gone.server.close()
    assert [(await bench.ask())[0] for _ in range(2)] == [200, 200]
    assert [asked["kv_transfer_params"]["remote_engine_id"] for asked in decode.asked] == ["p-0", "p-0"]


@over_bench
async def test_a_prefill_with_several_engines_is_asked_for_one_of_them(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER, info(dp_size=2), engines=2), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    for _ in range(4):
        assert (await bench.ask())[0] == 200
    assert sorted(prefill.ranks) == ["0", "0", "1", "1"]


@over_bench
async def test_a_request_id_in_use_is_refused_where_it_pairs_the_legs(bench: Bench) -> None:
    prefill, decode = await bench.instance(stall, info()), await bench.instance(stall)
    await bench.route([prefill.url], [decode.url])
    first = asyncio.create_task(bench.ask(**{"X-Request-Id": "same"}))
    await decode.arrived.wait()
    assert (await bench.ask(**{"X-Request-Id": "same"}))[0] == 409
    first.cancel()


@over_bench
async def test_a_concurrent_handoff_needs_a_prefill_that_says_its_engine(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url], handoff="concurrent")
    status, answer, _ = await bench.ask()
    assert status == 503 and "engine id" in answer["error"]["message"]
    assert decode.asked == []


# -- instances that come, go and say what they are --------------------------------------------------------------------


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
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    prefill.health = 503
    await bench.check()
    assert (await bench.get("/health"))[0] == 200
    await bench.check()
    status, text = await bench.get("/health")
    assert status == 503 and prefill.url in text and "503" in text


@over_bench
async def test_instances_say_their_roles(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER, info(mode="pull"))
    decode = await bench.instance(DONE, info(role="kv_consumer", mode="pull"))
    await bench.route(instances=[decode.url, prefill.url])
    assert (await bench.ask())[0] == 200
    assert (len(prefill.asked), len(decode.asked)) == (1, 1)


@over_bench
async def test_an_instance_with_another_role_than_it_was_given_is_not_used(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER, info(role="kv_consumer"))
    decode = await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    status, answer, _ = await bench.ask()
    assert status == 503 and "kv_consumer" in answer["error"]["message"]
    assert prefill.asked == []


@over_bench
async def test_a_restarted_engine_is_addressed_by_its_new_id(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER, info()), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url], facts_interval=1e-9)
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
def test_operators_mistakes_are_told(method: str, body: object, query: str, status: int) -> None:
    async def test(bench: Bench) -> None:
        await bench.route()
        admin = await bench.serve(admin_application(bench.router)) + "/instances" + query
        async with bench.client.request(method, admin, json=body) as response:
            assert response.status == status
            assert (await response.json())["error"]["message"]

    over_bench(test)()


# -- what reaches the client ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "status"), [(500, 500), (404, 404), ("x", 502), (None, 502)])
def test_a_stream_that_begins_with_an_error_is_a_status(code: object, status: int) -> None:
    async def test(bench: Bench) -> None:
        error = {"error": {"message": "no cache", "code": code}}
        prefill = await bench.instance(HANDS_OVER)
        decode = await bench.instance(streams(f"data: {json.dumps(error)}\n\ndata: [DONE]\n\n".encode()))
        await bench.route([prefill.url], [decode.url])
        assert (await bench.ask({"prompt": "x", "stream": True}))[:2] == (status, error)

    over_bench(test)()


@over_bench
async def test_a_stream_without_an_event_is_502(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(streams())
    await bench.route([prefill.url], [decode.url])
    assert (await bench.ask({"prompt": "x", "stream": True}))[0] == 502


@over_bench
async def test_an_answer_that_says_it_failed_is_502(bench: Bench) -> None:
    prefill = await bench.instance(HANDS_OVER)
    for reason in ("error", "abort"):
        decode = await bench.instance(answers({"choices": [{"text": "", "finish_reason": reason}]}))
        await bench.route([prefill.url], [decode.url])
        assert (await bench.ask())[0] == 502


@pytest.mark.parametrize("request_id", ["a b", "ü", "x" * 201, "'"])
def test_a_request_id_that_could_confuse_a_log_is_refused(request_id: str) -> None:
    async def test(bench: Bench) -> None:
        prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
        await bench.route([prefill.url], [decode.url])
        assert (await bench.ask(**{"X-Request-Id": request_id}))[0] == 400
        assert prefill.asked == []

    over_bench(test)()


@over_bench
async def test_what_the_router_did_is_in_its_metrics(bench: Bench) -> None:
    prefill, decode = await bench.instance(HANDS_OVER), await bench.instance(DONE)
    await bench.route([prefill.url], [decode.url])
    await bench.ask()
    await bench.ask({"n": 2})
    _, text = await bench.get("/metrics")
    for row in (
        'vllm_pd_proxy_requests_total{status="200"} 1.0',
        'vllm_pd_proxy_requests_total{status="400"} 1.0',
        f'vllm_pd_proxy_legs_total{{instance="{prefill.url}",role="prefill"}} 1.0',
        f'vllm_pd_proxy_in_flight{{instance="{decode.url}"}} 0.0',
        f'vllm_pd_proxy_instance_usable{{instance="{decode.url}"}} 1.0',
        'vllm_pd_proxy_seconds_count{phase="first_byte"} 1.0',
    ):
        assert row in text

"""The scheduler halves with proxies of the in-tree Mooncake connector: a bootstrap address, and the search for it."""

from __future__ import annotations

import http.client
import json
import threading
import urllib.request
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import RequestStatus

from tests.support.ports import free_port
from tests.support.scheduler.halves import (
    PROMPT,
    abort,
    allocate,
    broken,
    hand_over,
    make_half,
    make_request,
    receive_of,
    serving_half,
    until,
)
from tests.support.scheduler.push_halves import concurrent, digest_of, step
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.metadata import PushFrom
from vllm_pd_connector.protocol.params.bootstrap import EngineRegistry, HostPort, encode_answer
from vllm_pd_connector.protocol.wire.push_messages import PrefillRef
from vllm_pd_connector.scheduler import sources
from vllm_pd_connector.scheduler.half import SchedulerHalf
from vllm_pd_connector.sidechannel import bootstrap_http
from vllm_pd_connector.sidechannel.bootstrap_http import BootstrapServer


@pytest.fixture
def consumer():
    return serving_half("kv_consumer", mode="push")


def bootstrapped(port: int, **changes: Any) -> dict[str, Any]:
    """What such a proxy sends to the decode instance."""
    sent = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_bootstrap_addr": f"http://127.0.0.1:{port}",
        "remote_engine_id": "kv_producer-0",
        "transfer_id": "t-1",
    }
    return sent | changes


@pytest.fixture
def proxied():
    """A prefill instance that answers such proxies; it and its bootstrap port."""
    port = free_port()
    return serving_half("kv_producer", mode="push", bootstrap_port=port)[0], port


def test_a_bootstrap_address_leads_to_the_side_channel(consumer, proxied):
    half, pool = consumer
    prefill, port = proxied
    request = make_request("d-1", bootstrapped(port))
    half.on_new_request(request)
    until(lambda: half.num_matched_tokens(request, 0) != (None, False), "the bootstrap answer")
    allocate(half, pool, request)
    [receive] = step(half).receives
    assert receive.push.prefill == PrefillRef("t-1", None)
    assert (receive.push.peer.host, receive.push.peer.port) == ("127.0.0.1", prefill.producer._port)
    assert receive.push.engine_id == "kv_producer-0" and receive.push.prompt_digest == digest_of(request)


@pytest.mark.parametrize("balancing", ["by one API server", "by each host's"])
def test_a_proxy_is_told_of_all_engines_of_a_server(consumer, balancing):
    half, pool = consumer
    port = free_port()
    first_rank = 0 if balancing == "by one API server" else 4
    engines = []
    for local in (1, 0):  # the first engine is the last one ready
        changes = {"data_parallel_index": first_rank + local, "data_parallel_rank_local": local}
        changes["local_engines_only"] = bool(first_rank)
        made, _ = serving_half("kv_producer", parallel=changes, mode="push", bootstrap_port=port)
        engines.append(made)
    for engine in engines:
        wanted = engine.producer._engine_id
        request = make_request(f"d-{wanted}", bootstrapped(port, remote_engine_id=wanted))

        def found(request=request) -> bool:
            half.on_new_request(request)
            until(lambda: half.num_matched_tokens(request, 0) != (None, False), "the bootstrap answer")
            return isinstance(half.consumer._receives[request.request_id].source, PushFrom)

        until(found, "the engine's registration")
        allocate(half, pool, request)
        [receive] = step(half).receives
        assert receive.push.peer.port == engine.producer._port and receive.push.engine_id == wanted
    # Proxies send the rank back as X-data-parallel-rank; an API server refuses one that none of its engines has.
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/query", timeout=20) as answer:
        told = {rank: engine["engine_id"] for rank, engine in json.load(answer).items()}
    assert told == {str(i): engine.producer._engine_id for i, engine in enumerate(reversed(engines))}


def test_while_the_answer_is_awaited_nothing_is_allocated_and_a_refusal_fails_the_request(consumer, proxied):
    half, pool = consumer
    _, port = proxied
    request = make_request("d-1", bootstrapped(port, remote_engine_id="of an earlier life"))
    half.on_new_request(request)
    until(lambda: half.num_matched_tokens(request, 0) != (None, False), "the refusal")
    allocate(half, pool, request)
    [receive] = step(half).receives
    assert "is not at bootstrap" in receive.source.reason and "has kv_producer-0" in receive.source.reason


def test_a_name_that_is_looked_up_for_ever_fails_the_request_when_its_time_is_over(monkeypatch):
    """The resolver's own limit is minutes in a cluster, and nobody can end the thread that waits for it."""
    half, pool = serving_half("kv_consumer", mode="push", handshake_timeout=2.0, allow_unauthenticated_peers=True)
    monkeypatch.setattr("vllm_pd_connector.scheduler.bootstrap.SLACK_S", 0.1)
    monkeypatch.setattr(bootstrap_http, "MAX_QUESTIONS", 1)
    resolves, asked, connect = threading.Event(), [], http.client.HTTPConnection.connect

    def stands_still(connection: http.client.HTTPConnection) -> None:
        asked.append(connection.host)
        assert resolves.wait(60.0)
        connect(connection)

    monkeypatch.setattr(http.client.HTTPConnection, "connect", stands_still)
    request = make_request("d-1", bootstrapped(free_port()))
    half.on_new_request(request)
    assert half.num_matched_tokens(request, 0) == (None, False)
    until(lambda: half.num_matched_tokens(request, 0) != (None, False), "its time to be over")
    allocate(half, pool, request)
    [receive] = step(half).receives
    assert "no answer within 2 s" in receive.source.reason and asked == ["127.0.0.1"]
    again = make_request("d-2", bootstrapped(free_port()))
    half.on_new_request(again)
    until(lambda: half.num_matched_tokens(again, 0) != (None, False), "the refusal: its thread is still there")
    assert len(asked) == 1
    resolves.set()


def test_a_request_that_is_aborted_while_the_answer_is_awaited_is_forgotten(consumer):
    half, _ = consumer
    request = make_request("d-1", bootstrapped(free_port()))
    half.on_new_request(request)
    assert half.num_matched_tokens(request, 0) == (None, False)
    abort(half, request)
    assert half.num_matched_tokens(request, 0) == (0, False)


def test_a_request_that_queues_keeps_its_prefill_once_its_instance_is_found():
    half, _ = serving_half("kv_consumer", mode="push", kv_lease_duration=0.3)
    port = free_port()
    half.on_new_request(make_request("d-1", bootstrapped(port)))
    prefill, _ = serving_half("kv_producer", mode="push", bootstrap_port=port)
    until(lambda: prefill.producer._server.counts().get("KeepPrefills", 0) > 1, "the word that the prefill is wanted")


def declines(prefill: SchedulerHalf) -> int:
    return prefill.producer._server.counts().get("DeclinePush", 0)


def test_a_request_that_is_aborted_before_its_prefill_instance_is_found_gives_up_its_prefill(consumer):
    half, _ = consumer
    port = free_port()
    request = make_request("d-1", bootstrapped(port))
    half.on_new_request(request)
    abort(half, request)
    prefill, _ = serving_half("kv_producer", mode="push", bootstrap_port=port)
    until(lambda: declines(prefill) == 1, "the word that nothing is needed")


def test_a_request_that_reads_no_cache_gives_up_its_prefill_before_that_is_found(consumer):
    """vLLM computes some prompts itself whatever is cached, e.g. for `prompt_logprobs`, and does not wait for us."""
    half, pool = consumer
    port = free_port()
    request = make_request("d-1", bootstrapped(port))
    half.on_new_request(request)
    assert half.num_matched_tokens(request, 0) == (None, False)
    half.update_after_alloc(request, KVCacheBlocks((pool.get_new_blocks(3),)), 0)
    prefill, _ = serving_half("kv_producer", mode="push", bootstrap_port=port)
    until(lambda: declines(prefill) == 1, "the word that nothing is needed")


def test_an_instance_that_pulls_gives_up_the_prefill_of_what_it_refuses(proxied):
    half, pool = make_half("kv_consumer")
    prefill, port = proxied
    assert receive_of(half, pool, make_request("d-1", bootstrapped(port))).source.reason
    until(lambda: declines(prefill) == 1, "the word that nothing is needed")


def test_a_request_whose_own_prompt_cannot_be_told_gives_up_its_prefill(consumer, proxied, monkeypatch):
    """Say its adapter was loaded in place meanwhile. Whoever may not be told is told nothing."""
    half, pool = consumer
    prefill, port = proxied

    def refuses(*_: object) -> str:
        raise ProtocolError("lora_request: no content")

    monkeypatch.setattr(sources, "prompt_digest", refuses)
    named, found = concurrent(prefill.producer._port, transfer_id="t-1"), bootstrapped(port, transfer_id="t-2")
    for number, params in enumerate((named, found), 1):
        request = make_request(f"d-{number}", params)
        half.on_new_request(request)
        until(lambda request=request: half.num_matched_tokens(request, 0) != (None, False), "the refusal")
        allocate(half, pool, request)
        [receive] = step(half).receives
        assert receive.source.reason == "lora_request: no content"
        until(lambda number=number: declines(prefill) == number, "the word that nothing is needed")


def test_a_request_that_meets_a_defect_when_its_prefill_is_found_fails_alone_and_gives_it_up(
    consumer, proxied, monkeypatch
):
    half, pool = consumer
    prefill, port = proxied
    monkeypatch.setattr(sources, "prompt_digest", broken)
    half.on_new_request(request := make_request("d-1", bootstrapped(port)))
    until(lambda: half.num_matched_tokens(request, 0) != (None, False), "the answer")
    assert allocate(half, pool, request)[0] == len(PROMPT)
    [receive] = step(half).receives
    assert "ZeroDivisionError: a defect" in receive.source.reason
    until(lambda: declines(prefill) == 1, "the word that nothing is needed")


@pytest.mark.parametrize("bootstraps", [True, False], ids=["by a bootstrap address", "by its place"])
@pytest.mark.parametrize(("ended", "times"), [("LENGTH_CAPPED", 1), ("ERROR", 0)])
def test_a_name_that_is_used_again_gives_up_the_prefill_of_the_refused_request(
    consumer, proxied, monkeypatch, bootstraps, ended, times
):
    """What ended well gives back nothing, and no stand-in comes for it; of what failed the prefill side has heard."""
    half, pool = consumer
    prefill, port = proxied
    told: list[Any] = []
    monkeypatch.setattr(half.consumer._renewer, "decline", lambda *what: told.append(what))
    params = bootstrapped(port) if bootstraps else concurrent(prefill.producer._port, transfer_id="t-1")
    request = make_request("d-1", params, status=RequestStatus[f"FINISHED_{ended}"])
    half.on_new_request(request)
    until(lambda: half.num_matched_tokens(request, 0) != (None, False), "where its prefill is")
    allocate(half, pool, request)
    half.consumer.received("d-1")
    half.request_finished(request, ([1, 2, 3],))
    refused = make_request("stand-in", params, abort_immediately=True)
    half.on_new_request(refused)
    abort(half, refused)
    until(lambda: len(told) == times, "the word that nothing is needed")


def test_a_bootstrap_address_that_leads_to_the_instance_itself_gives_up_its_prefill():
    """Its workers cannot write to themselves; vLLM computes what its prefix cache lacks."""
    half, pool = serving_half("kv_both", mode="push", bootstrap_port=(port := free_port()))
    request = make_request("d-1", bootstrapped(port, remote_engine_id="kv_both-0"))
    half.on_new_request(request)
    assert allocate(half, pool, request)[0] == 0 and step(half).receives == []
    until(lambda: declines(half) == 1, "the word that nothing is needed")


def test_a_prefill_instance_that_is_found_at_a_stranger_s_is_told_nothing(consumer, monkeypatch):
    half, _ = consumer
    told, over = [], threading.Event()
    monkeypatch.setattr(half.consumer._renewer, "decline", lambda *what: told.append(what))
    answer = encode_answer(0, "kv_producer-0", HostPort("203.0.113.5", 5600), 1, 1)
    server = BootstrapServer("127.0.0.1", free_port(), EngineRegistry(answer))
    request = make_request("d-1", bootstrapped(server.port))
    half.on_new_request(request)
    found = half.consumer._receives["d-1"].found
    abort(half, request)
    found.add_done_callback(lambda _: over.set())
    assert over.wait(20) and found.result() == HostPort("203.0.113.5", 5600) and not told
    server.close()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remote_bootstrap_addr": "http://203.0.113.5:8998"}, "203.0.113.5"),
        ({"remote_bootstrap_addr": "https://127.0.0.1:8998"}, "http://host:port"),
        ({"transfer_id": None}, "transfer_id"),
    ],
)
def test_a_bootstrap_address_that_is_not_to_be_asked_is_not_asked(consumer, changes, message):
    half, pool = consumer
    receive = receive_of(half, pool, make_request("d-1", bootstrapped(1, **changes)))
    assert message in receive.source.reason


def test_an_instance_that_pulls_says_what_such_a_proxy_needs():
    half, pool = make_half("kv_consumer")
    receive = receive_of(half, pool, make_request("d-1", bootstrapped(1)))
    assert "set mode to push on both sides" in receive.source.reason


@pytest.mark.parametrize(
    ("first", "asked"),
    [
        ("127.0.0.1", ["127.0.0.2", "127.0.0.1"]),  # of this host: it listens at the side channel's address
        ("192.0.2.9", ["192.0.2.9"]),  # of another: what listens here belongs to another server
    ],
)
def test_an_engine_registers_on_its_own_host_only_if_the_first_engine_is_there(monkeypatch, first, asked):
    leaders: list[list[HostPort]] = []

    def register(asked: list[HostPort], own: bytes) -> Any:
        leaders.append(asked)
        return SimpleNamespace(close=lambda: None)

    monkeypatch.setattr("vllm_pd_connector.scheduler.bootstrap.EngineRegistration", register)
    ranks = {"data_parallel_index": 1, "data_parallel_master_ip": first}
    changes = {"mode": "push", "bootstrap_port": 8998, "side_channel_host": "127.0.0.2"}
    half, _ = serving_half("kv_producer", parallel=ranks, **changes)
    half.shutdown()
    assert leaders == [[HostPort(host, 8998) for host in asked]]


@pytest.mark.parametrize("way", ["an answer", "both legs at once", "a bootstrap address"])
def test_a_prefill_of_another_instance_with_the_name_of_this_one_fails_with_the_reason(way: str) -> None:
    """Decode alone makes no prefills, so one of its own is another instance's of the same name; it was computed again
    without a word."""
    port = free_port()
    prefill, _ = serving_half("kv_producer", mode="push", bootstrap_port=port)
    half, pool = serving_half("kv_consumer", mode="push")
    half.consumer.sources.home = msgspec.structs.replace(half.consumer.sources.home, engine_id="kv_producer-0")
    if way == "an answer":
        request = make_request("d-1", hand_over(prefill))
    elif way == "both legs at once":
        request = make_request("d-1", concurrent(prefill.producer.home.port, transfer_id="t-1"))
    else:
        request = make_request("d-1", bootstrapped(port))
    half.on_new_request(request)
    until(lambda: half.num_matched_tokens(request, 0) != (None, False), "the refusal")
    allocate(half, pool, request)
    [receive] = step(half).receives
    assert "remote_engine_id: " in receive.source.reason and "two instances have one engine_id" in receive.source.reason
    kind = "Release" if way == "an answer" else "DeclinePush"
    until(lambda: prefill.producer._server.counts().get(kind) == 1, "the word that nothing is needed")


@pytest.mark.parametrize("own", [True, False])
def test_only_what_comes_from_this_instances_own_place_is_its_own(own: bool) -> None:
    """Two instances of both roles may have been given one engine_id."""
    prefill, _ = serving_half("kv_producer")
    half, pool = serving_half("kv_both")
    home = prefill.producer.home if own else half.consumer.sources.home
    half.consumer.sources.home = msgspec.structs.replace(home, engine_id="kv_producer-0")
    request = make_request("d-1", hand_over(prefill))
    half.on_new_request(request)
    assert (half.num_matched_tokens(request, 0) == (0, False)) is own
    if not own:
        allocate(half, pool, request)
        [receive] = step(half).receives
        assert f"is at {home.host}:{home.port}, and the prefill is at 127.0.0.1:" in receive.source.reason
    until(lambda: prefill.producer._server.counts().get("Release") == 1, "the word that nothing is needed")

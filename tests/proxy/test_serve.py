"""The router's command line, as an operator uses it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.http_exceptions import BadHttpMessage

from tests.support.ports import free_port
from tests.support.proxy.bench import Bench, over_bench
from tests.support.proxy.stand_ins import FINISHED, HANDS_OVER, LIMIT, streams
from vllm_pd_connector.arguments import base_url
from vllm_pd_connector.proxy.router import Router
from vllm_pd_connector.proxy.serve import MAX_HEADER, _serve, add_arguments, options_of, run, without_headers

STARTS_WITHIN = 60.0
END = b"data: [DONE]\n\n"


@pytest.mark.parametrize(
    "text",
    [
        *("", "host:80", "ftp://h", "http://", "http://h:x", "http://h:0", "http://u@h", "http://h?x=1", "http://h#a"),
        *("http://a..b:80", "http://.b", f"http://{'a' * 64}", "http://[::1", "http://[::g]"),
    ],
)
def test_what_is_no_base_url_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="base URL"):
        base_url(text)


@pytest.mark.parametrize("text", ["http://h", "https://h:1/p/", "http://[::1]:8000", "http://my_pod.a."])
def test_a_base_url_loses_its_closing_slash_only(text: str) -> None:
    assert base_url(text) == text.rstrip("/")


def test_the_command_line_says_what_the_router_does() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = "--prefill http://p --prefill http://q/ --decode http://d --instance http://i --read-timeout 3 --slack 0"
    options = options_of(parser.parse_args([*words.split(), "--handoff", "serial", "--drop-after", "9"]))
    assert (options.prefill, options.decode, options.instances) == (
        ["http://p", "http://q"],
        ["http://d"],
        ["http://i"],
    )
    assert (options.limits.read_timeout, options.slack, options.handoff) == (3.0, 0, "serial")
    assert Router(options).fleet._drop_after == 9.0


@pytest.mark.parametrize(
    "words", [("--port", "65536"), ("--admin-port", "-1"), ("--port", "x"), ("--read-timeout", "nan")]
)
def test_what_is_no_port_or_no_time_is_refused_by_name(words: tuple[str, str], capsys) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(words)
    assert f"argument {words[0]}: '{words[1]}' is not a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "no instance is given, and none can be added: give --prefill and --decode, --instance, or --admin-port"),
        (("--slack", "-1"), "vllm-pd proxy: argument --slack: '-1' is not a number from 0 on"),
        (("--prefix",), "vllm-pd proxy: unrecognized arguments: --prefix"),
        (
            ("--decode", "http://h", "--prefill", "http://h/"),
            "http://h is given as --decode and as --prefill; what does both: --instance",
        ),
    ],
)
def test_a_router_that_could_never_route_ends_with_one_line(words: tuple[str, ...], line: str) -> None:
    command = [sys.executable, "-m", "vllm_pd_connector.cli", "proxy", *words]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=STARTS_WITHIN)
    [said] = ended.stderr.splitlines()
    assert ended.returncode == 2 and said.endswith(line)


def test_the_command_serves_clients_and_operators_until_it_is_told_to_stop() -> None:
    port, admin, nobody = (free_port() for _ in range(3))
    command = [sys.executable, "-m", "vllm_pd_connector.proxy", "--port", str(port), "--admin-port", str(admin)]
    with subprocess.Popen([*command, "--instance", f"http://127.0.0.1:{nobody}"], stderr=subprocess.PIPE) as process:
        try:
            shown = json.loads(_get(f"http://127.0.0.1:{admin}/instances")[1])
            assert [one["state"] for one in shown["instances"]] == ["down"]
            assert _get(f"http://127.0.0.1:{port}/health")[0] == 503
            process.send_signal(signal.SIGTERM)
            assert process.wait(STARTS_WITHIN) == 0
        finally:
            process.kill()


def test_long_headers_are_taken_and_what_is_too_long_is_not_in_the_log() -> None:
    """As a token with many claims, or a client's certificate that a gateway passes on."""
    places = [free_port(), free_port()]
    command = [
        sys.executable,
        "-m",
        "vllm_pd_connector.proxy",
        "--port",
        str(places[0]),
        "--admin-port",
        str(places[1]),
    ]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            for port, status in zip(places, (503, 200), strict=True):
                url = f"http://127.0.0.1:{port}/{'health' if port == places[0] else 'instances'}"
                assert _get(url)[0] == status
                for length, told in ((MAX_HEADER - 100, status), (MAX_HEADER + 100, 400)):
                    assert _get(url, Authorization=f"Bearer {'secret' * (length // 6)}")[0] == told
                assert _get(f"{url}?{'secret' * ((MAX_HEADER - 100) // 6)}")[0] == status
            process.send_signal(signal.SIGTERM)
            assert process.stderr is not None
            said = process.stderr.read()
        finally:
            process.kill()
    assert said.count("Error handling request from 127.0.0.1: LineTooLong, answered with 400") == 2
    assert "secret" not in said and "Traceback" not in said


def test_what_fails_within_the_router_s_server_is_logged_whole() -> None:
    try:
        raise ValueError("defect")
    except ValueError:
        record = logging.LogRecord("aiohttp.server", logging.ERROR, "", 1, "Error of %s", ("x",), sys.exc_info())
    assert without_headers(record) and record.exc_info is not None and record.levelno == logging.ERROR


def test_the_address_of_who_sends_what_cannot_be_read_is_no_format() -> None:
    """One of a link has its interface behind a "%"."""
    try:
        raise BadHttpMessage("Authorization: Bearer secret")
    except BadHttpMessage:
        given = "", 1, "Error handling request from %s", ("fe80::1%eth0",), sys.exc_info()
        record = logging.LogRecord("aiohttp.server", logging.ERROR, *given)
    assert without_headers(record)
    told = logging.Formatter().format(record)
    assert told == "Error handling request from fe80::1%eth0: BadHttpMessage, answered with 400"


def test_the_command_ends_when_it_is_told_to_though_an_instance_does_not_answer_at_its_start() -> None:
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        command = [sys.executable, "-m", "vllm_pd_connector.proxy", "--port", str(free_port())]
        command += ["--instance", f"http://127.0.0.1:{hangs.getsockname()[1]}"]
        with subprocess.Popen(command, stderr=subprocess.PIPE) as process:
            try:
                hangs.settimeout(STARTS_WITHIN)
                question, _ = hangs.accept()
                process.send_signal(signal.SIGTERM)
                assert process.wait(STARTS_WITHIN) == 0
                question.settimeout(STARTS_WITHIN)
                assert b"GET /health" in question.recv(4096) and question.recv(4096) == b""
                question.close()
                assert process.stderr is not None
                assert b"listening" not in process.stderr.read(), "it waited for the answer"
            finally:
                process.kill()


def test_the_command_line_says_where_events_are() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    words = (
        "--policy kv-events --kv-events http://p/=tcp://10.0.0.7:5557,tcp://10.0.0.7:5558 --kv-events http://q=ipc://x"
    )
    options = options_of(parser.parse_args(words.split()))
    assert options.policy == "kv-events"
    assert options.kv_events == {
        "http://p": ("tcp://10.0.0.7:5557", "tcp://10.0.0.7:5558"),
        "http://q": ("ipc://x", ""),
    }
    assert options_of(parser.parse_args([])).policy == "prefix"


@pytest.mark.parametrize("text", ["", "http://p", "http://p=", "p=tcp://h:1", "http://p=h:1", "http://p=tcp://h:1,h:2"])
def test_what_is_no_place_of_events_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--kv-events", text])
    assert "argument --kv-events" in capsys.readouterr().err


def test_places_of_events_to_which_nobody_listens_are_refused(caplog: pytest.LogCaptureFixture) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    assert run(parser.parse_args(["--kv-events", "http://p=tcp://h:1"])) == 2
    assert "--policy kv-events" in caplog.text


def runner_settings(monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """How the router has its server run when it is started with these words."""

    class Told(Exception):
        pass

    def tell(_app: web.Application, **settings: Any) -> None:
        raise Told(settings)

    monkeypatch.setattr(web, "AppRunner", tell)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    with pytest.raises(Told) as told:
        asyncio.run(_serve(parser.parse_args(words)))
    found: dict[str, Any] = told.value.args[0]
    return found


def test_requests_have_the_time_to_end_that_the_command_line_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, seconds in (([], 5.0), (["--shutdown-timeout", "90"], 90.0)):
        settings = runner_settings(monkeypatch, *words)
        assert settings["shutdown_timeout"] == seconds / 2, "which aiohttp waits twice"


def test_an_idle_connection_is_kept_for_longer_than_gateways_keep_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who closes first may meet a request; only a client can send it again."""
    settings = runner_settings(monkeypatch)
    assert settings["keepalive_timeout"] > 3600.0, "Envoy's idle_timeout of connections to a cluster"


def test_a_router_whose_port_is_taken_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "vllm_pd_connector.proxy", "--port", str(port), "--admin-port", "0"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=STARTS_WITHIN)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr and "Traceback" not in done.stderr


@over_bench
async def test_requests_end_before_a_router_that_is_told_to_stop(bench: Bench) -> None:
    stops = asyncio.Event()

    async def wait(_request: web.Request) -> None:
        await stops.wait()

    prefill, decode = (
        await bench.instance(HANDS_OVER),
        await bench.instance(streams(FINISHED, then=wait, last=END)),
    )
    port = free_port()
    router = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "vllm_pd_connector.proxy", "--port", str(port), "--shutdown-timeout", str(LIMIT),
        "--prefill", prefill.url, "--decode", decode.url,
    )  # fmt: skip
    try:
        url = f"http://127.0.0.1:{port}"
        await asyncio.to_thread(_get, url + "/health")
        async with (
            aiohttp.ClientSession() as client,
            client.post(url + "/v1/completions", json={"prompt": "x", "stream": True}) as response,
        ):
            assert await response.content.readany() == FINISHED
            router.send_signal(signal.SIGTERM)
            with pytest.raises(aiohttp.ClientConnectionError):
                while True:
                    async with client.get(url + "/health", headers={"Connection": "close"}):
                        pass
            stops.set()
            assert await response.content.read() == END
        assert await router.wait() == 0
    finally:
        with contextlib.suppress(ProcessLookupError):
            router.kill()


def _get(url: str, **headers: str) -> tuple[int, str]:
    """Status and text, from the time on at which somebody listens."""
    deadline, asked = time.monotonic() + STARTS_WITHIN, urllib.request.Request(url, headers=headers)
    while True:
        try:
            with urllib.request.urlopen(asked, timeout=STARTS_WITHIN) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except urllib.error.URLError:
            assert time.monotonic() < deadline, f"nobody listens at {url}"
            time.sleep(0.05)

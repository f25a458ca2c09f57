"""Mistakes of docs/troubleshooting.md, made on purpose on real servers: an operator reads one line, the page's.

An instance that cannot start says it before it loads a model, and ends. What makes a request fail stands once in the
decode instance's log, what the router refuses once in the router's and in its answer; both instances go on.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from examples.launch import Server, router_spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.ports import free_port
from tests.support.servers.cluster import SHORT_LEASE_S, until
from tests.support.servers.pairs import ROOT, Pairs
from tests.support.servers.workload import Refused, ask, completion, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
FAMILY = "gqa"
PROMPT, OTHER, ANOTHER = prompts("mistakes", (150, 90, 60))
KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
START_S = 240.0
Params = dict[str, Any]


def line_of(log: str, message: str) -> str:
    """The one line of a log that has a message which the page explains."""
    assert f"`{message}`" in PAGE, "the page does not have it"
    found = [line for line in log.splitlines() if message in line]
    assert len(found) == 1, f"{len(found)} lines with {message!r}:\n{log[-3000:]}"
    print(found[0])  # what an operator reads; `pytest -s` shows all of them
    return found[0]


# -- an instance does not start ---------------------------------------------------------------------------------------


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which somebody else listens."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield int(other.getsockname()[1])


@pytest.fixture
def readable(tmp_path: Path) -> str:
    """A directory of keys, of which the secret one can be read by everybody."""
    subprocess.run([*VLLM_PD, "keygen", str(tmp_path), "--name", "instance"], check=True, capture_output=True)
    (tmp_path / "instance.key_secret").chmod(0o644)
    return str(tmp_path)


VLLM_PD = (sys.executable, "-m", "vllm_pd_connector.cli")
STARTS: dict[str, tuple[Params, str]] = {
    "a mistyped key": ({"stagging_bytes": 1 << 20}, "is not a key"),
    "an unknown value": ({"mode": "pulll"}, "it must be one of "),
    "a key of NixlConnector": ({"backends": ["UCX"]}, "is a key of "),
    "an unknown transport": ({"transport": "nixll"}, "is unknown, choose one of"),
    "another host's address": (
        {"side_channel_host": "203.0.113.9", "allow_unauthenticated_peers": True},
        "is no address of this machine; choose one of those",
    ),
    "everybody may talk": (
        {"side_channel_host": "0.0.0.0"},
        "can be reached from other hosts, and side_channel_keys is not set",
    ),
    "two instances on one port": ({"side_channel_port": "TAKEN"}, "side channel: cannot listen on host "),
    "two bootstrap servers": ({"mode": "push", "bootstrap_port": "TAKEN"}, "bootstrap_port: cannot listen on"),
    "a secret that others can read": ({"side_channel_keys": "READABLE"}, "can be read by others; chmod 600 it"),
}


@pytest.mark.parametrize("mistake", STARTS)
def test_an_instance_that_cannot_start_says_why_before_it_loads_a_model(
    pairs: Pairs, taken: int, readable: str, mistake: str
) -> None:
    pairs.end()
    extra, message = STARTS[mistake]
    extra = {key: {"TAKEN": taken, "READABLE": readable}.get(str(value), value) for key, value in extra.items()}
    transfer = {"kv_connector": "PDConnector", "kv_role": "kv_producer", "kv_connector_extra_config": extra}
    spec = vllm_spec("mistaken", make(MODELS[FAMILY]), flags=MODELS[FAMILY].flags, transfer=transfer)
    ended = _run(*spec.command, environment=dict(spec.environment))
    assert ended.returncode != 0
    line = line_of(ended.stdout, message)
    assert "PDConnector cannot start: " in line
    assert "Traceback" not in ended.stdout and "EngineCore" not in ended.stdout
    # The command that looks without starting anything says the same.
    checked = _run(*VLLM_PD, "check-config", spec.command[spec.command.index("--kv-transfer-config") + 1])
    assert checked.returncode == 1 and message in checked.stdout


def _run(*command: str, environment: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        env=os.environ | (environment or {}),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=START_S,
    )


# -- requests fail on the decode instance -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(pairs: Pairs) -> Iterator[tuple[Server, Server]]:
    pairs.end()
    model = MODELS[FAMILY]

    def spec(role: str) -> Any:
        extra = {"kv_lease_duration": SHORT_LEASE_S}
        transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
        return vllm_spec(
            f"mistakes-{role}", make(model), flags=model.flags, transfer=transfer, environment=model.environment
        )

    prefill, decode = pairs.servers.start(spec("kv_producer"), spec("kv_consumer"))
    yield prefill, decode
    pairs.servers.stop(prefill, decode)


@pytest.fixture
def silent() -> Iterator[int]:
    """A port at which something listens that is no side channel, and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        yield int(other.getsockname()[1])


def without(field: str) -> Callable[[Params], Params]:
    return lambda good: {key: value for key, value in good.items() if key != field}


@dataclass(frozen=True, slots=True)
class Wrong:
    """What reaches decode instead of the prefill instance's answer, and what it says."""

    message: str
    change: Callable[[Params], Params] = dict
    prompt: tuple[int, ...] = PROMPT


REQUESTS = {
    "nobody is there": Wrong("cannot be reached (", lambda good: {**good, "remote_port": free_port()}),
    "another host, and no keys": Wrong(
        "is on another host and has no key", lambda good: {**good, "remote_host": "203.0.113.9"}
    ),
    "something else is there": Wrong("gave no usable answer within ", lambda good: {**good, "remote_port": "SILENT"}),
    "the prefill was restarted": Wrong(
        "was restarted: incarnation",
        lambda good: {**good, "pd_connector": {**good["pd_connector"], "incarnation": "0" * 32}},
    ),
    "another connector on the prefill side": Wrong(
        "pd_connector is missing; the prefill instance does not run PDConnector", without("pd_connector")
    ),
    "a router with fields of its own": Wrong(
        "Object contains unknown field",
        lambda good: {**good, "pd_connector": {**good["pd_connector"], "hops": 1}},
    ),
    "another prompt on the second leg": Wrong("is not this request's (", prompt=OTHER),
}


@pytest.mark.parametrize("mistake", REQUESTS)
def test_a_request_that_cannot_work_has_one_line_in_decodes_log(
    pair: tuple[Server, Server], silent: int, mistake: str
) -> None:
    prefill, decode = pair
    wrong = REQUESTS[mistake]
    params = {key: silent if value == "SILENT" else value for key, value in wrong.change(_handed_over(prefill)).items()}
    _fails_with(decode, wrong.prompt, params, wrong.message)
    assert ask(decode.url, completion(FAMILY, ANOTHER)).tokens


def test_a_router_that_comes_too_late_is_told_of_on_both_sides(pair: tuple[Server, Server]) -> None:
    prefill, decode = pair
    message = "The router sent no decode request with its parameters, or too late"
    params = _handed_over(prefill)
    name = params["remote_request_id"]
    until(lambda: message in _about(name, _said(prefill, 0)), "the lease to end")
    line_of(_about(name, _said(prefill, 0)), message)
    _fails_with(decode, PROMPT, params, "the prefill side no longer vouches for the blocks")


def _handed_over(prefill: Server) -> Params:
    params = ask(prefill.url, completion(FAMILY, PROMPT, max_tokens=1, kv_transfer_params=KEEP)).kv_transfer_params
    assert params
    return params


def _fails_with(decode: Server, prompt: tuple[int, ...], params: Params, message: str) -> None:
    before = _length(decode)
    with pytest.raises(Refused) as refused:
        ask(decode.url, completion(FAMILY, prompt, kv_transfer_params=params))
    assert refused.value.status == 500
    until(lambda: message in _said(decode, before), "the instance to say why")
    line_of(_said(decode, before), message)


def _about(request: str, log: str) -> str:
    """The lines that name a request: leases of former ones end meanwhile."""
    return "\n".join(line for line in log.splitlines() if request in line)


def _length(server: Server) -> int:
    return server.log.stat().st_size


def _said(server: Server, since: int) -> str:
    return server.log.read_bytes()[since:].decode(errors="replace")


# -- the router answers -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def routing(pairs: Pairs, name: str, prefill: str, decode: str) -> Iterator[Server]:
    """A router that serves whether or not it can route."""
    [router] = pairs.servers.start(replace(router_spec(name, [prefill], [decode]), health="/metrics"))
    try:
        yield router
    finally:
        pairs.servers.stop(router)


def _refused_by(router: Server, status: int, message: str, **more: Any) -> None:
    before = _length(router)
    with pytest.raises(Refused) as refused:
        ask(router.url, completion(FAMILY, PROMPT, **more), request_id="mistaken")
    assert refused.value.status == status and message in refused.value.body
    until(lambda: "mistaken" in _said(router, before), "the router to log it")
    line_of(_about("mistaken", _said(router, before)), message)


def test_exchanged_urls_are_named(pairs: Pairs, pair: tuple[Server, Server]) -> None:
    prefill, decode = pair
    with routing(pairs, "exchanged", decode.url, prefill.url) as router:
        until(lambda: "but its kv_role is" in _said(router, 0), "the router to have asked both")
        _refused_by(router, 503, "but its kv_role is")


def test_an_instance_that_is_not_there_is_named(pairs: Pairs, pair: tuple[Server, Server]) -> None:
    with routing(pairs, "absent", f"http://127.0.0.1:{free_port()}", pair[1].url) as router:
        _refused_by(router, 503, "instance can be reached")


def test_what_a_router_does_not_do_is_refused_by_name(pairs: Pairs, pair: tuple[Server, Server]) -> None:
    prefill, decode = pair
    with routing(pairs, "asked", prefill.url, decode.url) as router:
        until(lambda: _routes(router), "the router to know its instances")
        _refused_by(router, 400, "one cache is handed over per request", n=2)


def _routes(router: Server) -> bool:
    with contextlib.suppress(Refused):
        return bool(ask(router.url, completion(FAMILY, ANOTHER)).tokens)
    return False

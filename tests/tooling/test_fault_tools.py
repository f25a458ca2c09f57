"""What faults are made with does what it says: the relay, the rules, the forgeries, the ports that are found."""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from tests.faults.instances import Instance
from tests.faults.plan import FORGED, FORGED_NAMES, MESSAGES, PUSH_MESSAGES, Fault
from tests.faults.strikes import knocking
from tests.faults.strikes.forging import forgeries, named_forgeries
from tests.faults.strikes.tampering import Counted, delayed, duplicated, lost, lost_once, replayed, withheld
from tests.faults.system import processes
from tests.faults.system.network import NotPossible, left_behind
from tests.faults.system.relay import Passing, Relay, forward
from tests.faults.world import World
from tests.support.ports import free_port
from vllm_pd_connector.protocol.wire import messages
from vllm_pd_connector.protocol.wire.fields import LeaseRef
from vllm_pd_connector.protocol.wire.messages import ReadDone, ReadVerdict

PATIENCE_MS = 20_000
QUESTION = Passing(True, "ReadDone", b"question")
ANSWER = Passing(False, "ReadVerdict", messages.encode(7, ReadVerdict(True, "")))


@pytest.fixture
def line() -> Iterator[tuple[Relay, Any, Any]]:
    """A relay, the server behind it and a client that has said "hello" through it."""
    context = zmq.Context()
    server, client = context.socket(zmq.ROUTER), context.socket(zmq.DEALER)
    server.linger = client.linger = 0
    relay = Relay(f"tcp://127.0.0.1:{server.bind_to_random_port('tcp://127.0.0.1')}")
    client.connect(f"tcp://127.0.0.1:{relay.port}")
    client.send(b"hello")
    try:
        yield relay, server, client
    finally:
        relay.close()
        server.close()
        client.close()
        context.term()


def received(socket: Any) -> list[bytes]:
    assert socket.poll(PATIENCE_MS), "nothing came"
    parts: list[bytes] = socket.recv_multipart()
    return parts


def test_the_relay_says_old_messages_on_the_lines_that_there_are(line) -> None:
    relay, server, client = line
    name, hello = received(server)
    relay.say([QUESTION, ANSWER])
    assert (hello, received(server)) == (b"hello", [name, QUESTION.frame])
    assert received(client) == [ANSWER.frame]


def test_a_rule_counts_what_it_did_not_simply_forward() -> None:
    rule = Counted(lost_once(Fault("lost once", "ReadDone", "decode", 0.5, 1), random.Random(1)))
    assert rule(ANSWER) == forward(ANSWER) and rule.touched == 0
    assert rule(QUESTION) == [] and rule.touched == 1


def test_a_question_is_withheld_until_it_is_repeated_late_enough_which_is_not_counted() -> None:
    def question(number: int, reader: int) -> Passing:
        return Passing(
            True, "ReadDone", messages.encode(number, ReadDone(LeaseRef("r", b"n" * 16), reader, 2, b"a" * 16))
        )

    now, rule = [10.0], Counted(forward)
    dropping = withheld("ReadDone", 2.0, rule, lambda: now[0])
    assert dropping(question(1, 0)) == []
    now[0] = 11.5
    assert dropping(question(2, 0)) == dropping(question(3, 1)) == []
    now[0] = 12.0
    assert dropping(question(4, 0)) == forward(question(4, 0))
    assert dropping(question(5, 1)) == []
    assert dropping(ANSWER) == forward(ANSWER)
    assert rule.touched == 0


@pytest.mark.parametrize("rule_of", [delayed, duplicated, lost, lost_once, replayed])
@pytest.mark.parametrize("name", [*MESSAGES, *PUSH_MESSAGES])
def test_a_rule_touches_the_first_message_of_its_name(rule_of, name: str) -> None:
    rule = Counted(rule_of(Fault("any", name, "decode", 0.5, 1), random.Random(1)))
    rule(Passing(True, name, b"frame"))
    assert rule.touched == 1


PARAMS: dict[str, Any] = {
    "transfer_mode": "pull",
    "remote_block_ids": [[1, 2, 3]],
    "remote_request_id": "cmpl-1",
    "remote_engine_id": "engine",
    "remote_num_tokens": 70,
    "remote_port": 5600,
    "pd_connector": {"nonce": "0", "incarnation": "0", "prompt_digest": "0", "version": 1, "first_blocks": [0]},
}
NAMED: dict[str, Any] = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t",
                         "remote_engine_id": "engine", "remote_host": "127.0.0.1", "remote_port": 5600}  # fmt: skip


@pytest.mark.parametrize("salt", range(20))
def test_every_forgery_of_the_plan_exists_and_changes_something(salt: int) -> None:
    answers, named = forgeries(PARAMS, random.Random(salt)), named_forgeries(NAMED, random.Random(salt))
    assert set(answers) == {*FORGED} - {"another prompt"} and set(named) == {*FORGED_NAMES}
    assert PARAMS not in answers.values() and NAMED not in named.values()


@pytest.mark.parametrize(
    ("raw", "address"),
    [
        ("0100007F", "127.0.0.1"),
        ("0200000A", "10.0.0.2"),
        ("00000000", "127.0.0.1"),
        ("0" * 32, "127.0.0.1"),
        ("000000000000000000000000" + "01000000", "::1"),
    ],
)
def test_addresses_of_proc_can_be_connected_to(raw: str, address: str) -> None:
    assert processes.reached(raw) == address


def test_junk_finds_every_port_of_a_worker_by_the_address_at_which_it_listens() -> None:
    code = (
        "import socket, sys\n"
        "made = [socket.create_server((host, 0)) for host in ('127.0.0.1', '127.0.0.2', '')]\n"
        "print(*(s.getsockname()[1] for s in made), flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        first, second, wild = map(int, child.stdout.readline().split())
        worker = processes.Process(child.pid, "worker")
        p: Any = SimpleNamespace(
            spec=SimpleNamespace(port=first), side_port=1, extra={"bootstrap_port": 2}, processes=lambda part: [worker]
        )
        d: Any = SimpleNamespace(spec=SimpleNamespace(port=3), side_port=4)
        world: Any = SimpleNamespace(router=SimpleNamespace(spec=SimpleNamespace(port=5)))
        found = knocking.places(world, p, d, "prefill transport")
        for place in found:
            socket.create_connection(place, timeout=20).close()
        assert worker.send(signal.SIGCONT)
        child.communicate()
    assert sorted(found) == sorted([("127.0.0.2", second), ("127.0.0.1", wild)])
    assert knocking.places(world, p, d, "bootstrap") == [("127.0.0.1", 2)]
    assert knocking.places(world, p, d, "router") == [("127.0.0.1", 5)]
    assert not worker.send(signal.SIGCONT)
    world.router, p.extra = None, {}
    assert knocking.places(world, p, d, "router") == knocking.places(world, p, d, "bootstrap") == []


def test_namespaces_of_killed_campaigns_are_removed_and_those_of_others_respected() -> None:
    listed = "pd-17-p (id: 2)\npd-17-d (id: 1)\nother\npd-xx-p\n\n"
    assert left_behind("lo UNKNOWN\npd19p@if2 UP 00:00\npd19px UP\n", lambda pid: False) == ["pd19p"]
    assert left_behind(listed, lambda pid: False) == ["pd-17-p", "pd-17-d"]
    with pytest.raises(NotPossible, match="process 17"):
        left_behind(listed, lambda pid: pid == 17)


def world_at(port: int) -> World:
    """A world of one instance, which nobody has started here."""
    world, somewhere = World.__new__(World), SimpleNamespace(name="p", url=f"http://127.0.0.1:{port}")
    unstarted: Any = somewhere
    world.prefills = world.decodes = [Instance(unstarted, unstarted)]
    return world


def test_a_prefix_cache_that_a_held_block_keeps_is_not_taken_for_empty() -> None:
    told = [False, False, True]

    class Held(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"success": told.pop(0)}).encode())

    with ThreadingHTTPServer(("127.0.0.1", 0), Held) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        world_at(server.server_port).forget_prefixes()
        server.shutdown()
    assert not told


def test_an_instance_that_has_ended_holds_no_prefixes() -> None:
    world_at(free_port()).forget_prefixes()

"""Bad parameters fail the request that carries them, with a reason; junk on the side channel fails nothing.

Whatever comes, a client gets the right tokens or an error, never wrong tokens, and both instances keep serving.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import zmq

from tests.support.ports import free_port
from tests.support.servers.cluster import Cluster
from tests.support.servers.matrix import PLAIN_ROWS, PLAINEST
from tests.support.servers.over import over
from tests.support.servers.workload import SCENARIOS, Refused
from tests.support.sidechannel.endless import attack_server, listener_of, memory_of
from vllm_pd_connector.protocol.wire import messages

Params = dict[str, Any]
JUNK_BYTES = 10_000_000

WRONG_TYPES: dict[str, list[Any]] = {
    "remote_engine_id": [7, ""],
    "remote_request_id": [[], ""],
    "remote_host": [5, "", "no host; at all"],
    "remote_port": ["5600", 0, 70000],
    "remote_block_ids": ["1, 2", None, [["a"]], [[-1]], [[2**31]]],
    "remote_num_tokens": ["many", -1],
    "tp_size": ["two", 0],
    "transfer_mode": ["teleport"],
    "do_remote_prefill": ["yes"],
    "pd_connector": [None, "x", {}],
}

SERVING_FIELDS = frozenset({"remote_prefill_cached_tokens"})
"""Fields that vLLM's API server adds for its own counts; connectors never see them."""


@dataclass(frozen=True, slots=True)
class Case:
    """One thing wrong with parameters; the reason given must contain `word`."""

    name: str
    change: Callable[[Params], Params]
    word: str


def setting(field: str, value: Any, word: str) -> Case:
    return Case(f"{field} = {value!r}", lambda good: {**good, field: value}, word)


def without(field: str) -> Case:
    return Case(f"without {field}", lambda good: {key: good[key] for key in good.keys() - {field}}, field)


def own(field: str, value: Any, word: str) -> Case:
    """A change under the connector's own key."""
    return Case(
        f"pd_connector.{field} = {value!r}",
        lambda good: {**good, "pd_connector": {**good["pd_connector"], field: value}},
        word,
    )


def far_blocks(good: Params) -> Params:
    return {**good, "remote_block_ids": [[10**6 + block for block in group] for group in good["remote_block_ids"]]}


def extra_group(good: Params) -> Params:
    return {**good, "remote_block_ids": [*good["remote_block_ids"], [1]]}


CHANGES = [
    *(setting(field, value, field) for field, values in WRONG_TYPES.items() for value in values),
    setting("do_remote_decode", True, "do_remote_decode"),
    setting("remote_engine_id", "another-engine", "'another-engine' asked for"),
    setting("remote_request_id", "cmpl-nobody-asked-for-this", "no lease of this request is known"),
    setting("remote_port", free_port(), "cannot be reached (4 attempts failed): connection refused"),
    setting("remote_num_tokens", 10**6, "1000000 t"),  # not this prompt's, or more than this model's decode leaves
    own("version", 99, "99"),
    own("incarnation", "0" * 32, "incarnation"),
    own("nonce", "0" * 32, "the nonce is another"),
    own("surprise", 1, "surprise"),
    Case("blocks out of range", far_blocks, "is outside"),
    Case("a group too many", extra_group, "remote_block_ids has"),
]


@pytest.mark.unfetched
@over(PLAIN_ROWS, quick=PLAINEST)
def test_bad_parameters_fail_their_request_with_a_reason(pair: Cluster) -> None:
    prompt = SCENARIOS["bad input"][0]
    flags = {"do_remote_prefill", "do_remote_decode"}
    required = pair.prefill_only(prompt).keys() - flags - SERVING_FIELDS
    problems = []
    for case in [*map(without, sorted(required)), *CHANGES]:
        # Parameters of their own for each case: one that is not refused must not make the next look refused.
        params = case.change(pair.prefill_only(prompt))
        before = pair.decode.log.stat().st_size
        try:
            answer = pair.decode_with(prompt, params)
        except Refused as refused:
            said = refused.body + pair.decode.log.read_text(errors="replace")[before:]
            if case.word not in said:
                problems.append(f"{case.name}: refused without naming {case.word}: {refused}")
        else:
            problems.append(f"{case.name}: answered {answer.tokens}")
    assert not problems, "\n".join(problems)
    pair.check(SCENARIOS["bad input"][1:])


@over(PLAIN_ROWS, quick=PLAINEST)
def test_a_cache_is_handed_over_once(pair: Cluster) -> None:
    """Decode computes what parameters bring that it has had (docs/design/protocol.md)."""
    prompt = SCENARIOS["bad input"][0]
    params = pair.prefill_only(prompt)
    for _ in range(2):
        pair.forget_prefixes()
        assert not pair.disagreement(prompt, pair.decode_with(prompt, params))
    assert len({record.request for record in pair.received()}) == 1


@over(PLAIN_ROWS, quick=PLAINEST)
def test_another_prompt_with_these_parameters_is_refused(pair: Cluster) -> None:
    prompt, other = SCENARIOS["bad input"]
    params = pair.prefill_only(prompt)
    for wrong in (other, tuple(reversed(prompt)), prompt[:-1]):
        try:
            answer = pair.decode_with(wrong, params)
        except Refused:
            continue
        raise AssertionError(f"a prompt of {len(wrong)} tokens was answered from another's cache: {answer.tokens}")


@over(PLAIN_ROWS, quick=PLAINEST)
def test_bad_parameters_to_the_prefill_side_hand_nothing_over(pair: Cluster) -> None:
    """A connector can fail a request only where it loads a cache; here a refusal is an answer without parameters."""
    prompt = SCENARIOS["bad input"][0]
    keep = {"do_remote_decode": True, "do_remote_prefill": False}
    for params, word in (
        ({"do_remote_decode": "yes"}, "do_remote_decode"),
        ({**keep, "surprise": 1}, "surprise"),
        ({**keep, "remote_host": "10.0.0.1"}, "remote_host"),
    ):
        before = pair.prefill.log.stat().st_size
        with contextlib.suppress(Refused):
            answer = pair.ask_prefill(prompt, params)
            assert answer.kv_transfer_params is None, f"{params} was accepted"
        assert word in pair.prefill.log.read_text(errors="replace")[before:]
    pair.check(SCENARIOS["bad input"][1:])


# -- the side channel -------------------------------------------------------------------------------------------------


def raw_junk(host: str, port: int) -> None:
    """Bytes that are not even the transport of the side channel."""
    # The other end may close as soon as it sees what comes.
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=10) as client:
        client.sendall(bytes(range(256)) * (JUNK_BYTES // 256))


def framed(*frames: bytes, patience_s: float = 2.0) -> Callable[[str, int], bytes | None]:
    """Send these as one message and return the reply, if one comes in time."""

    def send(host: str, port: int) -> bytes | None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger = 0
            client.connect(f"tcp://{host}:{port}")
            client.send_multipart(frames)
            return client.recv_multipart()[-1] if client.poll(patience_s * 1000) else None

    return send


def frame(version: int, body: bytes) -> bytes:
    return struct.pack("!4sHQ", messages.MAGIC, version, 5) + body


@pytest.mark.unfetched
@over(PLAIN_ROWS, quick=PLAINEST)
def test_junk_on_the_side_channel_harms_nobody(pair: Cluster) -> None:
    params = pair.prefill_only(SCENARIOS["bad input"][0])
    host, port = params["remote_host"], params["remote_port"]
    raw_junk(host, port)
    framed(bytes(JUNK_BYTES))(host, port)
    framed(frame(messages.PROTOCOL_VERSION, b"\xc1" * 1000))(host, port)
    framed(b"", b"", b"")(host, port)
    framed(b"GET / HTTP/1.1\r\n\r\n")(host, port)
    pair.check(SCENARIOS["bad input"][1:])


@pytest.mark.unfetched
@over(PLAIN_ROWS, quick=PLAINEST)
def test_a_message_without_end_costs_neither_memory_nor_answers(pair: Cluster) -> None:
    params = pair.prefill_only(SCENARIOS["bad input"][0])
    host, port = params["remote_host"], params["remote_port"]
    engine = listener_of(port)
    before = max(memory_of(engine))
    attack = threading.Thread(target=attack_server, args=(host, port, 64 << 10, 1 << 30))
    attack.start()
    pair.check(SCENARIOS["bad input"][1:])
    attack.join()
    _, peak = memory_of(engine)
    assert peak - before < 512 << 20, f"{(peak - before) >> 20} MiB"


@pytest.mark.unfetched
@over(PLAIN_ROWS, quick=PLAINEST)
def test_another_protocol_version_is_told_so(pair: Cluster) -> None:
    params = pair.prefill_only(SCENARIOS["bad input"][0])
    reply = framed(frame(99, b""), patience_s=60.0)(params["remote_host"], params["remote_port"])
    assert reply is not None
    sequence, failure = messages.decode_reply(reply)
    assert sequence == 5
    assert isinstance(failure, messages.Failure)
    assert failure.code is messages.FailureCode.VERSION
    assert "99" in failure.message

"""Bad parameters fail the request that carries them, with a reason; junk on the side channel fails nothing.

Whatever comes, a client gets the right tokens or an error, never wrong tokens, and both instances keep serving.
"""

from __future__ import annotations

import contextlib
import copy
import socket
import struct
from collections.abc import Callable, Iterator
from typing import Any

import zmq

from e2e.cluster import Cluster
from e2e.matrix import PLAIN_ROWS
from e2e.over import over
from e2e.workload import SCENARIOS, Refused
from launch import free_port
from vllm_pd_connector.protocol import messages

Params = dict[str, Any]
JUNK_BYTES = 10_000_000

WRONG_VALUES: dict[str, list[Any]] = {
    "remote_engine_id": [7, "", "another-engine"],
    "remote_request_id": [[], "cmpl-nobody-asked-for-this"],
    "remote_host": [5, "", "no host; at all"],
    "remote_port": ["5600", 0, 70000],
    "remote_block_ids": ["1, 2", None, [], [["a"]], [[-1]], [[2**31]]],
    "remote_num_tokens": ["many", -1, 10**6],
    "tp_size": ["two", 0, 3],
    "transfer_mode": ["teleport"],
    "do_remote_prefill": ["yes"],
    "pd_connector": [None, "x", {}],
}


def changed(params: Params, **fields: Any) -> Params:
    return {**copy.deepcopy(params), **fields}


def bad_params(good: Params) -> Iterator[tuple[str, str, Params]]:
    """Name, the word that the reason must contain, and parameters; each differs from `good` in one thing."""
    for field in good.keys() - {"do_remote_prefill", "do_remote_decode"}:
        yield f"without {field}", field, {key: value for key, value in good.items() if key != field}
    for field, values in WRONG_VALUES.items():
        for value in values:
            yield f"{field} = {value!r}", "", changed(good, **{field: value})
    yield "an unknown field", "surprise", changed(good, surprise=1)
    yield "both directions", "do_remote_decode", changed(good, do_remote_decode=True)
    far = [[10**6 + block for block in group] for group in good["remote_block_ids"]]
    yield "blocks out of range", "", changed(good, remote_block_ids=far)
    yield "a group too many", "", changed(good, remote_block_ids=[*good["remote_block_ids"], [1]])
    yield "a port where nobody listens", "", changed(good, remote_port=free_port())
    for field, value in (("version", 99), ("incarnation", "0" * 32), ("nonce", "0" * 32), ("surprise", 1)):
        yield f"pd_connector.{field}", "", changed(good, pd_connector={**good["pd_connector"], field: value})


@over(PLAIN_ROWS)
def test_bad_parameters_fail_their_request_with_a_reason(pair: Cluster) -> None:
    prompt = SCENARIOS["bad input"][0]
    problems = []
    for name, word, params in bad_params(pair.prefill_only(prompt)):
        before = pair.decode.log.stat().st_size
        try:
            answer = pair.decode_with(prompt, params)
        except Refused as refused:
            said = refused.body + pair.decode.log.read_text(errors="replace")[before:]
            if word not in said:
                problems.append(f"{name}: refused without naming {word}: {refused}")
        else:
            problems.append(f"{name}: answered {answer.tokens}")
    assert not problems, "\n".join(problems)
    pair.check(SCENARIOS["bad input"][1:])


@over(PLAIN_ROWS)
def test_a_cache_is_handed_over_once(pair: Cluster) -> None:
    prompt = SCENARIOS["bad input"][0]
    params = pair.prefill_only(prompt)
    assert pair.decode_with(prompt, params).tokens == pair.baselines.tokens(pair.model, prompt)
    pair.forget_prefixes()
    with contextlib.suppress(Refused):
        assert pair.decode_with(prompt, params).tokens == pair.baselines.tokens(pair.model, prompt)


@over(PLAIN_ROWS)
def test_another_prompt_with_these_parameters_is_refused(pair: Cluster) -> None:
    prompt, other = SCENARIOS["bad input"]
    params = pair.prefill_only(prompt)
    for wrong in (other, tuple(reversed(prompt)), prompt[:-1]):
        try:
            answer = pair.decode_with(wrong, params)
        except Refused:
            continue
        raise AssertionError(f"a prompt of {len(wrong)} tokens was answered from another's cache: {answer.tokens}")


@over(PLAIN_ROWS)
def test_bad_flags_to_the_prefill_side_are_refused(pair: Cluster) -> None:
    prompt = SCENARIOS["bad input"][0]
    for params in ({"do_remote_decode": "yes"}, {"do_remote_decode": True, "surprise": 1}, ["do_remote_decode"]):
        try:
            pair.ask_prefill(prompt, params)
        except Refused as refused:
            assert refused.status >= 400
        else:
            raise AssertionError(f"accepted: {params}")
    pair.check(SCENARIOS["bad input"][1:])


# -- the side channel -------------------------------------------------------------------------------------------------


def raw_junk(host: str, port: int) -> None:
    """Bytes that are not even the transport of the side channel."""
    # The other end may close as soon as it sees what comes.
    with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=10) as client:
        client.sendall(bytes(range(256)) * (JUNK_BYTES // 256))


def framed(*frames: bytes) -> Callable[[str, int], bytes | None]:
    """Send these as one message and return the reply, if one comes within two seconds."""

    def send(host: str, port: int) -> bytes | None:
        with zmq.Context() as context, context.socket(zmq.DEALER) as client:
            client.linger = 0
            client.connect(f"tcp://{host}:{port}")
            client.send_multipart(frames)
            return client.recv_multipart()[-1] if client.poll(2000) else None

    return send


def frame(version: int, body: bytes) -> bytes:
    return struct.pack("!4sHQ", messages.MAGIC, version, 5) + body


@over(PLAIN_ROWS)
def test_junk_on_the_side_channel_harms_nobody(pair: Cluster) -> None:
    params = pair.prefill_only(SCENARIOS["bad input"][0])
    host, port = params["remote_host"], params["remote_port"]
    raw_junk(host, port)
    framed(bytes(JUNK_BYTES))(host, port)
    framed(frame(messages.PROTOCOL_VERSION, b"\xc1" * 1000))(host, port)
    framed(b"", b"", b"")(host, port)
    framed(b"GET / HTTP/1.1\r\n\r\n")(host, port)
    pair.check(SCENARIOS["bad input"][1:])


@over(PLAIN_ROWS)
def test_another_protocol_version_is_told_so(pair: Cluster) -> None:
    params = pair.prefill_only(SCENARIOS["bad input"][0])
    reply = framed(frame(99, b""))(params["remote_host"], params["remote_port"])
    assert reply is not None
    sequence, failure = messages.decode_reply(reply)
    assert sequence == 5
    assert isinstance(failure, messages.Failure)
    assert failure.code is messages.FailureCode.VERSION
    assert "99" in failure.message

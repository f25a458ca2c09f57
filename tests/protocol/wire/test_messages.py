"""Frames: what is encoded comes back, and any other bytes are one kind of error, quickly and in bounded memory."""

from __future__ import annotations

import struct
import tracemalloc

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.fields import (
    MAX_LEASES,
    MAX_READERS,
    MAX_REPLY_FRAME,
    MAX_REQUEST_FRAME,
    MAX_TEXT,
    LeaseRef,
    Reading,
)

HEADER = struct.Struct("!4sHQ")
relaxed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a busy machine decides nothing
LEASE = LeaseRef("cmpl-1", bytes(range(16)))
READING = Reading("cmpl-1", bytes(range(16)), b"a" * 16)
PREFILL = pm.PrefillRef("cmpl-1", None)
PUSH = pm.PushInto(
    pm.PrefillRef("cmpl-1", bytes(16)),
    pm.InstanceAddress("decode-0", "ab" * 16, "10.0.0.1", 5600),
    pp_rank=0, pcp_rank=0, tp_rank=1, reader=1, readers=2, attempt=b"a" * 16,
    blocks=(BlockTable(0, b"\1\0\0\0"), BlockTable(3, b"")), start=16, stop=40, prompt_digest="0" * 16,
)  # fmt: skip
REQUESTS = [
    m.GetManifests("engine-0"),
    m.Describe(),
    m.Renew((READING, Reading("é", bytes(16), b"a" * 16, True))),
    m.ReadDone(LEASE, reader=1, readers=4, attempt=b"a" * 16),
    m.Release((READING,)),
    m.GetLeaseCount(),
    PUSH,
    pm.WithdrawPush(PREFILL, b"a" * 16),
    pm.DeclinePush(PREFILL),
    pm.KeepPrefills((PREFILL, pm.PrefillRef("é", bytes(16)))),
    pm.AwaitCommands(bytes(16), worker=3, seen=7),
    pm.PushEnded(bytes(16), 3, b"a" * 16, ok=False, reason="broken", terminal=False),
    m.GetChecksums(LEASE, (0, 16), 33),
    m.NextChecksumJob(bytes(16), 1),
    m.JobChecksums(bytes(16), 7, 1, (m.ChecksumPart("layer", "key", 0, bytes(8)),), True),
    m.FindConversation("chatcmpl-1"),
]
REPLIES = [
    m.Manifests("engine-0", "0123456789abcdef" * 2, (b"one", b"two")),
    m.Renewed(("cmpl-1",)),
    m.ReadVerdict(held=False, reason="the lease expired"),
    m.Released(),
    m.LeaseCount(3),
    m.ChecksumJob(7, (BlockTable(0, bytes(8)),), (0, 16), 33),
    m.Accepted(),
    m.LeaseChecksums((m.ChecksumPart("layer", "key", 0, bytes(8)),)),
    m.Failure(m.FailureCode.NOT_READY, "later"),
    pm.Pushed(pm.PushState.WRITING, "", terminal=False),
    pm.Commands(2, (pm.BeginCommand(PUSH), pm.WriteCommand(PUSH.attempt, PUSH.blocks, ready=32, step=5, final=False))),
    pm.Commands(3, (pm.CancelCommand(b"a" * 16, "aborted"),)),
    m.Ack(),
    m.FoundConversation(b"{}"),
]
ids = {"ids": lambda message: type(message).__name__}


def frame(body: object, *, magic: bytes = m.MAGIC, version: int = m.PROTOCOL_VERSION, seq: int = 7) -> bytes:
    raw = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return HEADER.pack(magic, version, seq) + raw


@pytest.mark.parametrize("message", REQUESTS, **ids)
def test_a_request_comes_back_with_its_sequence_number(message):
    assert m.decode_request(m.encode(2**64 - 1, message)) == (2**64 - 1, message)


@pytest.mark.parametrize("message", REPLIES, **ids)
def test_a_reply_comes_back_with_its_sequence_number(message):
    assert m.decode_reply(m.encode(1, message)) == (1, message)


def test_a_request_is_no_reply_and_a_reply_no_request():
    for message in REQUESTS:
        with pytest.raises(ProtocolError):
            m.decode_reply(m.encode(1, message))
    for message in REPLIES:
        with pytest.raises(ProtocolError):
            m.decode_request(m.encode(1, message))


def test_every_request_has_one_kind_of_reply():
    assert set(m.REPLY_OF) == {type(message) for message in REQUESTS}
    assert set(m.REPLY_OF.values()) | {m.Failure} == {type(message) for message in REPLIES}


@pytest.mark.parametrize("version", [0, m.MIN_VERSION - 1, m.PROTOCOL_VERSION + 1, 65535])
def test_another_version_is_named_beside_ours_and_its_request_is_known(version):
    other = frame({"type": "of a later age"}, version=version, seq=99)
    with pytest.raises(m.VersionMismatch, match=f"{version} there, {m.MIN_VERSION} to {m.PROTOCOL_VERSION} here"):
        m.decode_request(other)
    assert m.sequence_of(other) == 99


def test_junk_has_no_sequence_number():
    assert m.sequence_of(b"") == m.sequence_of(b"VPDC") == m.sequence_of(b"GET / HTTP/1.1\r\n\r\n") == 0


READ_DONE = {
    "type": "read_done",
    "lease": {"request_id": "r", "nonce": bytes(16)},
    "reader": 0,
    "readers": 1,
    "attempt": bytes(16),
}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"extra": 1}, "unknown field `extra`"),
        ({"type": "read_undone"}, "read_undone"),
        ({"reader": True}, "reader"),
        ({"reader": "0"}, "reader"),
        ({"reader": 0.0}, "reader"),
        ({"reader": -1}, "reader"),
        ({"reader": MAX_READERS}, "reader"),
        ({"readers": 0}, "readers"),
        ({"attempt": bytes(15)}, "attempt"),
        ({"attempt": "a" * 16}, None),
        ({"lease": {"request_id": "", "nonce": bytes(16)}}, "request_id"),
        ({"lease": {"request_id": "r" * 513, "nonce": bytes(16)}}, "request_id"),
        ({"lease": {"request_id": "r"}}, "nonce"),
        ({"lease": None}, "lease"),
    ],
    ids=str,
)
def test_a_field_that_is_not_as_declared_is_refused_by_name(change, named):
    assert m.decode_request(frame(READ_DONE))[0] == 7
    with pytest.raises(ProtocolError, match=named):
        m.decode_request(frame(READ_DONE | change))


def test_a_missing_field_is_refused_by_name():
    with pytest.raises(ProtocolError, match="attempt"):
        m.decode_request(frame({key: value for key, value in READ_DONE.items() if key != "attempt"}))


def test_trailing_bytes_are_refused():
    with pytest.raises(ProtocolError):
        m.decode_request(m.encode(1, REQUESTS[0]) + b"\0")


def test_the_largest_batch_of_the_longest_ids_fits_a_request():
    leases = [Reading("\U0001f600" * 512, bytes(16), bytes(16), True) for _ in range(2 * MAX_LEASES + 1)]
    batches = list(m.lease_batches(leases))
    assert [len(batch) for batch in batches] == [MAX_LEASES, MAX_LEASES, 1]
    for batch in batches:
        assert m.decode_request(m.encode(1, m.Renew(batch)))[1] == m.Renew(batch)


def test_frames_over_the_limit_are_refused_on_both_sides():
    with pytest.raises(ProtocolError, match="limit"):
        m.decode_request(frame(bytes(MAX_REQUEST_FRAME)))
    with pytest.raises(ProtocolError, match="limit"):
        m.encode(1, m.Manifests("e", "0" * 32, (bytes(MAX_REPLY_FRAME),)))
    with pytest.raises(ProtocolError, match="limit"):
        m.encode(1, m.GetManifests("e" * MAX_REQUEST_FRAME))


def test_text_that_is_no_unicode_cannot_be_sent():
    with pytest.raises(ProtocolError, match="GetManifests"):
        m.encode(1, m.GetManifests("\ud800"))


def test_declared_sizes_reserve_no_memory():
    tag = b"\xa4type\xa5renew\xa6leases"
    bombs = [b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff"]
    tracemalloc.start()
    try:
        for bomb in [*bombs, *(b"\x82" + tag + bomb for bomb in bombs), b"\x91" * 60000, b"\x81\xa1x" * 20000]:
            with pytest.raises(ProtocolError):
                m.decode_request(frame(bomb))
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def only_protocol_errors(decode, data: bytes) -> None:
    try:
        seq, message = decode(data)
    except ProtocolError as error:
        assert len(str(error)) <= MAX_TEXT + 100
    else:
        assert decode(m.encode(seq, message)) == (seq, message)


@relaxed
@given(st.binary(max_size=300), st.booleans())
def test_arbitrary_bytes_are_decoded_or_refused(data, with_header):
    for decode in (m.decode_request, m.decode_reply):
        only_protocol_errors(decode, frame(data) if with_header else data)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=8)
json_like = st.recursive(
    scalars | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
field_names = sorted({name for message in REQUESTS + REPLIES for name in message.__struct_fields__})
tags = sorted(type(message).__struct_config__.tag for message in REQUESTS + REPLIES)


@relaxed
@given(st.sampled_from(tags), st.dictionaries(st.sampled_from(field_names), json_like, max_size=5))
def test_arbitrary_values_in_known_fields_are_decoded_or_refused(tag, fields):
    for decode in (m.decode_request, m.decode_reply):
        only_protocol_errors(decode, frame({"type": tag} | fields))


@relaxed
@given(st.sampled_from(REQUESTS + REPLIES), st.data())
def test_damaged_frames_are_decoded_or_refused(message, data):
    raw = bytearray(m.encode(5, message))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw) - 1))
        match data.draw(st.sampled_from(["set", "cut", "insert"])):
            case "set":
                raw[at] = data.draw(st.integers(0, 255))
            case "cut":
                del raw[at + 1 :]
            case _:
                raw[at:at] = data.draw(st.binary(max_size=5))
    for decode in (m.decode_request, m.decode_reply):
        only_protocol_errors(decode, bytes(raw))
    assert 0 <= m.sequence_of(bytes(raw)) < 2**64


@pytest.mark.parametrize(
    "change",
    [{"host": "127.0.0.1 key x"}, {"host": "a;b"}, {"host": "*"}, {"server_key": "a" * 39 + " "}],
    ids=str,
)
def test_an_address_with_other_letters_than_those_of_names_is_not_decoded(change):
    bad = msgspec.structs.replace(PUSH, home=msgspec.structs.replace(PUSH.home, **change))
    with pytest.raises(ProtocolError):
        m.decode_request(m.encode(1, bad))

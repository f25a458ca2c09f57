"""Every function that takes bytes or values from the network, with valid examples and the errors that it may raise.

Whatever comes, a decoder returns or raises one of its errors; its time and memory are bounded by what came in. Used by
`test_decoders` (hypothesis, part of the unit tests) and `coverage_guided` (atheris, as long as one likes).
"""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

import msgspec

from tests.fuzz.forms import (
    Decoder,
    as_bytes,
    as_json,
    exposition_of,
    exposition_rows,
    frame,
    framed,
    frames_from,
    frames_of,
    of_json,
)
from tests.fuzz.records import OF_RECORDS
from tests.support.geometry.world import Model, Side, instance
from tests.support.handed_over import NAMED, NAMED_WITH_KEY, answer_of, kept, use_turn
from tests.support.proxy.caches import CLEARED, FULL, batch, removed, stored
from vllm_pd_connector.bounded import at_once
from vllm_pd_connector.cli import instances
from vllm_pd_connector.cli.output import NotReadable
from vllm_pd_connector.errors import (
    BindError,
    IncompatiblePeer,
    InvalidManifest,
    InvalidTopology,
    PDConnectorError,
    ProtocolError,
    TransferError,
)
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.manifest import Segment
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.topology import check_pd_topology
from vllm_pd_connector.instance_info import INFO_SERIES, EngineInfo, parse
from vllm_pd_connector.protocol.params import bootstrap
from vllm_pd_connector.protocol.params import parse as p
from vllm_pd_connector.protocol.params.answer import encode_params, require_signature
from vllm_pd_connector.protocol.peer import Peer, PeerKey
from vllm_pd_connector.protocol.wire import messages as m
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.fields import LeaseRef, Reading
from vllm_pd_connector.proxy.exchange import check_event, check_finished, parsed_json, read_body
from vllm_pd_connector.proxy.instance import InstanceRefusal, LegError
from vllm_pd_connector.proxy.kv_events.block_keys import PromptBlocks
from vllm_pd_connector.proxy.kv_events.known_prefixes import Announcements
from vllm_pd_connector.proxy.legs import encoded_body
from vllm_pd_connector.routing.handoff import decode_body, prefill_body
from vllm_pd_connector.routing.prompt_ids import is_text_chat, take_prompt_ids
from vllm_pd_connector.transport.addresses import host_identity
from vllm_pd_connector.transport.endpoint import Endpoint, seal, unseal
from vllm_pd_connector.transport.greeting import IncomingLink
from vllm_pd_connector.transport.mooncake import whereabouts as mooncake
from vllm_pd_connector.transport.ranges import Ranges
from vllm_pd_connector.worker.peers.link import decode as decode_manifest
from vllm_pd_connector.worker.push.link import WriteLink

MODEL = Model(layers=2, heads=4)
[LOCAL] = [worker.manifest for worker in instance(MODEL, Side(tp=1, layout="NHD"), "decode-0")]
REMOTE = [worker.manifest for worker in instance(MODEL, Side(tp=2, layout="HND"), "prefill-0")]
OWN = tuple(map(msgspec.msgpack.encode, REMOTE))
LEASE = LeaseRef("cmpl-1", bytes(range(16)))
READING = Reading("cmpl-1", bytes(range(16)), bytes(16))
PREFILL = pm.PrefillRef("cmpl-1", None)
TABLES = (BlockTable(0, b"\1\0\0\0\2\0\0\0"),)
INTO = pm.PushInto(
    PREFILL,
    pm.InstanceAddress("decode-0", "ab" * 16, "10.0.0.2", 5600, "k" * 40),
    0,
    0,
    0,
    0,
    1,
    bytes(16),
    TABLES,
    0,
    7,
    "0" * 16,
    2.5,
)
ANSWER = answer_of(
    remote_block_ids=((3, 4, 5), (9,)), remote_request_id="cmpl-1", nonce=bytes(16).hex(), incarnation="ab" * 16,
    remote_host="10.0.0.1", server_key="k" * 40,
)  # fmt: skip
IDS = {"prompt_token_ids": [7, 0, 2]}
PARAMS = encode_params(ANSWER, b"s" * 32)


def use_params(value: Any) -> object:
    """As the scheduler halves of all roles and modes read them."""
    kind = p.kind_of(value)
    if kind is p.Kind.NONE:
        return None
    name = p.pairing_name(value, "cmpl-1-0123abcd")
    if kind is p.Kind.REMOTE_DECODE:
        return name, use_turn(value)
    if p.names_bootstrap(value):
        return name, bootstrap.parse_bootstrap_address(p.parse_remote_bootstrap(value).remote_bootstrap_addr)
    if not p.is_answer(value):
        return name, p.parse_remote_push(value)
    remote = p.parse_remote_prefill(value)
    require_signature(remote, b"s" * 32)
    return remote.lease


def use_body(content: bytes) -> object:
    """As the router reads a client's body, and sends it on."""
    body, prefix = read_body(content)
    return (
        prefix.keys,
        prefix.blocks and prefix.blocks.key(1, 1, adapter=False),
        encoded_body(prefill_body(body, "cmpl-1")),
        encoded_body(body),
        is_text_chat(body),
    )


def use_events(content: bytes) -> object:
    """As the router takes over what an instance announces of its cache, and looks a prompt up."""
    known = Announcements()
    known.take(0, content)
    return known.held.length(PromptBlocks([1, 2, 3, 4], "m", ""), adapter=False)


def use_answer(content: bytes) -> object:
    """As the router reads what instances answer: of the prefill's, of the decode's, of a stream's events."""
    answer = parsed_json(content)
    check_event(content, True, "x")
    check_event(b"data: " + content, False, "x")
    check_finished(answer, "x")
    leg = decode_body({"prompt": "x"}, answer)
    return encoded_body(leg), take_prompt_ids(answer)


def use_manifest(content: bytes) -> object:
    """The handshake: decode, check the pair, plan."""
    manifest = decode_manifest(content)
    check = check_pd_topology(LOCAL, [manifest, REMOTE[1]])
    return make_plan(LOCAL, [manifest, REMOTE[1]]) if check.allowed else None


class Ground:
    """A transport as far as links use it: like the real ones, it takes endpoints of its own with sound segments."""

    def connect(self, endpoint: bytes, segments: Sequence[Segment]) -> object:
        unseal("nixl", endpoint)
        return Ranges.of(segments, "the peer")

    def disconnect(self, peer: object) -> None:
        pass


def write_link(manifest: bytes) -> WriteLink:
    """Of the prefill's first rank to a decode instance whose only manifest this is."""
    link = WriteLink(Peer(PeerKey("h", 1, ""), lambda: 0.5), "decode-0", "", 0.0, (manifest,), own=OWN)
    at_once(link.connecting(REMOTE[0], Ground(), 1 << 20))  # type: ignore[arg-type]
    return link


INTO_LOCAL = msgspec.structs.replace(LOCAL, endpoint=seal("nixl", "pd-0", b"metadata" * 8))


def use_push_manifest(content: bytes) -> object:
    """The handshake of a push: the prefill side plans what it writes into whom."""
    return write_link(content).outgoing


def use_push(content: bytes) -> object:
    """A push order: from the decode side's bytes to what is written of which addresses."""
    _, request = m.decode_request(content)
    if not isinstance(request, pm.PushInto):
        return None
    link = write_link(msgspec.msgpack.encode(INTO_LOCAL))
    parts = []
    for ready, cursor, final in ((4, request.start, False), (7, 4, True)):
        reach = link.reach(request, ready, cursor, final)
        part = link.bind_push(request, TABLES, cursor, reach, final)
        parts.append(([*part.direct], [*(part.staged or ())]))
    return parts


def use_whereabouts(content: bytes) -> object:
    return mooncake.locate(Endpoint("mooncake", "pd-0", content, b""), "tcp", ipaddress.ip_address("10.0.0.1"))


def use_stranger(content: bytes) -> object:
    """What is dialled to a worker, in pieces of a length that its first byte says."""
    arrival, piece = IncomingLink(b"pd-0", 0.0), content[0] + 1 if content else 1
    return [arrival.take(content[at : at + piece]) for at in range(1, len(content), piece)]


INFO = EngineInfo("kv_producer", "push", "concurrent", "nixl", "p-0", "10.0.0.1", 5600, 2, 1, 1, 1)
FIRST_ENGINE = bootstrap.encode_answer(0, "p-0", bootstrap.HostPort("10.0.0.1", 5600), 1, 1)


DECODERS: dict[str, Decoder] = {
    "request": framed(
        m.decode_request,
        m.GetManifests("p-0"),
        m.Renew((READING, READING)),
        m.ReadDone(LEASE, 1, 4, bytes(16)),
        m.Release((READING,)),
        m.GetChecksums(LEASE, (0, 16), 33),
        m.JobChecksums(bytes(16), 7, 1, (m.ChecksumPart("layer", "key", 0, bytes(8)),), True),
        m.Describe(),
        m.GetLeaseCount(),
        m.FindConversation("cmpl-1"),
        m.NextChecksumJob(bytes(16), 1),
        INTO,
        pm.WithdrawPush(PREFILL, bytes(16)),
        pm.DeclinePush(pm.PrefillRef("cmpl-1", bytes(16))),
        pm.KeepPrefills((pm.PrefillRef("cmpl-1", bytes(16)), PREFILL)),
        pm.AwaitCommands(bytes(16), 1, 7),
        pm.PushEnded(bytes(16), 1, bytes(16), False, "lost", True, {0: 5}, pm.Moved(64, 2, 3)),
    ),
    "reply": framed(
        m.decode_reply,
        m.Manifests("p-0", "ab" * 16, (b"one", b"two")),
        m.Renewed(("cmpl-1",)),
        m.ReadVerdict(False, "expired"),
        m.LeaseCount(3),
        m.ChecksumJob(7, (BlockTable(0, bytes(8)),), (0, 16), 33),
        m.LeaseChecksums((m.ChecksumPart("layer", "key", 0, bytes(8)),)),
        m.Failure(m.FailureCode.BUSY, "later"),
        m.Released(),
        m.Ack(),
        m.Accepted(),
        m.FoundConversation(b"{}"),
        pm.Pushed(pm.PushState.DONE, "", True, {0: 5}, pm.Moved(64, 2, 3), "cmpl-1", LEASE),
        pm.Commands(
            7,
            (
                pm.BeginCommand(INTO),
                pm.WriteCommand(bytes(16), TABLES, 7, 3, True),
                pm.CancelCommand(bytes(16), "gone"),
            ),
        ),
    ),
    "parameters": of_json(
        use_params,
        PARAMS,
        kept(b"s" * 32),
        NAMED,
        NAMED_WITH_KEY,
        {"do_remote_decode": True, "remote_host": None},
        {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "cmpl-1"},
        {
            "do_remote_prefill": True,
            "remote_engine_id": "p-0",
            "remote_host": "10.0.0.1",
            "remote_port": 5600,
            "remote_request_id": "cmpl-1",
            "tp_size": 2,
            "transfer_id": "cmpl-1",
        },
        {
            "do_remote_prefill": True,
            "remote_engine_id": "p-0",
            "remote_bootstrap_addr": "http://10.0.0.1:8998",
            "transfer_id": "cmpl-1",
        },
    ),
    "body": Decoder(
        use_body,
        (ProtocolError, LegError),
        (
            as_json({"model": "m", "prompt": [1, 2], "n": 1, "stop": ["."], "stream": True}),
            as_json({"model": "m", "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 5}),
        ),
        json.loads,
        as_json,
    ),
    "instance answer": Decoder(
        use_answer,
        (ProtocolError, LegError, InstanceRefusal),
        (
            as_json({"choices": [{"text": "x", "finish_reason": "length"}], "kv_transfer_params": PARAMS, **IDS}),
            as_json({"error": None, "choices": [{"finish_reason": None}, 1], "kv_transfer_params": PARAMS, **IDS}),
        ),
        json.loads,
        as_json,
    ),
    "bootstrap answer": Decoder(
        bootstrap.parse_answer,
        ProtocolError,
        tuple(
            bootstrap.encode_answer(1, "p-0", bootstrap.HostPort(host, 5600), 2, 2) for host in ("10.0.0.1", "fd00::1")
        ),
        json.loads,
        as_json,
    ),
    "bootstrap registration": Decoder(
        lambda content: bootstrap.EngineRegistry(FIRST_ENGINE).join(content),
        ProtocolError,
        tuple(bootstrap.encode_answer(rank, f"p-{rank}", bootstrap.HostPort("::1", 5600), 2, 2) for rank in (1, 12345)),
        json.loads,
        as_json,
    ),
    "bootstrap address": Decoder(
        lambda content: bootstrap.parse_bootstrap_address(content.decode(errors="replace")),
        ProtocolError,
        (b"http://10.0.0.1:8998", b"http://[fd00::1]:8998/"),
        lambda content: [content],
        lambda value: as_bytes(value[0] if isinstance(value, list) and value else value),
    ),
    "metrics": Decoder(
        lambda content: parse(content.decode(errors="replace")),
        ProtocolError,
        (
            exposition_of([[INFO_SERIES, {"engine": "0", **INFO.labels()}], ["vllm:other", {"model": "m"}]]),
            exposition_of([[INFO_SERIES, {"engine": str(index), **INFO.labels()}] for index in range(3)]),
        ),
        exposition_rows,
        exposition_of,
    ),
    "events": Decoder(
        use_events,
        ProtocolError,
        (
            batch(stored([b"a", b"b"], None, [1, 2, 3, 4], 2, extra_keys=[None, ["salt"]], **FULL), CLEARED),
            batch(stored([7], None, [1, 2], 2), stored([8], 7, [3, 4], 2), removed([8], group_idx=0)),
        ),
        msgspec.msgpack.decode,
        msgspec.msgpack.encode,
    ),
    "stranger": Decoder(
        use_stranger,
        ProtocolError,
        (b"\xff" + frame(b"pd-0"), b"\x00" + frame(b"pd-0")),
        frames_of,
        frames_from,
    ),
    "whereabouts": Decoder(
        use_whereabouts,
        TransferError,
        tuple(
            msgspec.msgpack.encode(mooncake.Whereabouts(address, 15000, 16000, "tcp", host))
            for address, host in (("10.0.0.2", "boot:1"), ("127.0.0.1", host_identity()))
        ),
        msgspec.msgpack.decode,
        msgspec.msgpack.encode,
    ),
    "manifest of a push": Decoder(
        use_push_manifest,
        (IncompatiblePeer, InvalidManifest, InvalidTopology, TransferError),
        (msgspec.msgpack.encode(INTO_LOCAL),),
        msgspec.msgpack.decode,
        msgspec.msgpack.encode,
    ),
    "push": replace(framed(use_push, INTO), errors=(ProtocolError, BindError)),
    "manifest": Decoder(
        use_manifest,
        (IncompatiblePeer, InvalidManifest, InvalidTopology),
        (msgspec.msgpack.encode(REMOTE[0]),),
        msgspec.msgpack.decode,
        msgspec.msgpack.encode,
    ),
    "manifests of a tool": Decoder(
        lambda content: instances._decode("x", content),
        NotReadable,
        (msgspec.msgpack.encode(REMOTE), msgspec.json.encode(REMOTE)),
        lambda content: json.loads(content) if content[:1] == b"[" else msgspec.msgpack.decode(content),
        msgspec.msgpack.encode,
    ),
    "record": OF_RECORDS,
    "endpoint": Decoder(
        lambda content: unseal("nixl", content),
        TransferError,
        (seal("nixl", "pd-0", b"metadata" * 8),),
        msgspec.msgpack.decode,
        msgspec.msgpack.encode,
    ),
}
assert all(issubclass(kind, (PDConnectorError, LegError, InstanceRefusal)) for d in DECODERS.values() for kind in (
    d.errors if isinstance(d.errors, tuple) else (d.errors,)))  # fmt: skip
for name, messages in (("request", m.Request), ("reply", m.Reply)):
    decode = DECODERS[name].run
    lacking = set(get_args(messages)) - {type(decode(example)[1]) for example in DECODERS[name].examples}
    assert not lacking, f"{name}: no example of {lacking}"

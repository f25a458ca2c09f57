"""Every function that takes bytes or values from the network, with valid examples and the errors that it may raise.

Whatever comes, a decoder returns or raises one of its errors; its time and memory are bounded by what came in. Used by
`test_decoders` (hypothesis, part of the unit tests) and `coverage_guided` (atheris, as long as one likes).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

sys.path.insert(0, str(Path(__file__).parents[1] / "geometry"))

from geometry_world import Model, Side, instance

from vllm_pd_connector import cli
from vllm_pd_connector.errors import (
    IncompatiblePeer,
    InvalidManifest,
    InvalidTopology,
    PDConnectorError,
    ProtocolError,
    TransferError,
)
from vllm_pd_connector.geometry.plan import make_plan
from vllm_pd_connector.geometry.topology import check_pd_topology
from vllm_pd_connector.protocol import messages as m
from vllm_pd_connector.protocol import params as p
from vllm_pd_connector.protocol.answer import remote_prefill_params, require_signature
from vllm_pd_connector.protocol.fields import LeaseRef, Table
from vllm_pd_connector.proxy.handoff import check_client_body
from vllm_pd_connector.transport.endpoint import seal, unseal
from vllm_pd_connector.worker.link import decode as decode_manifest

MODEL = Model(layers=2, heads=4)
[LOCAL] = [worker.manifest for worker in instance(MODEL, Side(tp=1, layout="NHD"), "decode-0")]
REMOTE = [worker.manifest for worker in instance(MODEL, Side(tp=2, layout="HND"), "prefill-0")]
LEASE = LeaseRef("cmpl-1", bytes(range(16)))
PARAMS = remote_prefill_params(
    block_ids=([3, 4, 5], [9]), first_blocks=(0, 2), request_id="cmpl-1", nonce=bytes(16), lease_seconds=30.0,
    prompt_digest="0123456789abcdef", engine_id="p-0", incarnation="ab" * 16, host="10.0.0.1", port=5600,
    tp_size=2, dcp_size=1, pp_size=1, num_tokens=33, server_key="k" * 40, secret=b"s" * 32,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Decoder:
    """`run` takes the bytes; `unpack` and `pack` turn a valid example into values and back, to change single ones."""

    run: Callable[[bytes], object]
    errors: type[Exception] | tuple[type[Exception], ...]
    examples: tuple[bytes, ...]
    unpack: Callable[[bytes], Any]
    pack: Callable[[Any], bytes]


def framed(decode: Callable[[bytes], object], *examples: m.Request | m.Reply) -> Decoder:
    head = len(m.encode(7, m.Describe())) - len(msgspec.msgpack.encode(m.Describe()))
    header = m.encode(7, m.Describe())[:head]
    return Decoder(
        decode,
        ProtocolError,
        tuple(m.encode(7, example) for example in examples),
        lambda frame: msgspec.msgpack.decode(frame[head:]),
        lambda value: header + msgspec.msgpack.encode(value),
    )


def of_json(use: Callable[[Any], object], *examples: object) -> Decoder:
    """What reaches us as parsed JSON: the HTTP server has refused what is no JSON."""

    def run(content: bytes) -> object:
        try:
            value = json.loads(content)
        except (ValueError, RecursionError):
            return None
        return use(value)

    def pack(value: Any) -> bytes:
        return json.dumps(value, default=repr, skipkeys=True).encode()

    return Decoder(run, ProtocolError, tuple(map(pack, examples)), json.loads, pack)


def use_params(value: Any) -> object:
    kind = p.kind_of(value)
    if kind is p.Kind.REMOTE_DECODE:
        return p.parse_remote_decode(value)
    if kind is p.Kind.NONE:
        return None
    remote = p.parse_remote_prefill(value)
    require_signature(remote, b"s" * 32)
    return remote.lease


def use_manifest(content: bytes) -> object:
    """The handshake: decode, check the pair, plan."""
    manifest = decode_manifest(content)
    check = check_pd_topology(LOCAL, [manifest, REMOTE[1]])
    return make_plan(LOCAL, [manifest, REMOTE[1]]) if check.allowed else None


def manifest_values(content: bytes) -> Any:
    return msgspec.msgpack.decode(content)


DECODERS: dict[str, Decoder] = {
    "request": framed(
        m.decode_request,
        m.GetManifests("p-0"),
        m.Renew((LEASE, LEASE)),
        m.ReadDone(LEASE, 1, 4, bytes(16)),
        m.Release((LEASE,)),
        m.Verify(LEASE, (0, 16), 33),
        m.Sums(bytes(16), 7, 1, (m.SumPiece("layer", "key", 0, bytes(8)),), True),
    ),
    "reply": framed(
        m.decode_reply,
        m.Manifests("p-0", "ab" * 16, (b"one", b"two")),
        m.Renewed(("cmpl-1",)),
        m.ReadVerdict(False, "expired"),
        m.Standing(3),
        m.Job(7, (Table(0, bytes(8)),), (0, 16), 33),
        m.Verified((m.SumPiece("layer", "key", 0, bytes(8)),)),
        m.Failure(m.FailureCode.BUSY, "later"),
    ),
    "parameters": of_json(use_params, PARAMS, {"do_remote_decode": True, "remote_host": None}),
    "body": of_json(check_client_body, {"model": "m", "prompt": [1, 2], "n": 1}, {"messages": [{"content": "x"}]}),
    "manifest": Decoder(
        use_manifest,
        (IncompatiblePeer, InvalidManifest, InvalidTopology),
        (msgspec.msgpack.encode(REMOTE[0]),),
        manifest_values,
        msgspec.msgpack.encode,
    ),
    "manifests of a tool": Decoder(
        lambda content: cli._decode("x", content),
        cli.Unanswered,
        (msgspec.msgpack.encode(REMOTE), msgspec.json.encode(REMOTE)),
        lambda content: json.loads(content) if content[:1] == b"[" else msgspec.msgpack.decode(content),
        msgspec.msgpack.encode,
    ),
    "endpoint": Decoder(
        lambda content: unseal("nixl", content),
        TransferError,
        (seal("nixl", "pd-0", b"metadata" * 8),),
        msgspec.msgpack.decode,
        msgspec.msgpack.encode,
    ),
}
assert all(issubclass(kind, PDConnectorError) for d in DECODERS.values() for kind in (
    d.errors if isinstance(d.errors, tuple) else (d.errors,)))  # fmt: skip

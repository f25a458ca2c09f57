"""`vllm-pd doctor`: what of a machine matters to instances, and what an instance's side channel and transport do from
here."""

from __future__ import annotations

import json as json_
import time
from collections.abc import Generator, Iterator
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
import typer

from vllm_pd_connector.cli.instances import SCHEME, Identity, identity_of, load
from vllm_pd_connector.cli.machine import Finding, findings
from vllm_pd_connector.cli.options import Json, KeysDirectory, ServerKey, Timeout
from vllm_pd_connector.cli.output import CommandError, Exit, NotReadable, emit, emit_json, table
from vllm_pd_connector.errors import PDConnectorError
from vllm_pd_connector.geometry.manifest import Manifest, Segment
from vllm_pd_connector.geometry.runs import Runs
from vllm_pd_connector.geometry.sharding import describe_rank
from vllm_pd_connector.geometry.validate import validate
from vllm_pd_connector.transport import registry
from vllm_pd_connector.transport.base import TransferStatus, Transport, TransportPeer, Use
from vllm_pd_connector.transport.endpoint import protocol_of
from vllm_pd_connector.worker.peers.bandwidth_test import SCRATCH_BYTES, Bandwidth, measure_bandwidth

SETTLE_S, MEASURED_S = 10.0, 40.0


def doctor(
    peer: Annotated[str | None, typer.Argument(metavar="[PEER]", help="tcp://host:port[/engine_id]")] = None,
    transport_options: Annotated[
        str, typer.Option(metavar="JSON", help="those of the instance that would talk to the peer")
    ] = "{}",
    json: Json = False,
    keys: KeysDirectory = None,
    server_key: ServerKey = None,
    timeout: Timeout = 5.0,
) -> Exit:
    """Look at this machine, and at an instance from here: side channel, transport, a measured read and write."""
    found = list(findings())
    code = Exit.OK
    if peer is not None:
        try:
            options = _options(transport_options)
            for one in _examine(peer, timeout, identity_of(keys, server_key), options):
                found.append(one)
        except CommandError as error:
            found.append(Finding("peer", "bad", " ".join(str(error).split())))
            code = error.code
    if code is Exit.OK and any(one.state == "bad" for one in found):
        code = Exit.REFUSED
    if json:
        emit_json("doctor", {"good": code is Exit.OK, "findings": [asdict(one) for one in found]})
    else:
        emit("\n".join(table([(one.state, one.topic, one.says) for one in found])))
    return code


def _options(text: str) -> dict[str, Any]:
    try:
        found = json_.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotReadable(f"--transport-options: not JSON: {error}") from error
    if not isinstance(found, dict):
        raise NotReadable("--transport-options: give a JSON object")
    return found


def _examine(peer: str, timeout: float, identity: Identity | None, options: dict[str, Any]) -> Iterator[Finding]:
    if not peer.startswith(SCHEME):
        raise NotReadable(f"{peer}: give tcp://host:port or tcp://host:port/engine_id")
    began = time.monotonic()
    manifests = load(peer, timeout, identity)
    took = f"{(time.monotonic() - began) * 1e3:.0f} ms"
    proven = "with keys" if identity is not None else "without keys"
    yield Finding("side channel", "good", f"{manifests[0].engine_id} answered in {took}, {proven}")
    try:
        for manifest in manifests:
            validate(manifest)
        yield from _transport(manifests, options)
    except PDConnectorError as error:
        raise CommandError(f"{peer}: {error}") from error


def _transport(manifests: list[Manifest], options: dict[str, Any]) -> Iterator[Finding]:
    name = manifests[0].transport
    with registry.ways(name) as ways:
        yield from _connected(name, manifests, options)
        for way in ways():
            yield Finding(f"{name}, ways", "good", way)


def _connected(name: str, manifests: list[Manifest], options: dict[str, Any]) -> Iterator[Finding]:
    memory = np.zeros(SCRATCH_BYTES, dtype=np.uint8)
    here = Segment(memory.ctypes.data, len(memory), "cpu", 0)
    transport = registry.create(name, options, Use(serves=False, posts=True))
    try:
        told = getattr(transport, "over", name)
        yield Finding("transport", "good", f"{name}, since {manifests[0].engine_id} has it; from here {told}")
        transport.register((here,))
        for manifest in manifests:
            yield _measured(transport, here, manifest)
    finally:
        transport.close()


def _measured(transport: Transport, here: Segment, manifest: Manifest) -> Finding:
    topic = f"{transport.name}, {describe_rank(manifest.parallel.rank)}"
    speaks = protocol_of(manifest.transport, manifest.endpoint)
    over = f" over {speaks}" if speaks else ""
    where = (manifest.scratch,) if manifest.scratch is not None else manifest.segments
    peer = transport.connect(manifest.endpoint, where)
    try:
        if manifest.scratch is None:
            _touch(transport, peer, here, manifest)
            return Finding(
                topic, "note", f"read from{over}, not measured: only in mode push or auto it has memory for that"
            )
        test = measure_bandwidth(transport, peer, here, manifest.scratch, lambda: True, SETTLE_S)
        return Finding(topic, "good", f"{_run(test, manifest)}{over}")
    finally:
        transport.disconnect(peer)


def _touch(transport: Transport, peer: TransportPeer, here: Segment, manifest: Manifest) -> None:
    """Read one byte of its caches, which nobody looks at: a connection is made when something moves, and not before.

    Raises:
        PDConnectorError: it cannot be read.
    """
    one = np.ones(1, dtype=np.int64)
    transfer = transport.read(peer, Runs(one * manifest.segments[0].address, one * here.address, one))
    late = time.monotonic() + SETTLE_S
    while transport.poll(transfer) is not TransferStatus.DONE:
        if time.monotonic() > late:
            raise CommandError(f"{describe_rank(manifest.parallel.rank)}: a byte of it does not come in {SETTLE_S:g} s")
        time.sleep(0.001)


def _run(test: Generator[None, None, Bandwidth], manifest: Manifest) -> Bandwidth:
    """Raises CommandError where it does not end: what it moves may be dropped on the way."""
    late = time.monotonic() + MEASURED_S
    while time.monotonic() < late:
        try:
            next(test)
        except StopIteration as end:
            return end.value  # type: ignore[no-any-return]
        time.sleep(0.0001)
    raise CommandError(
        f"{describe_rank(manifest.parallel.rank)}: transfers with it do not end in {MEASURED_S:g} s; its side channel "
        "answers, so look at what lies on the way of its data (a firewall, routes, the fabric)"
    )

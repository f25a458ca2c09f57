"""The command `vllm-pd`: looks at instances, and routes requests to them.

    vllm-pd explain PREFILL DECODE   may this pair work, who moves what to whom, which layouts are converted
    vllm-pd manifest SOURCE -o FILE  save what an instance says of itself
    vllm-pd keygen DIRECTORY         make the keys with which instances authenticate each other
    vllm-pd proxy --prefill URL …    a P/D router (proxy/README.md)
    vllm-pd announce ROUTER URL …    tell vLLM's router, in its discovery mode, which instances there are

An instance is a file of manifests (JSON or msgpack, as `manifest` writes them) or a live side channel,
tcp://host:port or tcp://host:port/engine_id. Exit codes: 0 allowed, 1 refused, 2 not answered (usage, unreadable
input, nobody there). A side channel with keys answers only with --keys DIRECTORY (one that it knows).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from vllm_pd_connector.arguments import base_url, host_and_port, seconds
from vllm_pd_connector.config import Config
from vllm_pd_connector.errors import InvalidConfig, PDConnectorError, ProtocolError, TransferError
from vllm_pd_connector.geometry.explain import Explanation, Movement, explain_pair
from vllm_pd_connector.geometry.manifest import Manifest
from vllm_pd_connector.geometry.staging.chunks import CHUNKS_PER_BUFFER
from vllm_pd_connector.protocol.wire.messages import Describe, Failure, GetManifests, Manifests, Request
from vllm_pd_connector.sidechannel.client import Outcome, SideChannelClient
from vllm_pd_connector.sidechannel.net.keys import Keys, create_keys, create_secret, load_keys, public_key
from vllm_pd_connector.sidechannel.net.sockets import endpoint
from vllm_pd_connector.sidechannel.waiting import ask
from vllm_pd_connector.transport.endpoint import unseal
from vllm_pd_connector.wake import Wake

if TYPE_CHECKING:
    from collections.abc import Sequence

ALLOWED, REFUSED, UNANSWERED = 0, 1, 2

_SCHEME = "tcp://"


class Unanswered(PDConnectorError):
    """The question could not be put: an input that is not there or not readable."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["proxy"]:
        return _proxy(words[1:])
    options = _parser().parse_args(words)
    try:
        result: int = options.run(options)
        return result
    except (Unanswered, InvalidConfig) as error:
        print(f"vllm-pd: {error}", file=sys.stderr)
        return UNANSWERED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="vllm-pd", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    explain = commands.add_parser("explain", help="verdict and movements of a pair of instances")
    explain.add_argument("prefill", metavar="PREFILL", help="file of manifests, or tcp://host:port[/engine_id]")
    explain.add_argument("decode", metavar="DECODE", help="file of manifests, or tcp://host:port[/engine_id]")
    explain.add_argument("--json", action="store_true", help="print JSON")
    explain.add_argument("--tokens", type=_positive, default=1000, help="length of the request (default: 1000)")
    explain.add_argument(
        "--staging-bytes",
        type=int,
        default=Config().staging_bytes,
        help="staging_bytes of the instance that starts transfers (default: the connector's)",
    )
    explain.add_argument(
        "--mode", choices=("pull", "push"), default="pull", help="who starts them: decode or prefill (default: pull)"
    )
    explain.set_defaults(run=_explain)
    save = commands.add_parser("manifest", help="save an instance's manifests")
    save.add_argument("source", metavar="SOURCE", help="tcp://host:port[/engine_id], or a file to convert")
    save.add_argument("-o", "--output", type=Path, required=True, help="file; JSON if it ends in .json, else msgpack")
    save.set_defaults(run=_save)
    make = commands.add_parser("keygen", help="make keys for the side channel, and a secret for parameters")
    make.add_argument(
        "directory", metavar="DIRECTORY", type=Path, help="where NAME.key and NAME.key_secret are written"
    )
    make.add_argument("--name", default="instance", help="name of the files (default: instance)")
    make.add_argument("--params-secret", type=Path, metavar="FILE", help="also write a new secret for params_secret")
    make.set_defaults(run=_keygen)
    commands.add_parser("proxy", help="a P/D router; see vllm-pd proxy --help")
    tell = commands.add_parser("announce", help="tell vLLM's router, in its discovery mode, which instances there are")
    tell.add_argument(
        "router", metavar="ROUTER", type=host_and_port, help="host:port, the router's --vllm-discovery-address"
    )
    tell.add_argument("urls", metavar="URL", nargs="+", type=base_url, help="base URL of an instance with PDConnector")
    tell.set_defaults(run=_announce)
    for command in (explain, save):
        command.add_argument("--keys", type=Path, help="directory of keys, as side_channel_keys of an instance")
        command.add_argument("--server-key", metavar="FILE", type=Path, help="the instance's public key")
        command.add_argument("--timeout", type=seconds, default=5.0, help="seconds to wait for a side channel")
    return parser


def _announce(options: argparse.Namespace) -> int:
    from vllm_pd_connector.proxy.announce import announce

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    with contextlib.suppress(KeyboardInterrupt):
        announce(options.router, options.urls)
    return ALLOWED


def _proxy(words: Sequence[str]) -> int:
    from vllm_pd_connector.proxy.__main__ import main as run_router

    return run_router(words)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def _explain(options: argparse.Namespace) -> int:
    identity = _identity(options)
    prefill, decode = (load(source, options.timeout, identity) for source in (options.prefill, options.decode))
    chunk_bytes = options.staging_bytes // CHUNKS_PER_BUFFER
    found = explain_pair(prefill, decode, options.tokens, chunk_bytes, push=options.mode == "push")
    if options.json:
        print(json.dumps(as_json(prefill, decode, found), indent=1))
    else:
        print(as_text(prefill, decode, found))
    return ALLOWED if found.check.allowed else REFUSED


def _save(options: argparse.Namespace) -> int:
    manifests = load(options.source, options.timeout, _identity(options))
    encode = msgspec.json.encode if options.output.suffix == ".json" else msgspec.msgpack.encode
    try:
        options.output.write_bytes(encode(manifests))
    except OSError as error:
        raise Unanswered(f"{options.output}: cannot be written: {error.strerror}") from error
    print(f"{len(manifests)} manifests of {_instance(manifests)} in {options.output}")
    return ALLOWED


@dataclass(frozen=True, slots=True)
class Identity:
    """Our keys and the key of the server that we ask."""

    keys: Keys
    server_key: str


def _identity(options: argparse.Namespace) -> Identity | None:
    """What --keys and --server-key say; the server's key is the only one that is not ours if it is not given."""
    if options.keys is None:
        return None
    keys = load_keys(options.keys)
    if options.server_key is not None:
        return Identity(keys, public_key(options.server_key))
    others = keys.peers - {keys.public} or keys.peers
    if len(others) > 1:
        raise Unanswered(f"--keys: {options.keys} has {len(others)} peers; say which with --server-key FILE")
    return Identity(keys, *others)


def _keygen(options: argparse.Namespace) -> int:
    public, secret = create_keys(options.directory, options.name)
    print(f"{secret}: keep it on the instance, in the directory of side_channel_keys")
    print(f"{public}: copy it into the directory of side_channel_keys of every instance that talks to this one")
    if options.params_secret is not None:
        create_secret(options.params_secret)
        print(f"{options.params_secret}: copy it to all instances, params_secret")
    return ALLOWED


def load(source: str, timeout: float, identity: Identity | None = None) -> list[Manifest]:
    """The manifests of an instance, from a file or a side channel; not validated.

    Raises:
        Unanswered: nothing there, or something else.
    """
    if source.startswith(_SCHEME):
        encoded = [(f"{source}: worker {i}", data) for i, data in enumerate(fetch(source, timeout, identity))]
        return [manifest for name, data in encoded for manifest in _decode(name, data)]
    try:
        content = Path(source).read_bytes()
    except OSError as error:
        raise Unanswered(
            f"{source}: {error.strerror}; give a file of manifests or tcp://host:port of a side channel"
        ) from error
    return _decode(source, content)


def _decode(name: str, content: bytes) -> list[Manifest]:
    kind = Manifest | list[Manifest]
    # No msgpack of a manifest or a list of up to 15 begins like JSON, and none of more does either.
    decode = msgspec.json.decode if content.lstrip()[:1] in (b"[", b"{") else msgspec.msgpack.decode
    try:
        found: Any = decode(content, type=kind)
    except (msgspec.MsgspecError, PDConnectorError, ValueError, RecursionError) as error:
        raise Unanswered(f"{name}: not manifests of this release: {error}") from error
    return found if isinstance(found, list) else [found]


def fetch(address: str, timeout: float, identity: Identity | None = None) -> tuple[bytes, ...]:
    """The encoded manifests that a side channel serves, of the engine in the address or of any.

    Raises:
        Unanswered: not an address, nobody there in time, or the server refused.
    """
    place, _, engine = address.removeprefix(_SCHEME).partition("/")
    try:
        host, _, port = host_and_port(place).rpartition(":")
    except argparse.ArgumentTypeError as error:
        raise Unanswered(f"{address}: give tcp://host:port or tcp://host:port/engine_id") from error
    try:
        where = endpoint(host, int(port), identity.server_key if identity is not None else None)
        outcome = _ask(where, GetManifests(engine) if engine else Describe(), timeout, identity)
    except ProtocolError as error:
        raise Unanswered(f"{address}: {error}") from error
    match outcome:
        case Manifests():
            return outcome.manifests
        case Failure(code=code, message=message):
            raise Unanswered(f"{address}: {code}: {message}")
        case _:
            keys = "" if identity is not None else ", and does it want --keys"
            raise Unanswered(f"{address}: {outcome}; is a prefill instance with PDConnector listening there{keys}?")


def _ask(address: str, request: Request, timeout: float, identity: Identity | None) -> Outcome:
    keys = identity.keys if identity is not None else None
    with contextlib.closing(SideChannelClient(keys=keys)) as client, contextlib.closing(Wake()) as wake:
        return ask(client, wake, address, request, timeout)


def as_json(prefill: Sequence[Manifest], decode: Sequence[Manifest], found: Explanation) -> dict[str, Any]:
    """The explanation as plain values; the keys are part of the command's interface."""
    return {
        "status": str(found.check.status),
        "allowed": found.check.allowed,
        "reason": found.check.reason,
        "differences": [
            {"field": d.field, "decode": d.local, "prefill": d.remote, "advice": d.advice}
            for d in found.check.differences
        ],
        "prefill": _facts(prefill),
        "decode": _facts(decode),
        "tokens": found.tokens,
        "mode": "push" if found.push else "pull",
        "movements": [asdict(movement) for movement in found.movements],
    }


def _facts(manifests: Sequence[Manifest]) -> dict[str, Any]:
    if not manifests:
        return {"workers": 0}
    first = manifests[0]
    return {
        "engine_id": first.engine_id,
        "software": first.software,
        "transport": first.transport,
        "protocol": _protocol(first),
        "model": first.model.model,
        "workers": len(manifests),
        "tensor_parallel": first.parallel.tp_size,
        "pipeline_parallel": first.parallel.pp_size,
        "decode_context_parallel": first.parallel.dcp_size,
        "prefill_context_parallel": first.parallel.pcp_size,
    }


def _protocol(manifest: Manifest) -> str:
    """What the transport speaks; "" if it does not say."""
    try:
        return unseal(manifest.transport, manifest.endpoint).protocol[:20]
    except TransferError:
        return ""


def _instance(manifests: Sequence[Manifest]) -> str:
    if not manifests:
        return "no workers"
    facts = _facts(manifests)
    speaks = f" over {facts['protocol']}" if facts["protocol"] else ""
    contexts = "".join(
        f"{name} context parallel {size}, "
        for name in ("decode", "prefill")
        if (size := facts[f"{name}_context_parallel"]) > 1
    )
    return (
        f"engine {facts['engine_id']} ({facts['model']}, {facts['workers']} workers, tensor parallel "
        f"{facts['tensor_parallel']}, pipeline parallel {facts['pipeline_parallel']}, {contexts}"
        f"{facts['transport']}{speaks}, {facts['software']})"
    )


def as_text(prefill: Sequence[Manifest], decode: Sequence[Manifest], found: Explanation) -> str:
    """The explanation for a person."""
    check = found.check
    lines = [f"prefill: {_instance(prefill)}", f"decode:  {_instance(decode)}", f"verdict: {check.status}"]
    if not check.allowed:
        # A difference is told from the decode side, which reads and therefore checks.
        lines += [f"  {difference}" for difference in check.differences] or [f"  {check.reason}"]
        return "\n".join(lines)
    of_runs = "bytes written" if found.push else "bytes read"
    header = ("from", "to", "group", "layers", "tokens per page", "way", "bytes", "runs", of_runs, "mean run",
              "copies")  # fmt: skip
    rows = [header, *(_row(movement) for movement in found.movements)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    how = "pushed by prefill" if found.push else "pulled by decode"
    lines += ["", f"A request of {found.tokens} tokens in blocks that are not neighbours, {how}:"]
    lines += ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    converted = [m for m in found.movements if m.converted]
    runs, moved = sum(m.runs for m in found.movements), sum(m.bytes for m in found.movements)
    lines += ["", f"in all: {moved} bytes in {runs} runs"]
    if converted:
        saved = sum(m.unconverted_runs for m in converted)
        lines.append(f"conversion makes {sum(m.runs for m in converted)} runs of about {saved}")
    return "\n".join(lines)


def _row(movement: Movement) -> tuple[str, ...]:
    sides = (
        (movement.source_page_tokens, movement.source_share),
        (movement.destination_page_tokens, movement.destination_share),
    )
    pages = " to ".join(f"{tokens} ({share})" if share else str(tokens) for tokens, share in sides)
    return (
        movement.source,
        movement.destination,
        f"{movement.group} {movement.kind}",
        str(movement.layers),
        pages if movement.destination_page_tokens else "-",
        "converted" if movement.converted else "direct",
        str(movement.bytes),
        str(movement.runs),
        str(movement.read_bytes),
        str(round(movement.read_bytes / max(1, movement.runs))),
        str(movement.copies),
    )


if __name__ == "__main__":
    sys.exit(main())

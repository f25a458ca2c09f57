"""A decoder to be fuzzed, and the forms in which its examples are changed.

Random bytes rarely get past the parser of a format, so a valid example is taken apart into values, one of them is
changed, and the whole is put together again. How that is done is a matter of the format: a frame of the side channel,
JSON, frames of a transport, a page of metrics. Whatever a value was changed into is packed, and not refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from prometheus_client.parser import text_string_to_metric_families

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.wire import messages as m


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

    return Decoder(run, ProtocolError, tuple(map(as_json, examples)), json.loads, as_json)


def as_json(value: Any) -> bytes:
    return json.dumps(value, default=repr, skipkeys=True).encode()


def frame(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def frames_of(content: bytes) -> list[Any]:
    values, content = [content[0]], content[1:]
    while content:
        end = 4 + int.from_bytes(content[:4], "big")
        values.append(content[4:end])
        content = content[end:]
    return values


def as_bytes(value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="surrogatepass")


def frames_from(values: Any) -> bytes:
    values = values if isinstance(values, list) else [values]
    head = values[0] if values and isinstance(values[0], int) else 0
    return bytes([head & 255]) + b"".join(frame(as_bytes(value)) for value in values[1:])


def exposition_rows(content: bytes) -> list[Any]:
    """Rows of a `/metrics` page: [name, labels]."""
    families = text_string_to_metric_families(content.decode())
    return [[sample.name, dict(sample.labels)] for family in families for sample in family.samples]


def exposition_of(rows: Any) -> bytes:
    lines = []
    for row in rows if isinstance(rows, list) else [rows]:
        name, labels = (*row, {}, {})[:2] if isinstance(row, list) else (row, {})
        pairs = labels.items() if isinstance(labels, dict) else [("le", labels)]
        inside = ",".join(f'{key}="{value!s}"' for key, value in pairs)
        lines.append(f"{name}{{{inside}}} 1.0\n")
    return "".join(lines).encode(errors="surrogatepass")

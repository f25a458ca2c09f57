"""What instances tell each other, as data: every message, the manifest and the parameters, field by field.

    python -m tests.contract.describe_wire        # records the wire of this release

One record per PROTOCOL_VERSION (`wire-2.json`). Releases that speak the same version must read each other's bytes, and
structs are strict: a field that is new, gone, renamed or bounded otherwise is refused by one side. So a release whose
wire differs from the record has to raise the version, and `test_releases.py` fails until it does. Names of classes are
no part of the wire and of no record.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import msgspec

from vllm_pd_connector.geometry.manifest import MANIFEST_VERSION, Manifest
from vllm_pd_connector.protocol.params.conversation import Conversation, NamedConversation
from vllm_pd_connector.protocol.params.parse import RemoteBootstrap, RemoteDecode, RemotePrefill, RemotePush
from vllm_pd_connector.protocol.wire.messages import PROTOCOL_VERSION, Reply, Request

HERE = Path(__file__).parent
SAID = {"title", "description", "discriminator"}
"""Of a schema, what bytes do not have; members of a union are told apart by the tag that each of them has."""

OWN = frozenset({"orders"})
"""What an instance tells none but its own workers, which are of its release."""

Wire = dict[str, dict[str, str]]
"""By what is sent, then by field: its type, bounds and default."""


def describe() -> Wire:
    """The wire of this release."""
    sent: list[Any] = [*get_args(Request), *get_args(Reply)]
    sent += [Manifest, RemotePrefill, RemotePush, RemoteDecode, RemoteBootstrap, Conversation, NamedConversation]
    schemas, parts = msgspec.json.schema_components(sent)
    wire: Wire = {"versions": {"protocol": str(PROTOCOL_VERSION), "manifest": str(MANIFEST_VERSION)}}
    for kind, schema in zip(sent, schemas, strict=True):
        whole = _whole(schema, parts)
        needed = whole["required"]
        wire[str(kind.__struct_config__.tag or kind.__name__)] = {
            name: json.dumps(field, sort_keys=True) + ("" if name in needed else ", optional")
            for name, field in whole["properties"].items()
        }
    return wire


def _whole(schema: Any, parts: dict[str, Any]) -> Any:
    """A schema without names of classes: what it refers to stands in it."""
    if isinstance(schema, list):
        return [_whole(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _whole(parts[schema["$ref"].rpartition("/")[2]], parts)
    # "properties" has names of fields, of which one may be "title".
    return {
        name: {field: _whole(value, parts) for field, value in each.items()}
        if name == "properties"
        else _whole(each, parts)
        for name, each in schema.items()
        if name not in SAID
    }


def record_of(version: int) -> Path:
    return HERE / f"wire-{version}.json"


def differences(recorded: Wire, found: Wire) -> list[str]:
    """What another release that goes by the record would not understand, one line each."""
    lines = []
    for name in sorted((recorded.keys() | found.keys()) - OWN):
        before, now = recorded.get(name, {}), found.get(name, {})
        for field in sorted(before.keys() | now.keys()):
            if before.get(field) != now.get(field):
                lines.append(f"{name}.{field}: {before.get(field, 'not there')} recorded, {now.get(field, 'gone')} now")
    return lines


if __name__ == "__main__":
    record_of(PROTOCOL_VERSION).write_text(json.dumps(describe(), indent=1) + "\n")

"""What this package computes for a peer to compare or to read, of fixed inputs, and writes down as JSON.

    python -m tests.contract.wire_values > tests/contract/values-2.json

`describe_wire` records the form of messages; this records what stands in some of their fields, and what is sent beside
them. One record per PROTOCOL_VERSION: releases that speak the same version compare each other's values, so that another
formula under the same number fails requests, or finds differences where there are none. A value that must change takes
a new version, or is told in the CHANGELOG and in docs/containers.md as one that pairs refuse.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from tests.support.handed_over import answer_of
from vllm_pd_connector.compat.blocks import prompt_digest
from vllm_pd_connector.compat.conversations import prefix_digests
from vllm_pd_connector.geometry.checksums.digest import _page_values
from vllm_pd_connector.geometry.manifest import Axis, AxisName, Role, Tensor
from vllm_pd_connector.instance_info import EngineInfo
from vllm_pd_connector.protocol.params.answer import encode_params
from vllm_pd_connector.protocol.params.bootstrap import HostPort, encode_answer
from vllm_pd_connector.protocol.params.parse import pairing_name
from vllm_pd_connector.protocol.weights import version_name
from vllm_pd_connector.transport.endpoint import seal
from vllm_pd_connector.transport.greeting import IncomingLink, framed
from vllm_pd_connector.transport.mooncake.whereabouts import Whereabouts

NAMES = (
    ({}, "cmpl-x-1-0-0123abcd"),
    ({}, "3_chatcmpl-7-ABCDEF01"),
    ({}, "no-suffix"),
    ({"transfer_id": "t-1"}, "cmpl-x-1-0-0123abcd"),
    ({"transfer_id": "t-1"}, "3_chatcmpl-x-0123abcd"),
)


def values() -> dict[str, Any]:
    """By what is computed, as JSON has it."""
    return {
        "prompt_digest": prompt_digest(_request(range(1, 40)), 33),
        "prefix_digests": prefix_digests(_request(range(1, 40)), [16, 32]),
        "prefix_digests of a client's own": prefix_digests(_request(range(1, 40), salt="mine"), [16, 32]),
        "checksums of tokens": _sums(
            Axis(AxisName.TOKEN, 4, 12, 0, 4), Axis(AxisName.HEAD, 2, 6, 2, 4), Axis(AxisName.CHANNEL, 3, 2, 0, 3)
        ),
        "checksums of states": _sums(Axis(AxisName.HEAD, 4, 12, 4, 8), Axis(AxisName.CHANNEL, 6, 2, 0, 6)),
        "signature": encode_params(answer_of(), b"s" * 32)["pd_connector"]["signature"],
        "pairing_name": [pairing_name(params, request_id) for params, request_id in NAMES],
        "version_name": [version_name("7"), version_name("7" * 1000)],
        "endpoint": seal("nixl", "agent-1", b"metadata", "tcp").hex(),
        "endpoint's metadata, Mooncake": msgspec.msgpack.encode(Whereabouts("10.0.0.1", 1, 2, "tcp", "host")).hex(),
        "liveness": [framed(b"pd-life-00").hex(), IncomingLink(b"pd-life-00", 0.0, asks=True).answer(("::1", 7)).hex()],
        "bootstrap": json.loads(encode_answer(1, "p-1", HostPort("fd00::1", 5601), 2, 1)),
        "instance_info": EngineInfo(
            *("kv_producer", "push", "concurrent", "nixl", "p-0", "10.0.0.1", 5600, 8, 1, 1, 2), conversations="on"
        ).labels(),
    }


def _request(tokens: range, salt: str | None = None) -> Any:
    return SimpleNamespace(
        prompt_token_ids=list(tokens), all_token_ids=list(tokens), prompt_embeds=None, mm_features=None,
        lora_request=None, cache_salt=salt,
    )  # fmt: skip


def _sums(*axes: Axis) -> list[str]:
    """Of the second of two pages of 48 bytes, in halfwords."""
    memory = np.arange(96, dtype=np.uint8) * 7
    tokens = axes[0].size if axes[0].name is AxisName.TOKEN else 0
    tensor = Tensor("l", Role.KEY, 0, "bfloat16", 2, 0, 0, 2, 48, 1, tokens, axes)
    found, first = _page_values(tensor, memory, np.array([1]))
    return [str(first), *map(str, found.reshape(-1).tolist())]


if __name__ == "__main__":
    print(json.dumps(values(), indent=1))

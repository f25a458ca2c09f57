"""The bootstrap answer, in the form that vLLM's in-tree Mooncake connector and its proxies read and write."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.params.bootstrap import (
    MAX_ANSWER_BYTES,
    HostPort,
    encode_answer,
    parse_answer,
    parse_bootstrap_address,
)
from vllm_pd_connector.protocol.params.parse import (
    Kind,
    is_answer,
    kind_of,
    names_bootstrap,
    pairing_name,
    parse_remote_bootstrap,
    parse_remote_decode,
)

RECORDED = (
    b'{"0":{"engine_id":"e-0","worker_addr":{"0":{"0":"tcp://10.0.0.5:40001"},"1":{"0":"tcp://10.0.0.5:40002"}}}}'
)
"""What the in-tree connector of vLLM 0.32 answers with two tensor-parallel workers."""

LEG_P = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "xfer-1"}
LEG_D = {
    "do_remote_decode": False,
    "do_remote_prefill": True,
    "remote_bootstrap_addr": "http://10.0.0.5:8998",
    "remote_engine_id": "e-0",
    "transfer_id": "xfer-1",
}
"""The two legs as the in-tree connector's proxy writes them."""


def test_an_instance_answers_in_the_recorded_form_with_one_address_for_all_workers() -> None:
    answer = json.loads(encode_answer(1, "e-1", HostPort("10.0.0.5", 5601), tp_size=2, pp_size=2))
    address = "tcp://10.0.0.5:5601"
    workers = {"0": {"0": address, "1": address}, "1": {"0": address, "1": address}}
    assert answer == {"1": {"engine_id": "e-1", "worker_addr": workers}}
    assert "tcp://[fd00::5]:5601" in encode_answer(0, "e", HostPort("fd00::5", 5601), 1, 1).decode()


@pytest.mark.libraries
def test_the_in_tree_connector_reads_our_answer_as_its_own() -> None:
    from pydantic import TypeAdapter
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_utils import EngineEntry

    form = TypeAdapter(dict[int, EngineEntry])
    ours = encode_answer(0, "e-0", HostPort("10.0.0.5", 5600), 2, 1)
    assert form.dump_json(form.validate_json(ours)) == ours
    assert form.dump_json(form.validate_json(RECORDED)) == RECORDED


@given(
    st.sampled_from(["10.0.0.5", "prefill-0.example", "fd00::5", "::1"]),
    st.integers(1, 65535),
    st.integers(1, 8),
    st.integers(1, 4),
)
def test_what_an_instance_answers_is_read_back(host: str, port: int, tp_size: int, pp_size: int) -> None:
    answer = encode_answer(0, "engine", HostPort(host, port), tp_size, pp_size)
    assert parse_answer(answer) == {"engine": HostPort(host, port)}


def test_several_engines_may_stand_in_one_answer() -> None:
    both = json.loads(encode_answer(0, "a", HostPort("h", 1), 1, 1)) | json.loads(
        encode_answer(1, "b", HostPort("h", 2), 1, 1)
    )
    assert parse_answer(json.dumps(both).encode()) == {"a": HostPort("h", 1), "b": HostPort("h", 2)}
    assert parse_answer(b"{}") == {}


def entry(**changes: Any) -> bytes:
    sent: dict[str, Any] = {"engine_id": "e", "worker_addr": {"0": {"0": "tcp://h:1"}}}
    return json.dumps({"0": sent | changes}).encode()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"", "not in the form"),
        (b"[]", "not in the form"),
        (b'{"x": {}}', "not in the form"),
        (b"\xff", "not in the form"),
        (entry(engine_id=7), "engine_id"),
        (entry(engine_id=""), "engine_id"),
        (entry(extra=1), "extra"),
        (entry(worker_addr={}), "has 0 worker addresses"),
        (RECORDED, "has 2 worker addresses"),
        (entry(worker_addr={"0": {"0": "udp://h:1"}}), "not of the form tcp://host:port"),
        (entry(worker_addr={"0": {"0": "tcp://h:0"}}), "not of the form tcp://host:port"),
        (entry(worker_addr={"0": {"0": "tcp://h:65536"}}), "not of the form tcp://host:port"),
        (entry(worker_addr={"0": {"0": "tcp://h;x:1"}}), "not of the form tcp://host:port"),
        (b" " * (MAX_ANSWER_BYTES + 1), "at most"),
    ],
)
def test_an_answer_of_something_else_is_refused_with_the_reason(answer: bytes, message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_answer(answer)


@given(st.binary(max_size=300))
def test_no_bytes_do_anything_but_parse_or_be_refused(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        assert isinstance(parse_answer(data), dict)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("http://10.0.0.5:8998", HostPort("10.0.0.5", 8998)),
        ("http://10.0.0.5:8998/", HostPort("10.0.0.5", 8998)),
        ("http://[fd00::5]:8998", HostPort("fd00::5", 8998)),
        ("http://prefill-0.example:80", HostPort("prefill-0.example", 80)),
    ],
)
def test_a_bootstrap_address_is_a_host_and_a_port(text: str, place: HostPort) -> None:
    assert parse_bootstrap_address(text) == place


@pytest.mark.parametrize(
    "text",
    ["", "10.0.0.5:8998", "https://h:1", "http://h", "http://h:0", "http://h:99999", "http://u@h:1", "http://h:1/x?y",
     "http://h:1\n", "http://h:1/query", "file:///etc/passwd"],
)  # fmt: skip
def test_nothing_else_is_asked(text: str) -> None:
    with pytest.raises(ProtocolError, match="not of the form http://host:port"):
        parse_bootstrap_address(text)


def test_both_legs_of_the_in_tree_proxy_are_understood_and_share_a_name() -> None:
    assert kind_of(LEG_P) is Kind.REMOTE_DECODE and kind_of(LEG_D) is Kind.REMOTE_PREFILL
    parse_remote_decode(LEG_P)
    remote = parse_remote_bootstrap(LEG_D)
    assert (remote.remote_bootstrap_addr, remote.remote_engine_id) == ("http://10.0.0.5:8998", "e-0")
    assert names_bootstrap(LEG_D) and not is_answer(LEG_D)
    assert pairing_name(LEG_P, "cmpl-1-0-aaaaaaaa") == pairing_name(LEG_D, "cmpl-9-0-bbbbbbbb") == "xfer-1"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"transfer_id": None}, "transfer_id"),
        ({"transfer_id": ""}, "transfer_id"),
        ({"transfer_id": "x" * 513}, "transfer_id"),
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"remote_bootstrap_addr": 8998}, "remote_bootstrap_addr"),
        ({"remote_bootstrap_adr": "http://h:1"}, "unknown fields"),
        ({"do_remote_prefill": False}, "do_remote_prefill is not true"),
    ],
)
def test_a_leg_of_another_shape_is_refused_by_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ProtocolError, match=message):
        parse_remote_bootstrap(LEG_D | changes)

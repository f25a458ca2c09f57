"""kv_transfer_params: in-tree shapes are understood, everything else is refused with the name of the field."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.handed_over import answer_of
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.params import parse as p
from vllm_pd_connector.protocol.params.answer import encode_params, require_signature
from vllm_pd_connector.protocol.params.parse import (
    IN_TREE_KEYS,
    Extension,
    Kind,
    RemotePrefill,
    kind_of,
    parse_remote_decode,
    parse_remote_prefill,
)
from vllm_pd_connector.protocol.wire.messages import MIN_VERSION, PROTOCOL_VERSION

NONCE = bytes(range(16))
# What vLLM's toy proxy, its router and llm-d's sidecar send to a prefill instance.
ROUTER_TO_PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
# The keys that vLLM 0.32's NIXL pull connector answers with.
IN_TREE_ANSWER = {
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "tp_size",
    "dcp_size",
    "pp_size",
    "remote_num_tokens",
    "remote_blocks_expiry_time",
    "transfer_mode",
}


def make(secret=None, **changes):
    values = {
        "remote_block_ids": ((3, 4, 5), (9,)),
        "remote_request_id": "cmpl-1",
        "nonce": NONCE.hex(),
        "incarnation": "ab" * 16,
        "remote_host": "10.0.0.1",
    }
    return encode_params(answer_of(**(values | changes)), secret)


def answer(**changes):
    """An answer, damaged; a change of "pd_connector" is merged into its value."""
    made = make()
    ours = changes.get("pd_connector")
    if isinstance(ours, dict):
        changes = changes | {"pd_connector": made["pd_connector"] | ours}
    return made | changes


def test_the_answer_has_the_in_tree_fields_and_one_of_ours_and_survives_json():
    made = answer()
    assert set(made) == IN_TREE_ANSWER | {"pd_connector"}
    assert made == json.loads(json.dumps(made)), "as routers get it"
    parsed = parse_remote_prefill(made)
    assert parsed.remote_block_ids == ((3, 4, 5), (9,))
    assert parsed.lease == parse_remote_prefill(make()).lease
    assert parsed.lease.request_id == "cmpl-1" and len(parsed.lease.nonce) == 16
    assert (parsed.remote_host, parsed.remote_port, parsed.remote_num_tokens) == ("10.0.0.1", 5600, 33)
    assert parsed.pd_connector.version == PROTOCOL_VERSION


@pytest.mark.parametrize("key", sorted(IN_TREE_KEYS))
def test_fields_of_other_connectors_of_vllm_are_tolerated(key):
    assert parse_remote_prefill(answer(**{key: object()})) == parse_remote_prefill(answer())
    assert parse_remote_decode(ROUTER_TO_PREFILL | {key: object()}).do_remote_decode


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"remote_port": 0}, "remote_port"),
        ({"remote_port": 65536}, "remote_port"),
        ({"remote_port": "5600"}, "remote_port"),
        ({"remote_port": True}, "remote_port"),
        ({"remote_host": ""}, "remote_host"),
        ({"remote_host": "a;b"}, "remote_host"),
        ({"remote_host": "a" * 254}, "remote_host"),
        ({"remote_host": "a;tcp://b"}, "remote_host"),
        ({"remote_host": "host\n"}, "remote_host"),
        ({"remote_block_ids": [[-1]]}, "remote_block_ids"),
        ({"remote_block_ids": [[2**31]]}, "remote_block_ids"),
        ({"remote_block_ids": [[1.0]]}, "remote_block_ids"),
        ({"remote_block_ids": [1, 2]}, "remote_block_ids"),
        ({"remote_block_ids": [[]] * 257}, "remote_block_ids"),
        ({"remote_block_ids": None}, "remote_block_ids"),
        ({"remote_num_tokens": -1}, "remote_num_tokens"),
        ({"tp_size": 0}, "tp_size"),
        ({"transfer_mode": "teleport"}, "transfer_mode"),
        ({"remote_request_id": None}, "remote_request_id"),
        ({"pd_connector": None}, "pd_connector"),
        ({"pd_connector": {"nonce": "zz" * 16}}, "nonce"),
        ({"pd_connector": {"nonce": "ab" * 15}}, "nonce"),
        ({"pd_connector": {"nonce": None}}, "nonce"),
        ({"pd_connector": {"incarnation": "AB" * 16}}, "incarnation"),
        ({"pd_connector": {"lease_seconds": 0.0}}, "lease_seconds"),
        ({"pd_connector": {"lease_seconds": float("nan")}}, "lease_seconds"),
        ({"pd_connector": {"prompt_digest": "0" * 15}}, "prompt_digest"),
        ({"pd_connector": {"first_blocks": [0, -1]}}, "first_blocks"),
        ({"pd_connector": {"first_blocks": [0]}}, "2 groups, pd_connector.first_blocks 1"),
        ({"pd_connector": {"surprise": 1}}, "surprise"),
        ({"pd_connector": {"version": MIN_VERSION - 1}}, f"{MIN_VERSION - 1} there, {MIN_VERSION} to"),
        ({"pd_connector": {"version": 77}}, f"77 there, {MIN_VERSION} to {PROTOCOL_VERSION} here"),
    ],
    ids=str,
)
def test_a_field_that_is_not_as_declared_is_refused_by_name(change, named):
    with pytest.raises(ProtocolError, match=named):
        parse_remote_prefill(answer(**change))


@pytest.mark.parametrize("key", sorted(IN_TREE_ANSWER - {"do_remote_prefill"}))
def test_a_missing_field_is_refused_by_name(key):
    with pytest.raises(ProtocolError, match=key):
        parse_remote_prefill({k: v for k, v in answer().items() if k != key})


def test_the_answer_of_another_connector_is_refused_with_what_to_do():
    in_tree = {key: value for key, value in answer().items() if key in IN_TREE_ANSWER}
    with pytest.raises(ProtocolError, match="does not run PDConnector"):
        parse_remote_prefill(in_tree)


def test_a_prefill_instance_cannot_make_an_answer_that_would_be_refused():
    with pytest.raises(ProtocolError, match="remote_request_id"):
        make(remote_request_id="r" * 513)
    with pytest.raises(ProtocolError, match="surrogates not allowed"):
        make(remote_request_id="\ud800")


def test_what_routers_send_to_a_prefill_instance_is_understood():
    assert kind_of(ROUTER_TO_PREFILL) is Kind.REMOTE_DECODE
    assert parse_remote_decode(ROUTER_TO_PREFILL).do_remote_decode
    assert parse_remote_decode({"do_remote_decode": True, "transfer_id": "tx-1"}).do_remote_decode


@pytest.mark.parametrize("change", [{"remote_host": "h"}, {"remote_block_ids": [[1]]}, {"note": 1}], ids=str)
def test_values_that_a_prefill_instance_would_have_to_ignore_are_refused(change):
    with pytest.raises(ProtocolError, match=next(iter(change))):
        parse_remote_decode(ROUTER_TO_PREFILL | change)


@pytest.mark.parametrize(
    ("params", "kind"),
    [
        (None, Kind.NONE),
        ({}, Kind.NONE),
        ({"some_other_connector": 1}, Kind.NONE),
        ({"do_remote_prefill": False, "_remote_blocks_processed": True}, Kind.NONE),
        ({"do_remote_prefill": True, "do_remote_decode": None}, Kind.REMOTE_PREFILL),
        ({"do_remote_decode": True}, Kind.REMOTE_DECODE),
    ],
    ids=str,
)
def test_the_two_flags_decide_the_kind(params, kind):
    assert kind_of(params) is kind


@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_prefill": True, "do_remote_decode": True},
        {"do_remote_prefill": 1},
        {"do_remote_decode": "yes"},
        [],
        "x",
        3,
    ],
    ids=str,
)
def test_contradictory_or_odd_flags_are_refused(params):
    with pytest.raises(ProtocolError, match="kv_transfer_params"):
        kind_of(params)


def test_the_parsers_refuse_each_others_parameters():
    with pytest.raises(ProtocolError, match="do_remote_prefill is not true"):
        parse_remote_prefill(ROUTER_TO_PREFILL)
    with pytest.raises(ProtocolError, match="do_remote_decode is not true"):
        parse_remote_decode(answer())


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40) | st.binary(max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8) | st.integers(), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values | st.dictionaries(st.sampled_from(sorted(answer())) | st.text(max_size=8), values, max_size=6))
def test_arbitrary_parameters_are_parsed_or_refused(params):
    changed = answer(**{str(k): v for k, v in params.items()}) if isinstance(params, dict) else params
    for candidate in (params, changed):
        for parse in (kind_of, parse_remote_prefill, parse_remote_decode):
            try:
                parse(candidate)
            except ProtocolError as error:
                assert len(str(error)) < 5000


IN_LEASE = {"remote_block_ids", "remote_engine_id", "remote_num_tokens", "remote_request_id"}
IN_LEASE_OF_OURS = {"incarnation", "nonce", "prompt_digest", "first_blocks", "weights"}

SECRET = b"s" * 32


def test_signed_parameters_are_accepted_with_the_same_secret_after_a_way_through_json():
    params = json.loads(json.dumps(make(secret=SECRET, server_key="k" * 40)))
    require_signature(parse_remote_prefill(params), SECRET)
    # What other connectors and servers add is not signed, because it is not read.
    require_signature(parse_remote_prefill(params | {"remote_prefill_cached_tokens": 7}), SECRET)


def test_unsigned_parameters_are_refused_where_a_secret_is_set_and_only_there():
    with pytest.raises(ProtocolError, match=r"signature is missing.*params_secret"):
        require_signature(parse_remote_prefill(make()), SECRET)
    require_signature(parse_remote_prefill(make()), None)
    require_signature(parse_remote_prefill(make(secret=SECRET)), None)


CHANGED = {
    "remote_block_ids": [[3, 4, 6], [9]],
    "remote_engine_id": "p-1",
    "remote_request_id": "cmpl-2",
    "remote_host": "10.0.0.2",
    "remote_port": 5601,
    "tp_size": 1,
    "dcp_size": 2,
    "pp_size": 2,
    "remote_num_tokens": 32,
    "remote_blocks_expiry_time": 1.0,
    "transfer_mode": "push",
    "do_remote_decode": None,
    "pd_connector": None,
}
CHANGED_OF_OURS = {
    "incarnation": "cd" * 16,
    "nonce": "cd" * 16,
    "lease_seconds": 31.0,
    "prompt_digest": "f" * 16,
    "first_blocks": [0, 1],
    "server_key": "x" * 40,
    "weights": {"name": "version 2", "epoch": 1},
    "signature": "0" * 64,
}


@pytest.mark.parametrize("field", sorted(CHANGED.keys() - {"do_remote_decode", "pd_connector"}))
def test_no_field_of_signed_parameters_can_be_changed(field):
    params = parse_remote_prefill(make(secret=SECRET) | {field: CHANGED[field]})
    with pytest.raises(ProtocolError, match="changed on the way"):
        require_signature(params, SECRET)


@pytest.mark.parametrize("field", sorted(CHANGED_OF_OURS))
def test_no_field_of_ours_can_be_changed(field):
    made = make(secret=SECRET)
    params = made | {"pd_connector": made["pd_connector"] | {field: CHANGED_OF_OURS[field]}}
    with pytest.raises(ProtocolError, match="changed on the way"):
        require_signature(parse_remote_prefill(params), SECRET)


@pytest.mark.parametrize("field", sorted(CHANGED.keys() - {"do_remote_decode", "pd_connector"}))
def test_parameters_that_say_to_read_something_else_name_another_lease(field):
    changed = parse_remote_prefill(make() | {field: CHANGED[field]}).lease
    assert (changed != parse_remote_prefill(make()).lease) == (field in IN_LEASE)


@pytest.mark.parametrize("field", sorted(CHANGED_OF_OURS))
def test_a_change_of_ours_names_another_lease(field):
    made = make()
    changed = parse_remote_prefill(made | {"pd_connector": made["pd_connector"] | {field: CHANGED_OF_OURS[field]}})
    assert (changed.lease != parse_remote_prefill(made).lease) == (field in IN_LEASE_OF_OURS)


def test_every_field_is_among_those_that_cannot_be_changed():
    assert set(RemotePrefill.__struct_fields__) == CHANGED.keys() | {"do_remote_prefill"}
    assert set(Extension.__struct_fields__) == CHANGED_OF_OURS.keys() | {"version"}


def test_another_secret_does_not_do():
    with pytest.raises(ProtocolError, match="different secrets"):
        require_signature(parse_remote_prefill(make(secret=b"t" * 32)), SECRET)


CONCURRENT = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "p-0",
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_request_id": "x-1",
    "tp_size": 2,
    "pp_size": 1,
}
"""What a concurrent router sends to the decode instance (vLLM's push demo; `transfer_id` in its newer form)."""


@pytest.mark.parametrize("changes", [{}, {"transfer_id": "t-1"}, {"dcp_size": 1}, {"remote_block_ids": None}])
def test_a_concurrent_router_s_parameters_are_accepted(changes):
    parsed = p.parse_remote_push(CONCURRENT | changes)
    assert (parsed.remote_engine_id, parsed.remote_host, parsed.remote_port) == ("p-0", "10.0.0.1", 5600)
    assert not p.is_answer(CONCURRENT)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"remote_port": 0}, "remote_port"),
        ({"remote_host": "a;b"}, "remote_host"),
        ({"remote_engine_id": None}, "remote_engine_id"),
        ({"transfer_mode": "pull"}, "transfer_mode"),
        ({"surprise": 1}, "surprise"),
        ({"do_remote_prefill": False}, "do_remote_prefill"),
    ],
    ids=str,
)
def test_a_mistake_of_a_concurrent_router_is_named(change, named):
    with pytest.raises(ProtocolError, match=named):
        p.parse_remote_push(CONCURRENT | change)


@pytest.mark.parametrize(
    ("params", "request_id", "name"),
    [
        ({}, "cmpl-x-1-0-0123abcd", "cmpl-x-1-0"),
        ({}, "chatcmpl-7-ABCDEF01", "chatcmpl-7"),
        ({}, "no-suffix", "no-suffix"),
        ({}, "-0123abcd", "-0123abcd"),
        ({"transfer_id": "t-1"}, "cmpl-x-1-0-0123abcd", "t-1"),
        ({"transfer_id": "t-1"}, "cmpl-x-12-0123abcd", "t-1-12"),
        ({"transfer_id": "t-1"}, "3_cmpl-x-1-0123abcd", "3_t-1-1"),
        ({"transfer_id": "t-1"}, "chatcmpl-x-1-0123abcd", "t-1"),
        ({"transfer_id": "t-1"}, "x-1-0123abcd", "t-1"),
        ({"transfer_id": "t-1"}, "chatcmpl-x_1-0123abcd", "t-1"),  # a chat of a batch, or a client's own X-Request-Id
        ({"transfer_id": "t-1"}, "cmpl-1b4e28ba-2fa1-11d2-883f-100637221427-0123abcd", "t-1"),
    ],
)
def test_both_legs_of_a_request_have_one_name(params, request_id, name):
    assert p.pairing_name(params, request_id) == name


@pytest.mark.parametrize(
    ("request_id", "is_later"),
    [
        ("resp_b0c1_1-0123abcd", True),
        ("resp_my_own_12-ABCDEF01", True),
        ("resp_b0c1_0-0123abcd", False),  # the first
        ("resp_my_5_0-0123abcd", False),
        ("chatcmpl-resp_x_1-0123abcd", False),
        ("resp_1-0123abcd", False),
    ],
)
def test_the_later_rounds_of_a_response_are_known(request_id, is_later):
    assert p.later_round(request_id) is is_later


@pytest.mark.parametrize("transfer_id", [7, "", "t" * 513, ["t"]])
def test_a_transfer_id_that_is_none_is_refused(transfer_id):
    with pytest.raises(ProtocolError, match="transfer_id"):
        p.pairing_name({"transfer_id": transfer_id}, "r")

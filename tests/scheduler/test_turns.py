"""What a decode instance offers of a finished request, and what of it a prompt can read; without engines."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_pd_connector.compat.conversations import prefix_digests
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.bind import prefix_behind, window_start
from vllm_pd_connector.geometry.manifest import Group, GroupKind
from vllm_pd_connector.protocol.params.answer import encode_params, require_signature
from vllm_pd_connector.protocol.params.conversation import (
    MAX_PREFIXES,
    Conversation,
    ConversationExtension,
    parse_conversation,
    prefix_lengths,
)
from vllm_pd_connector.scheduler.conversations.lending import Lending

SECRET = b"s" * 32


def request_of(tokens: list[int], *, image_at: int | None = None, name: str = "cat", salt: str | None = None) -> Any:
    feature = SimpleNamespace(identifier=name, mm_position=SimpleNamespace(offset=image_at or 0), data=None)
    return SimpleNamespace(
        all_token_ids=tokens,
        mm_features=[] if image_at is None else [feature],
        lora_request=None,
        cache_salt=salt,
    )


def conversation(**changes: Any) -> Conversation:
    ours = {"prefixes": ((16, "0" * 16), (33, "1" * 16))} | changes.pop("pd_connector", {})
    usual: dict[str, Any] = {
        "do_remote_prefill": False,
        "do_remote_decode": True,
        "remote_block_ids": ((3, 4, 5),),
        "remote_engine_id": "d-0",
        "remote_request_id": "cmpl-1",
        "remote_host": "10.0.0.1",
        "remote_port": 5600,
        "tp_size": 1,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": 33,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        "pd_connector": ConversationExtension(
            version=2, incarnation="ab" * 16, nonce="0" * 32, lease_seconds=3.0, prompt_digest="1" * 16,
            first_blocks=(0,), **ours,
        ),
    }  # fmt: skip
    return Conversation(**usual | changes)


@pytest.mark.parametrize("least", [0, 1, 15, 16, 17, 5000])
@pytest.mark.parametrize("beyond", [0, 1, 40, 100_000, 1 << 20])
def test_prefixes_are_few_and_within_what_is_held(least: int, beyond: int) -> None:
    most = max(least, 1) + beyond
    lengths = prefix_lengths(least, most, also=least + beyond // 3)
    assert lengths == sorted(set(lengths)) and lengths[-1] == most and lengths[0] >= max(least, 1)
    assert len(lengths) <= MAX_PREFIXES
    assert least + beyond // 3 in lengths or not least + beyond // 3


@pytest.mark.parametrize("kind", [GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL])
@pytest.mark.parametrize("window", [1, 16, 24])
@pytest.mark.parametrize("first", [0, 1, 16, 48, 50])
def test_a_window_serves_what_looks_back_no_further_than_it_holds(kind: GroupKind, window: int, first: int) -> None:
    group = Group(kind, 16, 100, window)
    least = prefix_behind(kind, window, first)
    assert all((window_start(group, tokens) >= first) == (tokens >= least) for tokens in range(200))


def test_a_prefix_digest_covers_what_decides_its_numbers_and_nothing_behind_it() -> None:
    tokens = list(range(40))
    [short, long] = prefix_digests(request_of(tokens), [16, 40])
    assert prefix_digests(request_of([*tokens[:16], 9, 9]), [16]) == [short]
    assert prefix_digests(request_of([9, *tokens[1:]]), [16, 40]) != [short, long]
    assert prefix_digests(request_of(tokens), [15])[0] != short
    assert prefix_digests(request_of(tokens, image_at=20), [16, 40])[0] == short
    with_image = prefix_digests(request_of(tokens, image_at=20), [40])
    assert with_image != [long] and with_image != prefix_digests(request_of(tokens, image_at=20, name="dog"), [40])
    assert prefix_digests(request_of(tokens, salt="mine"), [16]) != [short]


def test_a_change_of_any_field_that_is_read_names_another_lease() -> None:
    was = conversation().lease
    others = [
        conversation(remote_block_ids=((3, 4, 6),)),
        conversation(pd_connector={"prefixes": ((16, "2" * 16), (33, "1" * 16))}),
        conversation(pd_connector={"prefixes": ((17, "0" * 16), (33, "1" * 16))}),
    ]
    assert len({was.nonce, *(other.lease.nonce for other in others)}) == 4
    assert conversation(remote_host="10.9.9.9").lease == was, "an address may be translated on the way"


def test_an_answer_is_signed_and_read_back() -> None:
    params = encode_params(conversation(), SECRET)
    require_signature(parse_conversation(params), SECRET)
    params["pd_connector"]["prefixes"][0][1] = "f" * 16
    with pytest.raises(ProtocolError, match="signature"):
        require_signature(parse_conversation(params), SECRET)


@pytest.mark.parametrize(
    "prefixes",
    [
        [],
        [[33, "1" * 16], [16, "0" * 16]],
        [[16, "0" * 16]],
        [[0, "0" * 16], [33, "1" * 16]],
        [[16, "x"], [33, "1" * 16]],
    ],
    ids=["none", "descending", "not all", "empty", "no digest"],
)
def test_prefixes_of_another_form_are_refused(prefixes: Any) -> None:
    params = encode_params(conversation(), None)
    params["pd_connector"]["prefixes"] = prefixes
    with pytest.raises(ProtocolError, match="prefixes"):
        parse_conversation(params)


@pytest.mark.parametrize("field", ["remote_engine_id", "remote_request_id", "incarnation", "signature"])
def test_what_cannot_be_encoded_is_no_text(field: str) -> None:
    """A lease's name and a signature are made over what parameters say, in the thread of vLLM's scheduler."""
    params = encode_params(conversation(), None)
    (params["pd_connector"] if field in ("incarnation", "signature") else params)[field] = "e\ud800"
    with pytest.raises(ProtocolError, match="kv_transfer_params: 'utf-8' codec can't encode"):
        parse_conversation(params)


def test_a_reason_with_another_number_in_it_is_no_other_reason(caplog):
    """Each change of the weights has its own; what is remembered of them has no end else."""
    lending = Lending.__new__(Lending)
    lending._said = set()
    caplog.set_level(logging.INFO, logger="vllm_pd_connector")
    for epoch in range(1000):
        lending.not_kept("d-1", f"computed with weights of epoch {epoch}")
    assert len(lending._said) == len(caplog.messages) == 1

"""Fields that neither vLLM 0.32 nor an answer of ours has: left out beside such an answer, refused everywhere else."""

from __future__ import annotations

import pytest

from tests.support.handed_over import handed_over
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.protocol.params.answer import require_signature
from vllm_pd_connector.protocol.params.parse import (
    parse_remote_bootstrap,
    parse_remote_decode,
    parse_remote_prefill,
    parse_remote_push,
)

SECRET = b"s" * 32


def test_a_field_that_a_later_vllm_adds_to_an_answer_is_left_out() -> None:
    answer = handed_over(SECRET)
    told = parse_remote_prefill(answer | {"num_cached_tokens": 7, "remote_block_id": [[1]]})
    assert told == parse_remote_prefill(answer)
    require_signature(told, SECRET)


@pytest.mark.parametrize("key", sorted(handed_over().keys() - {"do_remote_prefill", "pd_connector"}))
def test_a_misspelt_field_of_an_answer_is_missing(key: str) -> None:
    misspelt = {key + "s" if name == key else name: value for name, value in handed_over().items()}
    with pytest.raises(ProtocolError, match=f"missing required field `{key}`"):
        parse_remote_prefill(misspelt)


def test_without_a_complete_answer_it_is_refused() -> None:
    answer = handed_over()
    with pytest.raises(ProtocolError, match="missing required field `nonce`"):
        own = {key: value for key, value in answer["pd_connector"].items() if key != "nonce"}
        parse_remote_prefill(answer | {"hops": 1, "pd_connector": own})
    with pytest.raises(ProtocolError, match="Object contains unknown field `hops`"):
        parse_remote_prefill(answer | {"pd_connector": answer["pd_connector"] | {"hops": 1}})
    for parse, flag in (
        (parse_remote_decode, "do_remote_decode"),
        (parse_remote_push, "do_remote_prefill"),
        (parse_remote_bootstrap, "do_remote_prefill"),
    ):
        with pytest.raises(ProtocolError, match="unknown fields 'hops'"):
            parse({flag: True, "hops": 1})

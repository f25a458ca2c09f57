"""The scheduler halves with keys, with a secret, and without: who listens where, who is asked, what is believed."""

from __future__ import annotations

import shutil
from typing import Any

import pytest
from vllm.v1.core.block_pool import BlockPool

from tests.support.scheduler.halves import (
    abort,
    freed,
    hand_over,
    make_half,
    make_request,
    receive_of,
    serving_half,
    until,
)
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.metadata import BadParameters
from vllm_pd_connector.scheduler.half import SchedulerHalf
from vllm_pd_connector.sidechannel.net.keys import admits, create_keys, create_secret

LEARNED = ("remote_engine_id", "remote_host", "remote_port", "tp_size", "transfer_mode", "pp_size", "dcp_size")
"""What llm-d's sidecar remembers of an answer (`tests/contract/routers.json`)."""


def refusal(half: SchedulerHalf, pool: BlockPool, params: Any) -> str:
    """Why a request with these parameters fails; empty if it does not."""
    request = make_request("d-1", params)
    receive = receive_of(half, pool, request)
    return receive.source.reason if isinstance(receive.source, BadParameters) else ""


def test_a_producer_without_keys_does_not_listen_where_others_reach_it():
    with pytest.raises(InvalidConfig, match=r"side_channel_host 0\.0\.0\.0"):
        make_half("kv_producer", side_channel_host="0.0.0.0")
    make_half("kv_consumer", side_channel_host="0.0.0.0")
    make_half("kv_producer", side_channel_host="0.0.0.0", allow_unauthenticated_peers=True)


@pytest.mark.parametrize(
    ("host", "who"), [("127.0.0.1", "every process of this host"), ("10.0.0.7", "every host that reaches it")]
)
def test_the_log_says_whom_a_side_channel_without_keys_lets_in(host, who):
    assert admits(None, host) == f"for {who}: side_channel_keys is not set"


def test_a_consumer_without_keys_asks_nobody_on_another_host():
    producer, _ = serving_half("kv_producer")
    half, pool = make_half("kv_consumer")
    assert "10.9.8.7 is on another host" in refusal(half, pool, hand_over(producer) | {"remote_host": "10.9.8.7"})
    assert not half.consumer._renewer._commands


def test_a_secret_on_both_sides_lets_only_true_parameters_in(tmp_path):
    secret = tmp_path / "params.secret"
    create_secret(secret)
    producer, _ = serving_half("kv_producer", params_secret=str(secret))
    half, pool = make_half("kv_consumer", params_secret=str(secret))
    params = hand_over(producer)
    assert "signature" in refusal(half, pool, params | {"remote_block_ids": [[1, 2, 3]]})
    half.consumer.received("d-1")
    assert refusal(half, pool, params) == ""


@pytest.mark.parametrize("by", ["keys", "secret", ""])
def test_an_answer_says_that_routers_may_name_the_next_prefill_themselves_only_where_they_can(tmp_path, by):
    """llm-d's sidecar in push mode makes the next request's second leg of an answer with transfer_mode push, and has
    neither key nor signature to put into it."""
    create_secret(tmp_path / "secret")
    create_keys(tmp_path / "keys", "p")
    safe = {"keys": {"side_channel_keys": str(tmp_path / "keys")}, "secret": {"params_secret": f"{tmp_path}/secret"}}
    for mode in ("push", "auto"):
        producer, _ = serving_half("kv_producer", mode=mode, **safe.get(by, {}))
        answer = hand_over(producer)
        learned = {name: answer[name] for name in LEARNED}
        assert learned["transfer_mode"] == ("pull" if by else "push")
        half, pool = serving_half("kv_consumer", mode=mode, **safe.get(by, {}))
        named = {**learned, "do_remote_prefill": True, "do_remote_decode": False, "transfer_id": "t-1"}
        assert bool(refusal(half, pool, named)) is bool(by)


def test_keys_on_both_sides_keep_a_lease_alive_and_give_it_back(tmp_path):
    for name in ("p", "d"):
        create_keys(tmp_path / name, name)
    shutil.copy(tmp_path / "p" / "p.key", tmp_path / "d")
    shutil.copy(tmp_path / "d" / "d.key", tmp_path / "p")
    producer, _ = serving_half("kv_producer", side_channel_keys=str(tmp_path / "p"), kv_lease_duration=600.0)
    half, _ = make_half("kv_consumer", side_channel_keys=str(tmp_path / "d"))
    request = make_request("d-1", hand_over(producer))
    half.on_new_request(request)
    abort(half, request)
    until(lambda: freed(producer) == ["p-1"], "the lease to be released")

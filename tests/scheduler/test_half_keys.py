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
    ("host", "who"), [("127.0.0.1", "every process of this host"), ("0.0.0.0", "every host that reaches it")]
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


def test_keys_on_both_sides_keep_a_lease_alive_and_give_it_back(tmp_path):
    for name in ("p", "d"):
        create_keys(tmp_path / name, name)
    shutil.copy(tmp_path / "p" / "p.key", tmp_path / "d")
    shutil.copy(tmp_path / "d" / "d.key", tmp_path / "p")
    producer, _ = serving_half("kv_producer", side_channel_keys=str(tmp_path / "p"), kv_lease_duration=30.0)
    half, _ = make_half("kv_consumer", side_channel_keys=str(tmp_path / "d"))
    request = make_request("d-1", hand_over(producer))
    half.on_new_request(request)
    abort(half, request)
    until(lambda: freed(producer) == ["p-1"], "the lease to be released")

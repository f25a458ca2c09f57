"""What `PDConnector` refuses of vLLM's own configuration before either half is built."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from vllm_pd_connector.connector import PDConnector
from vllm_pd_connector.errors import InvalidConfig


def engine(**model: Any) -> Any:
    transfer = SimpleNamespace(kv_connector_extra_config={})
    return SimpleNamespace(
        kv_transfer_config=transfer,
        model_config=SimpleNamespace(**model),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1),
    )


def test_who_asks_whether_it_can_sleep_hears_no():
    assert not PDConnector.supports_sleep_mode(SimpleNamespace())


def test_an_engine_whose_caches_may_move_to_other_memory_is_refused():
    cache: Any = SimpleNamespace()
    for role in KVConnectorRole:
        with pytest.raises(InvalidConfig, match="enable_sleep_mode"):
            PDConnector(engine(enable_sleep_mode=True), role, cache)
    PDConnector(engine(enable_sleep_mode=False), KVConnectorRole.WORKER, cache).shutdown()

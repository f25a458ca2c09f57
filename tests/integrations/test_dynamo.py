"""The entry for Dynamo is taken by vLLM as `PDConnector`."""

from __future__ import annotations

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vllm_pd_connector.connector import PDConnector


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer", "kv_both"])
def test_a_worker_of_dynamo_runs_this_connector_under_the_name_that_dynamo_knows(role: str) -> None:
    config = KVTransferConfig(
        kv_connector="NixlConnector",
        kv_connector_module_path="vllm_pd_connector.integrations.dynamo",
        kv_role=role,
    )
    assert KVConnectorFactory.get_connector_class(config) is PDConnector

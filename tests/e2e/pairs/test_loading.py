"""vLLM finds the connector by the path of its module as well as by its registered name."""

from __future__ import annotations

import pytest

from examples.launch import vllm_spec
from examples.make_models import MODELS, make
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import ask, completion


@pytest.mark.e2e
@pytest.mark.matrix
def test_the_module_path_is_enough_without_the_plugin(pairs: Pairs) -> None:
    pairs.end()
    transfer = {
        "kv_connector": "PDConnector",
        "kv_connector_module_path": "vllm_pd_connector.connector",
        "kv_role": "kv_producer",
    }
    environment = {"VLLM_PLUGINS": "none-of-this-name"}
    spec = vllm_spec("by-module-path", make(MODELS["gqa"]), transfer=transfer, environment=environment)
    [server] = pairs.servers.start(spec)
    try:
        keep = {"do_remote_decode": True, "do_remote_prefill": False}
        answer = ask(server.url, completion("gqa", (1, 2, 3), max_tokens=1, kv_transfer_params=keep))
        assert answer.kv_transfer_params
    finally:
        pairs.servers.stop(server)

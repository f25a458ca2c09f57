"""Dynamo's vLLM worker: `PDConnector` under the name by which Dynamo knows a connector that is read from.

Dynamo chooses the form of `kv_transfer_params` by the connector's name, and refuses names that it does not know; a
class of that name may come from another module. So the worker's configuration names this one:

    {"kv_connector": "NixlConnector", "kv_connector_module_path": "vllm_pd_connector.integrations.dynamo", …}

Dynamo then also sets VLLM_NIXL_SIDE_CHANNEL_HOST, which is read here, too. Both sides need the same entry, since vLLM
treats the name by rules of its own connector (docs/engines/dynamo.md).

Source: Dynamo, `components/src/dynamo/vllm/kv_connector_protocols.py` and `args.py`; vLLM 0.32,
`kv_connector/factory.py` (`get_connector_class`).
"""

from vllm_pd_connector.connector import PDConnector as NixlConnector

__all__ = ["NixlConnector"]

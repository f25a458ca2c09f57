"""vLLM's connector registry."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def register_connector(name: str, module: str) -> None:
    """Register a lazily imported connector class of the same name, once per process.

    The factory raises ValueError for a name that it knows (vLLM 0.32, kv_connector/factory.py).
    """
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)

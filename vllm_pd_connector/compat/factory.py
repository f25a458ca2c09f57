"""What this package enters into vLLM: its connector in the registry, its log lines among vLLM's."""

from __future__ import annotations

import logging

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory


def register_connector(name: str, module: str) -> None:
    """Register a lazily imported connector class of the same name, once per process.

    The factory raises ValueError for a name that it knows (vLLM 0.32, kv_connector/factory.py).
    """
    if name not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(name, module, name)


def adopt_vllm_logging() -> None:
    """Give this package's logger the handlers of vLLM's, so that a user sees one log; calling it again changes nothing.

    vLLM configures only its own logger (`vllm.logger`), and does not when VLLM_CONFIGURE_LOGGING is 0.
    """
    import vllm.logger  # noqa: F401  # configures the logger `vllm`

    theirs = logging.getLogger("vllm")
    ours = logging.getLogger("vllm_pd_connector")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False

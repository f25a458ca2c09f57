"""Entry point of group `vllm.general_plugins`: makes the name `PDConnector` known to vLLM.

vLLM loads plugins in the API server, the engine core, every worker and the model-inspection process, and its factory
refuses a name twice, so registering must be cheap and re-entrant. The class is imported only when it is used.
"""

from __future__ import annotations

CONNECTOR_NAME = "PDConnector"
CONNECTOR_MODULE = "vllm_pd_connector.connector"


def register() -> None:
    """Register `PDConnector` with vLLM's factory; calling it again changes nothing."""
    from vllm_pd_connector.compat.factory import register_connector

    register_connector(CONNECTOR_NAME, CONNECTOR_MODULE)

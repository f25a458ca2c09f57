"""Entry point of group `vllm.general_plugins`: makes the name `PDConnector` known to vLLM.

vLLM loads plugins in the API server, the engine core, every worker and the model-inspection process, and its factory
refuses a name twice, so registering must be cheap and re-entrant. The class is imported only when it is used, and so
is what checks a configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pd_connector import CONNECTOR_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

CONNECTOR_MODULE = "vllm_pd_connector.connector"


def register() -> None:
    """Register `PDConnector` with vLLM's factory, and its configuration's checks; calling it again changes nothing."""
    from vllm_pd_connector.compat.early import check_early
    from vllm_pd_connector.compat.factory import register_connector

    register_connector(CONNECTOR_NAME, CONNECTOR_MODULE)
    check_early(_settings, _ports, _extras)


def _settings(document: Mapping[str, Any]) -> list[str]:
    from vllm_pd_connector.checks import early_problems

    return early_problems(document)


def _ports(document: Mapping[str, Any], engines: Iterable[int]) -> list[str]:
    from vllm_pd_connector.checks import early_port_problems

    return early_port_problems(document, engines)


def _extras(document: Mapping[str, Any]) -> list[Any]:
    from vllm_pd_connector.checks import extras_of

    return extras_of(document)

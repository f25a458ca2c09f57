"""Who an engine is, for proxies that ask in the way of the in-tree Mooncake connector."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.protocol.params.bootstrap import EngineRegistry, HostPort, encode_answer
from vllm_pd_connector.sidechannel.bootstrap_http import BootstrapServer, EngineRegistration, is_own_address

if TYPE_CHECKING:
    from vllm_pd_connector.config import Config

logger = init_logger(__name__)


def answer_proxies(
    config: Config, parallel: Any, rank: int, engine_id: str, first_engine: str | None, place: tuple[str, int]
) -> BootstrapServer | EngineRegistration | None:
    """Say who the engine whose side channel is at `place` is, if configured: proxies ask the first engine of a `vllm
    serve`, which tells them of all. `parallel` is vLLM's configuration, `rank` the engine's number for routers and
    `first_engine` where the first one is, None if it is this one."""
    port = config.bootstrap()
    if port is None:
        return None
    host = place[0]
    sizes = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    own = encode_answer(rank, engine_id, HostPort(*place), *sizes)
    if first_engine is not None:
        # On this host it listens where this engine does, at its side_channel_host; so does an engine of another
        # `vllm serve` on this host, which must not be taken for it.
        here = (_reachable(host),) if is_own_address(first_engine) else ()
        hosts = dict.fromkeys((*here, first_engine))
        return EngineRegistration([HostPort(each, port) for each in hosts], own)
    bootstrap = BootstrapServer(host, port, EngineRegistry(own), unauthenticated=config.allow_unauthenticated_peers)
    logger.info("bootstrap answers for engine %s on http://%s:%d/query", engine_id, host, port)
    return bootstrap


def _reachable(host: str) -> str:
    """Where this host finds what listens at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)

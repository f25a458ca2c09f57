"""Who an engine is, for proxies that ask as the in-tree Mooncake connector's do, and where one is that they name."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import InvalidStateError
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import transfer_params
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.metadata import BadParameters
from vllm_pd_connector.protocol.params.bootstrap import (
    EngineRegistry,
    HostPort,
    encode_answer,
    parse_bootstrap_address,
)
from vllm_pd_connector.protocol.params.parse import parse_remote_bootstrap
from vllm_pd_connector.scheduler.sources import named
from vllm_pd_connector.sidechannel.bootstrap_http import (
    BootstrapServer,
    EngineDirectory,
    EngineRegistration,
    is_own_address,
)
from vllm_pd_connector.sidechannel.net.sockets import endpoint

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from vllm_pd_connector.compat.types import Request
    from vllm_pd_connector.config import Config
    from vllm_pd_connector.protocol.params.parse import RemoteBootstrap
    from vllm_pd_connector.protocol.wire.push_messages import PrefillRef
    from vllm_pd_connector.scheduler.leases.lease_renewer import LeaseRenewer
    from vllm_pd_connector.scheduler.pending import Receive
    from vllm_pd_connector.scheduler.sources import Sources

logger = init_logger(__name__)

SLACK_S = 1.0
"""For a question's last attempt, and its thread's end."""


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


class Searches:
    """Where prefill instances are that requests name by a bootstrap address. `wake` tells that one may be known."""

    def __init__(self, timeout_s: float, sources: Sources, renewer: LeaseRenewer, wake: Callable[[], None]):
        self._timeout_s = timeout_s
        self._directory = EngineDirectory(timeout_s)
        self._sources = sources
        self._renewer = renewer
        self._wake = wake

    def find(self, remote: RemoteBootstrap) -> Future[HostPort]:
        """Ask there.

        Raises:
            ProtocolError: the address is none, or as `Sources.require_concurrent`.
        """
        bootstrap = parse_bootstrap_address(remote.remote_bootstrap_addr)
        self._sources.require_concurrent(bootstrap.host)
        found = self._directory.find(bootstrap, remote.remote_engine_id)
        found.add_done_callback(lambda _: self._wake())
        return found

    def answered(self, found: Future[HostPort], began: float) -> bool:
        """Whether it is known where an instance is, or that it is nowhere, which a request asked that `began` then. A
        name may be looked up for minutes, in a thread that nobody can end: who asked does not wait for it."""
        if not found.done() and time.monotonic() > began + self._timeout_s + SLACK_S:
            with contextlib.suppress(InvalidStateError):  # it was found in this moment
                found.set_exception(
                    ProtocolError(
                        f"bootstrap: no answer within {self._timeout_s:g} s: its name is looked up, or it is being "
                        "connected to; check the name server and that the prefill instance runs"
                    )
                )
        return found.done()

    def settled(self, request: Request, receive: Receive) -> bool:
        """Whether it is known where a request's prefill instance is, or that it is nowhere; then its source is set."""
        if (found := receive.found) is None:
            return True
        if not self.answered(found, receive.began):
            return False
        try:
            remote = parse_remote_bootstrap(transfer_params(request))
            receive.source = self._sources.concurrent(request, remote.remote_engine_id, found.result())
        except ProtocolError as error:
            logger.error("request %s: kv_transfer_params refused: %s", request.request_id, error)
            receive.source = BadParameters.of(error)
            self.decline(named(request), found, receive.began)
        receive.found = None  # not before: after a defect it is to be declined
        return True

    def address(self, found: Future[HostPort]) -> str | None:
        """Of a prefill instance that was looked up: None if it is not known yet, nowhere, or an unauthenticated peer,
        who is told nothing. Callable from any thread."""
        if not found.done() or found.exception() is not None:
            return None
        place = found.result()
        try:
            self._sources.require_concurrent(place.host)
        except ProtocolError:
            return None
        return endpoint(place.host, place.port)

    def decline(self, prefill: PrefillRef, found: Future[HostPort], began: float) -> None:
        """Tell the prefill side that nothing is needed by a request that `began` then, once it is known where it is."""

        def decline(found: Future[HostPort]) -> None:  # in the thread that found it
            if (address := self.address(found)) is not None:
                self._renewer.decline(address, prefill, began)

        found.add_done_callback(decline)

    def close(self) -> None:
        self._directory.close()

"""The other connectors in a MultiConnector, which keep what is computed and received here."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.base import KVConnectorBase_V1, init_logger
from vllm_pd_connector.compat.engine import caller

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm.v1.core.kv_cache_utils import KVCacheBlock

logger = init_logger(__name__)

_LMCACHE = "LMCacheMPConnector"
"""How the classes are named that vLLM brings and that the package `lmcache` puts in their place."""

_LOST = (
    "after a load of PDConnector that failed under kv_load_failure_policy recompute it may keep others' caches; "
    "set the policy to fail, or use a release of LMCache whose connector is like vLLM's own"
)

_FRESH = "PREFETCHING"
"""The state of a request that has no blocks yet."""


class Beside:
    """See the module. One per engine, in the scheduler's thread.

    vLLM's OffloadingConnector copies blocks that vLLM has given back. It has its workers end a copy before its block is
    written for another request. But it knows of what is computed and of what it loads itself, not of what another
    connector loads; it would be kept as the former request's, and found by its prompt.

    LMCache's connector of several processes notes which blocks a request has, once: it forgets them when the request is
    preempted, and not when its load is not used and it gets others. It would keep the former ones under its prompt, for
    every engine of that LMCache, or wait for ever for what it would load itself.

    Source: vLLM 0.32, `OffloadingConnectorScheduler` (update_state_after_alloc, build_connector_meta,
    _build_store_jobs), `OffloadingConnectorWorker.handle_preemptions`; its issue 46951. 0.33 sees to it itself.
    `LMCacheMPConnector` (update_state_after_alloc, _get_or_create_request_tracker).
    """

    def __init__(self) -> None:
        self._multi = caller("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector", "MultiConnector")
        self._stores: list[Any] = []
        self._trackers: list[dict[str, Any]] = []

    @property
    def any(self) -> bool:
        """Whether there are others. What they keep is no prefix cache's of vLLM: a block that must not be shared there
        (`keep_unshared`) they share."""
        return self._multi is not None and len(self._multi.sub_connectors) > 1

    @property
    def keeping(self) -> list[str]:
        """Those that keep what they hold when vLLM has all caches reset: they have no reset of their own, and what vLLM
        has in its place does nothing and is taken for good.

        Source: vLLM 0.32 and 0.33, `KVConnectorBase_V1.reset_cache`, `MultiConnector.reset_cache`.
        """
        kinds = {type(one) for one in self._multi.sub_connectors} if self._multi is not None else ()
        return sorted(kind.__name__ for kind in kinds if kind.reset_cache is KVConnectorBase_V1.reset_cache)

    def begin(self) -> None:
        """All connectors are made."""
        others = self._multi.sub_connectors if self._multi is not None else ()
        for one in others:
            if not type(one).__name__.startswith(_LMCACHE):
                continue
            if isinstance(trackers := getattr(one, "request_trackers", None), dict):
                self._trackers.append(trackers)
            else:  # another release of the package
                logger.warning("%s notes blocks of requests, and it is not known where: %s", type(one).__name__, _LOST)
        if (store := sys.modules.get("vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector")) is not None:
            beside = (one for one in others if isinstance(one, store.OffloadingConnector))
            self._stores = [one.connector_scheduler for one in beside]

    def end_before(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Before a load into these blocks that the step begins which vLLM is scheduling."""
        for store in self._stores:
            store._current_batch_allocated_block_ids.update(block.block_id for block in blocks)

    def forget_blocks(self, request_id: str) -> None:
        """What has come for a request is not used: vLLM takes its blocks, asks everybody about it again, and gives it
        others. What is asked about just now has no blocks that could be noted."""
        for trackers in self._trackers:
            tracker = trackers.get(request_id)
            if tracker is not None and getattr(getattr(tracker, "state", None), "name", "") != _FRESH:
                del trackers[request_id]

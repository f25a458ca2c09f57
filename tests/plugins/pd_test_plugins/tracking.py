"""A connector that notes which blocks each request has, as vLLM's LMCacheMPConnector does, under the rules of its
tracker: it adds the blocks that come behind those it knows, and forgets them when the request was preempted or ended.

Source: vLLM 0.32, `kv_connector/v1/lmcache_mp_connector.py`, whose own needs the package `lmcache` and its server.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

from vllm.v1.request import RequestStatus

from pd_test_plugins.keeping import KeepingConnector


class State(Enum):
    PREFETCHING = auto()
    READY = auto()


@dataclass
class Tracker:
    state: State = State.PREFETCHING
    allocated_block_ids: list[int] = field(default_factory=list)


class LMCacheMPConnectorTracking(KeepingConnector):
    """See the module. It stores and loads nothing."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.request_trackers: dict[str, Tracker] = {}

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        known = self.request_trackers.get(request.request_id)
        if known is not None and request.status == RequestStatus.PREEMPTED and known.state is not State.PREFETCHING:
            del self.request_trackers[request.request_id]
        self.request_trackers.setdefault(request.request_id, Tracker())
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        tracker = self.request_trackers[request.request_id]
        [ids] = blocks.get_block_ids()
        tracker.allocated_block_ids += ids[len(tracker.allocated_block_ids) :]
        tracker.state = State.READY

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        self.request_trackers.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)

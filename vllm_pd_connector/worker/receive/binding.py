"""Binding a receive whose peer is ready: what is to be read, or that it is for the prefill side to write."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import BindError
from vllm_pd_connector.geometry.bind import require_filled
from vllm_pd_connector.geometry.spans import Slices
from vllm_pd_connector.observability.stats import FailureKind
from vllm_pd_connector.protocol import receive as receives
from vllm_pd_connector.worker.receive.read_link import ReadLink

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_pd_connector.geometry.manifest import Group
    from vllm_pd_connector.worker.receive.active import ActiveReceive

logger = init_logger(__name__)


def bind_receive(active: ActiveReceive, groups: Sequence[Group]) -> tuple[receives.Event, FailureKind | None]:
    """Bind it, its `reads` among others; what its machine is to be told, and of what kind a failure is. `groups` are
    this worker's."""
    request, link = active.request, active.link
    active.plan = link.plan
    try:
        require_filled(groups, request.blocks, request.start)
        bound = link.bind(request) if isinstance(link, ReadLink) and not active.asks else None
    except BindError as error:
        return receives.PeerFailed(str(error)), FailureKind.BAD_PARAMETERS
    except Exception as error:  # a defect of ours that one request met must not reach the others
        logger.exception("request %s: binding failed", request.request_id)
        return receives.PeerFailed(f"{type(error).__name__}: {error}"), FailureKind.INTERNAL
    if bound is None:
        return receives.PushReady(), None
    active.reads, active.first_valid_tokens = bound.reads, bound.first_valid_tokens
    staged = frozenset(i for i, (_, work) in enumerate(active.reads) if not isinstance(work, Slices))
    return receives.PeerReady(len(active.reads), staged), None

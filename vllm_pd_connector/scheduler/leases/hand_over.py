"""What a finished request leaves to another instance: a prefill its caches for decode, a turn for the next prefill.

Whatever goes wrong here is said in the log and to who waits for it. The request itself has its tokens.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import finished_normally, transfer_params, was_aborted
from vllm_pd_connector.errors import OtherWeights, reason_of
from vllm_pd_connector.observability.stats import NotHeld
from vllm_pd_connector.protocol.params.conversation import names_conversation
from vllm_pd_connector.protocol.params.parse import Kind, kind_of, parse_remote_decode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from vllm_pd_connector.compat.types import Request
    from vllm_pd_connector.scheduler.producer import Producer

logger = init_logger(__name__)


class HandOver:
    """See the module. `group_ids`: the groups that are handed over; `not_held`: prefills that are not, until somebody
    counted them."""

    def __init__(self, producer: Producer, group_ids: Sequence[int]) -> None:
        self._producer = producer
        self._group_ids = group_ids
        self.not_held: Counter[NotHeld] = Counter()

    def of(self, request: Request, block_ids: Sequence[list[int]]) -> dict[str, Any] | None:
        """The parameters for whoever reads these blocks, None if they are not held. Raises nothing."""
        params = transfer_params(request)
        try:
            kind = kind_of(params)
        except Exception:  # said when it arrived
            return None
        try:
            blocks = [block_ids[group] for group in self._group_ids]
            if kind is Kind.REMOTE_PREFILL and finished_normally(request):
                return self._producer.lend(request, blocks)
            return self._prefilled(request, params, blocks) if kind is Kind.REMOTE_DECODE else None
        except Exception as error:  # the router gets no parameters and must not go on to a decode instance
            reason = reason_of(error, logger, request.request_id, "it cannot be handed over")
            logger.error("request %s: nothing of it is held: %s", request.request_id, reason)
            if kind is Kind.REMOTE_DECODE:
                self.not_held[NotHeld.WEIGHTS if isinstance(reason, OtherWeights) else NotHeld.REFUSED] += 1
            self._abandon(request, str(reason))
            return None

    def _prefilled(self, request: Request, params: object, blocks: Sequence[list[int]]) -> dict[str, Any] | None:
        if not finished_normally(request):
            reason, aborted = f"the prefill ended as {request.status.name}", was_aborted(request)
            if not aborted:
                logger.warning("request %s: nothing of it is held: %s", request.request_id, reason)
            self.not_held[NotHeld.ABORTED if aborted else NotHeld.ENDED] += 1
            self._abandon(request, reason)
            return None
        if not names_conversation(params):  # which was read, or refused, when it arrived
            parse_remote_decode(params)
        if (held := self._producer.hold(request, blocks)) is None:
            self.not_held[NotHeld.ROLE] += 1
        return held

    def _abandon(self, request: Request, reason: str) -> None:
        try:
            self._producer.abandon(request, reason)
        except Exception:
            logger.exception("request %s: who waits for it is not told", request.request_id)

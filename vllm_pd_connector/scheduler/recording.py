"""Which requests are recorded: those that come after an operator's order (`observability.record`)."""

from __future__ import annotations

import secrets
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.config import own_directory
from vllm_pd_connector.metadata import BadParameters, RecordInto
from vllm_pd_connector.observability.record import Unreadable, file_of, take_order

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vllm_pd_connector.metadata import ReceiveRequest

logger = init_logger(__name__)


class Recording:
    """Asked of all requests that are to be received, in the scheduler's thread.

    Args:
        directory: `trace_dir`, made if it is not there; None: nothing is ever recorded.

    Raises:
        InvalidConfig: others may write there, or it cannot be made.
    """

    def __init__(self, directory: str | None) -> None:
        self._directory = own_directory("trace_dir", directory, make=True) if directory is not None else None
        self._left, self._failures = 0, False

    def marked(self, receives: Sequence[ReceiveRequest]) -> list[ReceiveRequest]:
        """The same orders, of which those that are recorded say where. One whose parameters were refused has nothing to
        be recorded. Raises nothing."""
        return [
            one if isinstance(one.source, BadParameters) else replace(one, record=self._of(one.request_id))
            for one in receives
        ]

    def _of(self, request_id: str) -> RecordInto | None:
        """Where the next request's records go; None if it is not recorded."""
        if self._directory is None:
            return None
        self._take(self._directory)  # also while one is carried out: the latest order holds
        if not self._left:
            return None
        self._left -= 1
        return RecordInto(str(file_of(self._directory, request_id, secrets.token_hex(4))), self._failures)

    def _take(self, directory: Path) -> None:
        try:
            order = take_order(directory)
        except Unreadable as error:
            logger.error("trace_dir: %s", error)
            return
        except OSError as error:
            logger.error("trace_dir: %s: nothing is recorded until this engine starts again", error)
            self._directory, self._left = None, 0
            return
        if order is not None:
            self._left, self._failures = order.requests, order.failures
            what = "if they fail" if order.failures else "whatever becomes of them"
            logger.info("the next %d requests are recorded in %s, %s", order.requests, directory, what)

"""Prefills that go on with a conversation of which a decode instance holds the beginning.

Such a prefill is a receive as a decode request is one, with three differences. What is read ends where the prompt and
the conversation part, and the rest is computed. The decode instance is asked first whether it still holds what the
parameters name, or what that is, where they have a name alone; until it answers the request waits, without blocks. And
nothing fails: whatever stands against reading is said in the log and counted, and the prompt is computed, also where
vLLM's policy is to fail what could not be loaded.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import transfer_params, was_refused
from vllm_pd_connector.errors import ProtocolError, reason_of
from vllm_pd_connector.metadata import ReadFrom
from vllm_pd_connector.protocol.wire.messages import FoundConversation, Renewed
from vllm_pd_connector.scheduler.leases.lease_renewer import ASK_TIMEOUT_S, LeaseRenewer
from vllm_pd_connector.scheduler.pending import Receive, reading_of
from vllm_pd_connector.sidechannel.net.sockets import endpoint

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.compat.types import Request
    from vllm_pd_connector.protocol.params.conversation import Conversation
    from vllm_pd_connector.protocol.weights import OwnWeights
    from vllm_pd_connector.scheduler.sources import Sources

logger = init_logger(__name__)

WAIT_S = 3 * ASK_TIMEOUT_S
"""For each of two questions, which ends by itself before; the turn may have queued for longer."""


class Turns:
    """See the module. `counted`: by the names of `observability.stats`; `wake` is called, from any thread, when there
    is an answer to look at."""

    def __init__(self, sources: Sources, renewer: LeaseRenewer, own: OwnWeights, wake: Callable[[], None]):
        self._own_weights = own
        self._sources = sources
        self._renewer = renewer
        self._wake = wake
        self.counted: Counter[str] = Counter()

    def begin(self, request: Request) -> Receive | None:
        """A turn arrived: ask for its conversation. None if nothing of it can be read."""
        receive = Receive(None, turn=request)
        try:
            if (named := self._sources.named_conversation(request)) is None:
                self._ask(receive, self._sources.conversation(transfer_params(request)))
            elif not was_refused(request):
                where = endpoint(named.remote_host, named.remote_port, named.server_key)
                self._renewer.find(where, named.remote_request_id, self._heard(receive))
        except Exception as error:
            self._compute(request, str(reason_of(error, logger, request.request_id, "its conversation")))
            return None
        return None if was_refused(request) else receive

    def _ask(self, receive: Receive, remote: Conversation) -> None:
        """Ask whether what a conversation's parameters name is held.

        Raises:
            ProtocolError: the turn can read nothing of it; it is given back.
        """
        assert receive.turn is not None
        receive.address, reading = reading_of(remote, receive.turn)
        if was_refused(receive.turn):  # by vLLM's API server, or it could not be finished
            self._renewer.drop(receive.address, reading, release=True)
            return
        try:
            receive.num_tokens = self._sources.common_prefix(receive.turn, remote)
        except ProtocolError:
            self._renewer.drop(receive.address, reading, release=True)
            raise
        receive.reading, receive.weights = reading, remote.pd_connector.weights
        receive.asked_at = time.monotonic()
        receive.source = ReadFrom(remote.peer, remote.remote_engine_id, remote.lease, remote.tables)
        self._renewer.ask(receive.address, reading, remote.pd_connector.lease_seconds, self._heard(receive))

    def _heard(self, receive: Receive) -> Callable[[object], None]:
        def heard(answer: object) -> None:
            receive.answers.append(answer)
            self._wake()

        return heard

    def may_read(self, receive: Receive) -> bool | None:
        """Whether a turn can read what it came for; None while that is not known. Said no once, it is forgotten."""
        assert receive.turn is not None
        if receive.asked:
            return self._same_weights(receive, receive.turn)
        if not receive.answers and time.monotonic() < receive.asked_at + WAIT_S:
            return None
        try:
            match receive.answers.pop() if receive.answers else "it was not asked in time":
                case FoundConversation(params) if params:
                    self._ask(receive, self._sources.conversation(_decoded(params)))
                    return None
                case FoundConversation():
                    raise ProtocolError("nothing of this name is kept")
                case Renewed(gone) if not gone:
                    receive.asked = True
                    return self._same_weights(receive, receive.turn)
                case Renewed():
                    raise ProtocolError("it is not held any more")
                case outcome:
                    raise ProtocolError(str(outcome))
        except Exception as error:
            self._compute(receive.turn, str(reason_of(error, logger, receive.turn.request_id, "its conversation")))
            return False

    def _same_weights(self, receive: Receive, request: Request) -> bool:
        """Whether the weights of now are those that the turn was computed with, as far as anybody has said."""
        if why := receive.stale or self._own_weights.unlike(receive.weights or self._own_weights.now):
            self._compute(request, why)
        return not why

    def lost(self, receive: Receive, why: str) -> None:
        """A turn could not be received, as the workers have said, or not be handed on: it is computed."""
        receive.outdated = True
        if receive.turn is not None:
            self._compute(receive.turn, why)

    def _compute(self, request: Request, why: str) -> None:
        self.counted["turns_computed"] += 1
        logger.info("request %s: nothing of its conversation is read, all is computed: %s", request.request_id, why)


def _decoded(params: bytes) -> object:
    try:
        return msgspec.json.decode(params)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"its parameters are not JSON: {error}") from error

"""What is left to do for a receive that ends: make it visible, zero what nobody wrote, give its lease back, count it,
end its span, say what failed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, TypeAlias

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.staging.blanks import blanks
from vllm_pd_connector.observability.stats import FailureKind, Phase
from vllm_pd_connector.protocol.lease import WITHDRAWN, End
from vllm_pd_connector.protocol.push.registrations import GIVEN_UP, NOT_HELD, OTHER_PROMPT, OTHER_READERS, TWICE
from vllm_pd_connector.protocol.receive import ReceiveState
from vllm_pd_connector.protocol.weights import OTHER_WEIGHTS
from vllm_pd_connector.protocol.wire.fields import Reading
from vllm_pd_connector.protocol.wire.messages import Release
from vllm_pd_connector.protocol.wire.push_messages import DeclinePush
from vllm_pd_connector.worker.receive.read_link import ReadLink

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from vllm_pd_connector.metadata import ReceiveRequest
    from vllm_pd_connector.observability.stats import PDStats
    from vllm_pd_connector.worker.receive.active import ActiveReceive
    from vllm_pd_connector.worker.rpc import PendingCalls
    from vllm_pd_connector.worker.staging.base import Copier

logger = init_logger(__name__)

Received: TypeAlias = "Callable[[ReceiveRequest, str, Mapping[int, int]], None]"

RELEASE_TIMEOUT_S = 5.0

_OF_WRITING = (FailureKind.PEER_UNREACHABLE, FailureKind.TRANSFER_FAILED, FailureKind.DEADLINE)
_OF_PUSHES = {
    GIVEN_UP: FailureKind.ABORTED,
    NOT_HELD: FailureKind.LEASE_LOST,
    **{end.value: FailureKind.LEASE_LOST for end in End},
    TWICE: FailureKind.BAD_PARAMETERS,
    OTHER_PROMPT: FailureKind.BAD_PARAMETERS,
    OTHER_READERS: FailureKind.BAD_PARAMETERS,
}
"""What a push counts as whose reason has these words: that the prefill side does not write says not that it cannot."""
_SPANS = (Phase.QUEUE, Phase.TRANSFER, Phase.CONFIRM)


def kind_of(reason: str, usual: FailureKind) -> FailureKind:
    """What a failure counts as for which the prefill side gives this reason: `usual`, unless its words, which are those
    of this release, say that an operator changed something or what is the matter with the request."""
    if reason.startswith(OTHER_WEIGHTS):
        return FailureKind.WEIGHTS
    if reason.endswith(WITHDRAWN):
        return FailureKind.WITHDRAWN
    return next((kind for words, kind in _OF_PUSHES.items() if words in reason), usual)


def log_failure(active: ActiveReceive, reason: str, account: str, quarantined: bool) -> None:
    """Say what failed and why; `account` is how far its staged transfers were."""
    request = active.request
    log = logger.info if active.kind is FailureKind.ABORTED else logger.error
    log(
        "request %s: receive of tokens [%d, %d) of prefill request %s%s failed: %s%s%s",
        request.request_id,
        request.start,
        request.stop,
        active.prefill,
        "" if str(active.link.machine.key) in reason else f" at {active.link.endpoint}",
        reason,
        f" ({account})" if account else "",
        "; its blocks stay in quarantine until no transfer can write into them" if quarantined else "",
    )


def settle(active: ActiveReceive, copier: Copier) -> str:
    """Make what was received visible to what is launched from now on, and zero what nobody wrote of its blocks; returns
    why that failed, empty if it did not."""
    assert active.plan is not None
    request = active.request
    try:
        copier.arrived()
        copier.blank(blanks(active.plan, request.blocks, request.start, request.stop, active.first_valid_tokens))
    except Exception as error:  # what is left there may be anything
        logger.exception("request %s: finishing what was received", request.request_id)
        return f"{type(error).__name__}: {error}"
    return ""


def read_from_now_on(active: ActiveReceive, stats: PDStats) -> None:
    """In mode auto, when what the prefill side was asked to write has failed: it may not reach what the self-test did
    not need, as the side channel here. It is read from until its link is another one. That there was no room for the
    question says nothing of that."""
    link, of_writing = active.link, active.written and active.kind in _OF_WRITING and not active.busy
    if isinstance(link, ReadLink) and of_writing and link.bandwidth is not None:
        link.bandwidth = None
        stats.gauge("push chosen", 0)
        logger.warning("prefill engine %s is read from now on: what it was asked to write failed", link.engine_id)


def give_back(active: ActiveReceive, calls: PendingCalls) -> None:
    """Tell the prefill side that this lease needs no keeping; nobody waits for the answer."""
    if active.lease is None and active.question:
        return  # whom we asked to write has failed the push itself, or learns it by the withdrawal
    lease, request, began = active.lease, active.request, active.began  # all that is kept while it is not heard

    def message() -> Release | DeclinePush:
        if lease is not None:
            return Release((Reading(lease.request_id, lease.nonce, request.attempt, request.shared),))
        assert request.push is not None
        return DeclinePush(request.push.prefill, request.waited_s + max(time.monotonic() - began, 0.0))

    try:
        calls.give_back(active.link.endpoint, message, RELEASE_TIMEOUT_S)
    except ProtocolError as error:
        logger.debug("giving back prefill %s: %s", active.prefill, error)


def count_good(active: ActiveReceive, stats: PDStats, now: float) -> None:
    """A receive has ended well."""
    moved, peer = active.taken.moved, active.link.engine_id
    stats.observe_phase(Phase.TOTAL, now - active.began)
    stats.count("receives")
    stats.count("bytes", moved.bytes)
    stats.count("runs", moved.runs)
    stats.count("descriptors", moved.descriptors)
    stats.count("verified", int(active.verified))
    stats.observe_size("bytes", moved.bytes)
    stats.observe_size("descriptors", moved.descriptors)
    stats.of_peer("peer_bytes", peer, moved.bytes)
    stats.of_peer("peer_receives", peer)


def count_failed(active: ActiveReceive, stats: PDStats) -> None:
    """A receive has failed."""
    stats.fail(active.kind)
    stats.of_peer("peer_failures", active.link.engine_id)


def trace(active: ActiveReceive, received: Received | None) -> None:
    """Call what is called before a good receive is reported, if anything is."""
    try:
        if received is not None:
            received(active.request, active.prefill, active.first_valid_tokens)
    except Exception:  # a full disk, say: a request must be reported in any case
        logger.exception("request %s: the trace of its receive", active.request.request_id)


def end_span(active: ActiveReceive, now: float, error: str) -> None:
    """It is reported: its phases are spans below it, and so is the handshake if it waited for one."""
    if (span := active.span) is None:
        return
    for phase, began, ended in active.phases:
        if phase in _SPANS:
            span.child(f"pd.{phase}", began - active.request.waited_s if phase is Phase.QUEUE else began, ended)
    if (handshake := active.link.handshake) is not None and handshake[1] >= active.began:
        span.child(f"pd.{Phase.HANDSHAKE}", *handshake)
    span.end(now, error, prefill=active.prefill, peer=active.link.engine_id, bytes=active.taken.moved.bytes)


def in_vain(active: ActiveReceive, wait_s: float) -> str:
    """Why a receive that waited for its peer waits no longer."""
    last = f": {active.link.machine.reason}" if active.link.machine.reason else ""
    return f"the prefill instance gave no usable answer within {wait_s:g} s{last}"


def missing(active: ActiveReceive) -> str:
    """What a receive waits for, for whoever reads that it took too long."""
    if active.busy:
        return f"it had to be asked again: {active.busy}"
    match active.machine.state:
        case ReceiveState.READING:
            return f"{len(active.machine.writing)} transfers have not ended, and no part of one has since"
        case ReceiveState.PUSHING:
            return "it did not answer"
        case ReceiveState.VERIFYING:
            return "the prefill side's sums did not come, or were not compared with ours"
        case ReceiveState.CONFIRMING:
            return "the prefill side did not say whether it held the blocks"
    return ""

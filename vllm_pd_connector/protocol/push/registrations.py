"""One prefill for a decode instance and one registration for it; `table` says what becomes of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.geometry.blocks import agree
from vllm_pd_connector.protocol.weights import unlike
from vllm_pd_connector.protocol.wire.fields import MAX_TEXT, LeaseRef
from vllm_pd_connector.protocol.wire.messages import Failure, FailureCode
from vllm_pd_connector.protocol.wire.push_messages import (
    BeginCommand,
    Command,
    Moved,
    Pushed,
    PushInto,
    PushState,
    WriteCommand,
)

if TYPE_CHECKING:
    from vllm_pd_connector.geometry.blocks import BlockTable
    from vllm_pd_connector.protocol.push.command_queue import Ticket
    from vllm_pd_connector.protocol.wire.fields import Weights

GIVEN_UP = "withdrawn by the decode side"
NOT_HELD = "is not held here"
TWICE = "is registered already: two decode requests name this prefill"
OTHER_PROMPT = "is not the decode request's ("
OTHER_READERS = "contradicts the other readers of this prefill"
"""Parts of reasons that say something of the request, and nothing of whether this side can write."""
REMEMBER_REFUSED = 4096
MAX_WAITING = 4096
MAX_WAITING_BYTES = 256 * 1024 * 1024
"""Of the block tables of all registrations; a request of a million tokens has some 256 KiB."""
ALIKE = (
    "the same LoRA adapter, if any: equal files on both sides, or one id for it in adapter_ids. A chat template that "
    "writes the date needs one time zone (TZ) on all instances, gpt-oss one VLLM_SYSTEM_START_DATE. Media "
    "need one --mm-hasher-algorithm, and vLLM's caches for them or prefixes on both sides or on neither"
)
"""What both legs of a request need besides, to have one prompt."""
DRAFTS_ALIKE = (
    ". A drafter of several modules, or with windows, has a prefill leave it tokens: draft equally many tokens by it "
    "on both sides, or send decode's leg with the prefill's answer"
)
"""And to have one length of what is prefilled, where both are sent at once."""


@dataclass(eq=False, slots=True)
class PushRegistration:
    """A decode worker's registration of its blocks.

    For a decode side that compares, `source` is that of the latest command; `mixed` says that parts were written from
    blocks that the prefill does not have any more.
    """

    into: PushInto
    began: float = -inf  # when the decode request arrived there, by this side's clock
    deadline: float = inf  # while no prefill is known
    state: PushState = PushState.EXPECTED
    reason: str = ""
    tickets: dict[Ticket, float] = field(default_factory=dict)  # who waits for an answer, and until when
    ordered: set[int] = field(default_factory=set)  # workers that may write
    last: tuple[int, bool] = (0, False)  # `ready` and `final` of the latest command
    first_valid_tokens: dict[int, int] = field(default_factory=dict)
    moved: Moved = Moved()
    arrived: dict[int, int] = field(default_factory=dict)  # by worker, how far its writes are
    prefill: Prefill | None = None
    source: tuple[BlockTable, ...] = ()
    mixed: bool = False

    def write_from(self, source: tuple[BlockTable, ...]) -> None:
        """The next command is from these blocks. A table grows; a window lets go of what lies before it, and at the end
        a drafter of what it had asked for beyond the prompt. Another id for a block that both have is a preemption's.
        It only matters to a decode side that compares."""
        if not self.into.compare_s:
            return
        for old, now in zip(self.source, source, strict=False):
            self.mixed |= not agree(old, now)
        self.source = source

    def answer(self) -> Pushed:
        """How far it is, for who asks while it has not ended. There a deadline for writing runs from the end of the
        prefill, not from its first chunk."""
        computing = self.state is PushState.WRITING and not self.last[1]
        state = PushState.COMPUTING if computing else self.state
        return Pushed(state, self.reason, False, moved=Moved(descriptors=sum(self.arrived.values())))

    def compared_with(self) -> LeaseRef | None:
        """The lease of the blocks that the decode side compares with what they brought; None if it does not, or if it
        cannot."""
        prefill = self.prefill
        if self.state is not PushState.DONE or prefill is None or self.mixed or not self.into.compare_s:
            return None
        return prefill.lease

    def last_answer(self) -> Pushed:
        """What the decode side is told when no worker writes for it any more."""
        request_id = self.prefill.request_id if self.prefill is not None else ""
        found = self.first_valid_tokens, self.moved
        return Pushed(self.state, self.reason, True, *found, request_id, self.compared_with())


@dataclass(eq=False, slots=True)
class Prefill:
    """A request that this instance computes for a decode instance.

    `source`, `ready`, `step` and `whole` are of the latest offer, `earlier` of the one before: what steps before the
    running one have completed can be written at once.
    """

    request_id: str
    name: str
    num_tokens: int
    prompt_digest: str
    began: float  # when it was accepted
    nonce: bytes | None = None  # of the lease, once finished
    source: tuple[BlockTable, ...] = ()
    ready: int = 0
    step: int = 0
    whole: bool = False
    earlier: tuple[tuple[BlockTable, ...], int, int] | None = None
    finished: bool = False
    declined: bool = False
    failure: str = ""
    failed_at: float = inf
    follows_at: float = -inf  # when the one before it under its name ended
    registrations: dict[bytes, PushRegistration] = field(default_factory=dict)
    readings: set[bytes] = field(default_factory=set)  # of all that have registered: `PushInto.reading`
    served: set[int] = field(default_factory=set)  # readers that have all their bytes
    closed: bool = False  # its scheduler half wants the blocks back

    @property
    def lease(self) -> LeaseRef | None:
        """What its blocks are held under, once it has finished."""
        return LeaseRef(self.request_id, self.nonce) if self.nonce else None

    def attach(self, registration: PushRegistration) -> None:
        """It is wanted by one more."""
        into = registration.into
        self.registrations[into.attempt] = registration
        if any(into.reading):  # none: an older release, of which all would be alike
            self.readings.add(into.reading)

    @property
    def needed(self) -> bool:
        """Whether somebody waits for more of it, or may still ask."""
        return not self.failure and (bool(self.registrations) or not self.declined)

    @property
    def given_up(self) -> bool:
        """Whether it runs for nobody."""
        return bool(self.failure) and not self.finished

    def take_back(self) -> bool:
        """What it was said to have computed must not be read any more, because its blocks go; no, if somebody was told
        to read it and does not know that it has failed."""
        if self.finished or (self.registrations and not self.failure):
            return False
        self.source, self.ready, self.whole, self.earlier = (), 0, False, None
        return True

    def offers(self, source: tuple[BlockTable, ...], ready: int, step: int, whole: bool = False) -> None:
        """Tokens below `ready` are in these blocks when the forward of `step` is done; `whole` as in `WriteCommand`."""
        self.earlier = (self.source, self.ready, self.step) if self.ready else None
        self.source, self.ready, self.step, self.whole = source, ready, step, whole


class Registrations(dict[bytes, PushRegistration]):
    """Registrations by their attempts. What their block tables take is counted as they come and go: to sum it for each
    would cost the more the more there are.

    What was `refused` stays so: the decode side has given its blocks to others when a copy of the message comes late.
    It is remembered apart from other answers, which must not be forgotten where many are refused. Who finds no room is
    not refused: the decode side keeps its blocks, and asks again.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: Bounded[bytes, Pushed] = Bounded(REMEMBER_REFUSED)
        self._size = 0

    def __setitem__(self, attempt: bytes, registration: PushRegistration) -> None:
        assert attempt not in self
        super().__setitem__(attempt, registration)
        self._size += _size(registration.into)

    def __delitem__(self, attempt: bytes) -> None:
        self._size -= _size(self[attempt].into)
        super().__delitem__(attempt)

    def refusal(self, into: PushInto, weights: Weights) -> Pushed | Failure | None:
        """The answer to a registration that is not taken, with these weights here; None if it is taken."""
        if reason := unlike(weights, into.weights):
            answer = self.refused[into.attempt] = failed(reason)
            return answer
        size = self._size + _size(into)
        if len(self) >= MAX_WAITING:
            reason = f"{len(self)} pushes are under way, the limit here"
        elif size > MAX_WAITING_BYTES:
            reason = (
                f"with this one block tables of pushes under way take {size} bytes, {MAX_WAITING_BYTES} is the limit"
            )
        return Failure(FailureCode.BUSY, reason) if reason else None


def orders_of(registration: PushRegistration, prefill: Prefill) -> list[Command]:
    """What the workers are to write for it, of what has been computed since the latest order. What a step before the
    running one has completed comes apart, if it is not ordered yet: it can be written at once."""
    into, earlier = registration.into, prefill.earlier
    orders: list[Command] = [] if registration.last[0] else [BeginCommand(into)]
    if earlier is not None and earlier[1] > registration.last[0] and not prefill.finished:
        orders.append(WriteCommand(into.attempt, *earlier, False))
        registration.write_from(earlier[0])
    now = prefill.source, prefill.ready, prefill.step, prefill.finished, prefill.whole
    registration.write_from(prefill.source)
    return [*orders, WriteCommand(into.attempt, *now)]


def _size(into: PushInto) -> int:
    return sum(len(table.packed) for table in into.blocks)


def contradiction(registration: PushRegistration, prefill: Prefill) -> str:
    """Why a prefill, with the other registrations that it has, cannot be written for this one; empty if it can."""
    into = registration.into
    others = [w.into for w in prefill.registrations.values() if w is not registration]
    if into.stop != prefill.num_tokens or into.prompt_digest != prefill.prompt_digest:
        return (
            f"the prefilled prompt ({prefill.num_tokens} tokens, digest {prefill.prompt_digest}) {OTHER_PROMPT}"
            f"{into.stop} tokens, digest {into.prompt_digest}): send both legs with the same prompt and "
            f"{ALIKE}{DRAFTS_ALIKE if into.stop != prefill.num_tokens else ''}"
        )
    if into.reader >= into.readers or any(into.readers != other.readers for other in others):
        return f"reader {into.reader} of {into.readers} {OTHER_READERS}"
    if into.reader in prefill.served or any(into.reader == other.reader for other in others):
        return f"reader {into.reader} {TWICE}"
    return ""


def failed(reason: str) -> Pushed:
    """The answer for a push that is over before it began."""
    return Pushed(PushState.FAILED, reason[:MAX_TEXT], True)


def standstill(prefill: Prefill, stepped: float, step_s: float, now: float) -> str:
    """Why a prefill does not go on: its engine began its latest step at `stepped`, too long ago; empty if it does."""
    if prefill.finished or prefill.failure or now - max(stepped, prefill.began) <= step_s:
        return ""
    return (
        f"the prefill instance has begun no engine step for {step_s:g} s: one of its workers hangs, "
        "a step takes longer than its step_timeout, or it has too few blocks for its prefills"
    )

"""One rank's part of a push on the prefill side, from its first command to the report that nothing writes any more.

    LINKING --linked--> WRITING --the end is bound--> ENDING --every transfer done--> DONE
       ^                   |
       +--- linked anew ---+   only while nothing is being written

    LINKING, WRITING, ENDING -- a transfer failed, lost, cancelled, deadline --> DRAINING --none may write--> FAILED

A command names a step of the engine; what it lets go is bound when that step is done and the decode instance is linked.
Commands whose steps ended together are one, the latest; a long one may be bound piece by piece, a piece for each time
that its step is said to be done. Of a step that is being computed, waves of layers may be bound before it is done,
except of the last command's: that one tells of the end of the prefill. The decode instance keeps the
blocks that are written into until a report is `terminal`: at most one is, and only when no transfer may write any more.
A failure is reported at once besides, while one may; then the blocks that are written from are not kept any longer.

No clock, thread or socket in here. See docs/design/push.md.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from vllm_pd_connector.protocol.transfers import TransferDone, TransferFailed

if TYPE_CHECKING:
    from vllm_pd_connector.protocol.wire.push_messages import WriteCommand


_ALL = 1 << 31
"""Waves of a step that is done."""


class PushPhase(Enum):
    LINKING = "waiting for the decode instance"
    WRITING = "writing what steps complete"
    ENDING = "writing the rest"
    DONE = "done"
    DRAINING = "failed, transfers may still write"
    FAILED = "failed"


# Events; TransferDone and TransferFailed besides


@dataclass(frozen=True, slots=True)
class Commanded:
    """The scheduler half lets more of the prefill go; commands come in the order of their steps."""

    command: WriteCommand


@dataclass(frozen=True, slots=True)
class Linked:
    """The decode instance is connected; answers the wish at the beginning, and `WantLink`."""


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The connection was cut: what goes over it fails. Whoever waits for one still does."""

    reason: str


@dataclass(frozen=True, slots=True)
class LinkStalled:
    """The decode instance is well and is linked anew, because what was begun stands still."""

    reason: str


@dataclass(frozen=True, slots=True)
class StepsDone:
    """The forwards of all steps up to this one are done."""

    step: int


@dataclass(frozen=True, slots=True)
class WavesDone:
    """Of this step so many waves of layers are done, the first ones; all steps before it are."""

    step: int
    waves: int


@dataclass(frozen=True, slots=True)
class Bound:
    """Answers `Bind` and `BindWaves`: it takes so many transfers, numbered on from those before; none if nothing of it
    can go yet. `more`: of a `Bind`, that it is not all and the rest is to be asked for again."""

    transfers: int
    more: bool = False


@dataclass(frozen=True, slots=True)
class GivenUp:
    """The push cannot go on: it was cancelled, the decode instance is refused, or a command does not bind."""

    reason: str


@dataclass(frozen=True, slots=True)
class Stopped:
    """Answers `Stop`: these transfers were not begun yet, or ended by it."""

    over: frozenset[int]


@dataclass(frozen=True, slots=True)
class PushTick:
    """Time has passed; see `next_deadline`. `moved`: bytes of this push have moved since the deadline was set;
    `missing`: what has not ended, in words."""

    moved: bool = False
    missing: str = ""


Event = (
    Commanded
    | Linked
    | LinkLost
    | LinkStalled
    | StepsDone
    | WavesDone
    | Bound
    | GivenUp
    | Stopped
    | TransferDone
    | TransferFailed
    | PushTick
)

# Actions


@dataclass(frozen=True, slots=True)
class Bind:
    """Find what a command lets go; answer with Bound or GivenUp before any other event."""

    command: WriteCommand


@dataclass(frozen=True, slots=True)
class BindWaves:
    """Find what a command lets go in the waves [first, stop) of layers; answer as to `Bind`."""

    command: WriteCommand
    first: int
    stop: int


@dataclass(frozen=True, slots=True)
class StartWrites:
    """Start the transfers that were bound; one that cannot be started is a TransferFailed."""


@dataclass(frozen=True, slots=True)
class WantLink:
    """The decode instance is wanted again; bring back Linked or GivenUp."""


@dataclass(frozen=True, slots=True)
class Stop:
    """The push has failed: want its link no longer and begin nothing more. Answer with Stopped before any other
    event."""

    reason: str


@dataclass(frozen=True, slots=True)
class Report:
    """Tell the scheduler half. `terminal`: nothing is written any more, and nothing else follows."""

    ok: bool
    reason: str
    terminal: bool


Action = Bind | BindWaves | StartWrites | WantLink | Stop | Report


class Push:
    """The machine of one rank's part of a push; its decode instance is wanted from the beginning. Events after the end
    are late messages and have no effect.

    Args:
        limit_s: seconds for which nothing may move from the command that ends the prefill on.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s
        self._phase = PushPhase.LINKING
        self._commands: deque[WriteCommand] = deque()
        self._answers: tuple[type[Event], ...] = ()  # one of these must come next
        self._waves = 0  # of the next command's step, that were bound
        self._binding: WriteCommand | None = None
        self._bound = 0
        self._writing: set[int] = set()
        self._reason = ""
        self._deadline: float | None = None

    @property
    def phase(self) -> PushPhase:
        return self._phase

    @property
    def failed(self) -> bool:
        return self._phase in (PushPhase.DRAINING, PushPhase.FAILED)

    @property
    def over(self) -> bool:
        """Whether the last report is out."""
        return self._phase in (PushPhase.DONE, PushPhase.FAILED)

    @property
    def writing(self) -> frozenset[int]:
        """Indices of the transfers that may still write."""
        return frozenset(self._writing)

    @property
    def next_step(self) -> int | None:
        """The step whose end lets this push go on, None if nothing does."""
        return self._commands[0].step if self._commands and self._phase is PushPhase.WRITING else None

    @property
    def waves(self) -> int:
        """How many waves of layers of `next_step` were bound."""
        return self._waves

    def goes_on(self, step: int, ahead: int, waves: int) -> bool:
        """Whether `StepsDone` of that step changes something, or `WavesDone` of the step `ahead`."""
        waiting = self.next_step
        return waiting is not None and (waiting <= step or (waiting == ahead and waves > self._waves))

    def next_deadline(self) -> float | None:
        """When a `PushTick` is due, None if none is."""
        return self._deadline

    def handle(self, event: Event, now: float) -> list[Action]:
        """What to do about an event; the actions are executed in order, before the next event."""
        assert not self._answers or isinstance(event, self._answers), f"{event}, where {self._answers} must come"
        self._answers = ()
        match event:
            case Commanded(command):
                return self._command(command, now)
            case StepsDone(step):
                return self._go_on(step)
            case WavesDone(step, waves):
                return self._go_ahead(step, waves)
            case Bound(transfers, more):
                return self._begin(transfers, more)
            case TransferDone(index):
                return self._ended(index, None, terminal=True)
            case TransferFailed(index, reason, terminal):
                return self._ended(index, reason, terminal)
            case Linked():
                if self._phase is PushPhase.LINKING:
                    self._phase = PushPhase.WRITING
                return []
            case LinkStalled(reason):
                return self._link_anew(reason)
            case LinkLost(reason):
                return self._fail(reason) if self._phase is not PushPhase.LINKING else []
            case GivenUp(reason):
                return self._fail(reason)
            case Stopped(over):
                self._writing -= over
                return self._settle() or [Report(False, self._reason, terminal=False)]
            case PushTick(moved, missing):
                return self._tick(moved, missing, now)

    def _command(self, command: WriteCommand, now: float) -> list[Action]:
        if not self.failed:
            self._commands.append(command)
            if command.final:
                self._deadline = now + self._limit_s
        return []

    def _tick(self, moved: bool, missing: str, now: float) -> list[Action]:
        if self._deadline is None or now < self._deadline:
            return []
        if moved:
            self._deadline = now + self._limit_s
            return []
        return self._fail(f"writing took longer than {self._limit_s:g} s" + (missing and f": {missing}"))

    def _go_on(self, step: int) -> list[Action]:
        command = None
        while (waiting := self.next_step) is not None and waiting <= step:
            command = self._commands.popleft()
        if command is None:
            return []
        self._waves = 0
        self._binding = command
        self._answers = (Bound, GivenUp)
        return [Bind(command)]

    def _go_ahead(self, step: int, waves: int) -> list[Action]:
        if step != self.next_step or waves <= self._waves:
            return []
        first, self._waves = self._waves, waves
        if self._commands[0].final:
            return []  # known to be there, so that nobody asks again before the step's end
        self._binding = None
        self._answers = (Bound, GivenUp)
        return [BindWaves(self._commands[0], first, waves)]

    def _begin(self, transfers: int, more: bool) -> list[Action]:
        self._writing |= set(range(self._bound, self._bound + transfers))
        self._bound += transfers
        if self._binding is not None and more:
            self._commands.appendleft(self._binding)
            self._waves = _ALL
        elif self._binding is not None and self._binding.final:
            self._phase = PushPhase.ENDING
        return [StartWrites()] if transfers else self._settle()

    def _ended(self, index: int, failure: str | None, terminal: bool) -> list[Action]:
        if index not in self._writing:
            return []
        if terminal:
            self._writing.discard(index)
        if failure is not None and not self.failed:
            return self._fail(failure)
        return self._settle()

    def _link_anew(self, reason: str) -> list[Action]:
        if self._writing:
            return self._fail(reason)
        if self._phase is not PushPhase.WRITING:
            return []
        self._phase = PushPhase.LINKING
        return [WantLink()]

    def _fail(self, reason: str) -> list[Action]:
        if self.failed or self.over:
            return []
        self._phase, self._reason, self._deadline = PushPhase.DRAINING, reason or "failed", None
        self._commands.clear()
        self._answers = (Stopped,)
        return [Stop(self._reason)]

    def _settle(self) -> list[Action]:
        """The last report, if it is time for it."""
        if self._writing or self._phase not in (PushPhase.ENDING, PushPhase.DRAINING):
            return []
        ok = self._phase is PushPhase.ENDING
        self._phase, self._deadline = PushPhase.DONE if ok else PushPhase.FAILED, None
        return [Report(ok, self._reason, terminal=True)]

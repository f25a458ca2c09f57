"""Questions to a prefill side that writes: what ends a quarantine and what does not, and how often one is asked."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.worker.decode_instance import set_faults
from tests.support.worker.writer import freed, hold_writes
from vllm_pd_connector.errors import Busy, DeadlineExceeded, ProtocolError
from vllm_pd_connector.geometry.manifest import Group, GroupKind
from vllm_pd_connector.protocol.receive import PushDone, PushFailed
from vllm_pd_connector.protocol.wire.messages import Failure, FailureCode
from vllm_pd_connector.protocol.wire.push_messages import Pushed, PushInto, PushState, WithdrawPush
from vllm_pd_connector.worker.peers.earliest import Earliest
from vllm_pd_connector.worker.receive.confirm import Confirmer
from vllm_pd_connector.worker.receive.push_request import RETRY_S, SELDOM_S, PushRequester


@pytest.mark.parametrize(
    "outcome",
    [ProtocolError("a frame over the limit"), Failure(FailureCode.MALFORMED, "damaged on its way")],
    ids=["cannot be sent", "is not understood"],
)
def test_a_question_in_vain_says_nothing_of_what_was_asked_before(writer, target, monkeypatch, outcome):
    monkeypatch.setattr("vllm_pd_connector.protocol.push.table.ANSWER_S", 0.02)  # how far it is, is asked that often
    hold_writes(writer, target)
    calls = target.loop._calls
    ask = calls.ask

    def in_vain(address: str, request: Any, timeout_s: float, handler: Any = None) -> None:
        if not isinstance(request, PushInto):
            ask(address, request, timeout_s, handler)
        elif isinstance(outcome, ProtocolError):
            raise outcome
        else:
            target.loop._comparison._results.append(lambda now: handler(outcome, now))
            target.loop._wake.set()

    monkeypatch.setattr(calls, "ask", in_vain)
    assert target.wait_for("d") == [False]
    assert target.quarantined == {"d"} and not target.drained, "blocks are free that are being written"
    set_faults(writer.transports, held=False)
    target.until(lambda: target.drained == {"d"}, "the quarantine to end")
    freed(writer, "a")


@pytest.mark.parametrize(
    ("outcome", "pause"),
    [(DeadlineExceeded("no reply within 7.5 s"), 0.0), (ProtocolError("no message of ours"), RETRY_S)],
    ids=["silence", "nonsense"],
)
def test_whoever_answers_nonsense_at_once_is_not_asked_at_once_again(outcome, pause):
    links = SimpleNamespace(drive=lambda *_: None)
    active: Any = SimpleNamespace(links=links, link=None, retry_at=None, withdrawn_at=100.0, watches=())
    calls: Any = SimpleNamespace()
    rank: Any = (0, 0, 0, 1)
    due = Earliest()
    push_requester = PushRequester(calls, rank, 1.0, 1.0, lambda *_: None, (), due, calls)
    confirmer = Confirmer(calls, 1.0, 0, 1, lambda *_: None, due)
    for handler in (push_requester._asked, push_requester._withdrawn, confirmer._answered):
        handler(active, outcome, 100.0)
        assert active.retry_at == due.at == 100.0 + pause
        active.retry_at = None


@pytest.mark.parametrize(("group", "fits"), [(1, True), (0, False), (2, False), (3, False)])
def test_a_late_start_in_a_group_that_cannot_have_one_fails_the_request(group, fits):
    """It would end the report of the receive half way, and vLLM would wait for that for ever."""
    groups = Group(GroupKind.FULL, 16, 8), Group(GroupKind.SLIDING_WINDOW, 16, 8, 32), Group(GroupKind.STATE, 0, 8)
    events = []
    calls: Any = SimpleNamespace()
    push_requester = PushRequester(
        calls, (0, 0, 0, 1), 1.0, 1.0, lambda active, event, *_: events.append(event), groups, Earliest(), calls
    )
    active: Any = SimpleNamespace(request=SimpleNamespace(stop=100))
    push_requester._asked(active, Pushed(PushState.DONE, "", True, {group: 40}), 0.0)
    [event] = events
    if fits:
        assert event == PushDone(comparable=False)
    else:
        assert isinstance(event, PushFailed) and event.terminal
        assert f"late_starts names group {group}, groups with a window are [1] here" in event.reason


@pytest.mark.parametrize(("late", "fits"), [(69, True), (70, False)])
def test_a_window_of_which_too_little_was_written_fails_the_request(late, fits):
    """Position 100 looks at those from 69 on; what comes before a late start is zeroed."""
    groups = (Group(GroupKind.SLIDING_WINDOW, 16, 8, 32),)
    events = []
    calls: Any = SimpleNamespace()
    push_requester = PushRequester(
        calls, (0, 0, 0, 1), 1.0, 1.0, lambda active, event, *_: events.append(event), groups, Earliest(), calls
    )
    active: Any = SimpleNamespace(request=SimpleNamespace(stop=100))
    push_requester._asked(active, Pushed(PushState.DONE, "", True, {0: late}), 0.0)
    [event] = events
    assert isinstance(event, PushDone if fits else PushFailed)
    assert fits or (event.terminal and "from token 70 on, but position 100 looks at those from 69 on" in event.reason)


class Active(SimpleNamespace):
    __hash__ = object.__hash__


@pytest.mark.parametrize(
    "outcome",
    [
        Failure(FailureCode.FOREIGN_ENGINE, "another engine listens here"),
        Pushed(PushState.FAILED, "it still writes", False),
        DeadlineExceeded("no reply within 7.5 s"),
        Busy("1024 requests are under way"),
    ],
    ids=["another tenant", "it writes", "silence", "cannot be sent"],
)
def test_who_does_not_say_that_a_push_has_ended_is_asked_more_and_more_seldom(outcome):
    """Whoever could may be gone for ever."""
    now, asked, heard = 1000.0, [], []

    def ask(_address: str, request: Any, _timeout_s: float, handler: Any) -> None:
        nonlocal now
        assert isinstance(request, WithdrawPush)
        asked.append(now)
        if isinstance(outcome, Busy):
            raise outcome
        now += 7.5 * isinstance(outcome, DeadlineExceeded)
        heard.append(handler)

    due = Earliest()
    calls: Any = SimpleNamespace(ask=ask)
    push_requester = PushRequester(calls, (0, 0, 0, 0, 1), 7.5, 1.0, lambda *_: None, (), due, calls)
    links = SimpleNamespace(drive=lambda *_: None)
    request = SimpleNamespace(push=SimpleNamespace(prefill="p"))
    link = SimpleNamespace(endpoint="there")
    active: Any = Active(request=request, attempt=b"a" * 16, life="l" * 32, question=1, links=links, link=link)
    active.retry_at, active.withdrawn_at = None, 0.0
    active.watches = (SimpleNamespace(here=True), SimpleNamespace(here=False))

    def withdraw() -> None:
        push_requester.withdraw(active, now)
        while heard:
            heard.pop()(outcome, now)

    while now < 1000.0 + 3600.0:
        withdraw()
        assert active.retry_at is not None
        now = max(now, active.retry_at)
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses[0] <= max(RETRY_S, 7.5) and pauses == sorted(pauses)
    assert pauses[-1] == SELDOM_S and len(asked) < 3600 / SELDOM_S + 10
    active.watches[1].here = True
    began = len(asked)
    for _ in range(5):
        withdraw()
        now = max(now, active.retry_at)
    pauses = [later - earlier for earlier, later in pairwise(asked[began:])]
    assert max(pauses) <= max(RETRY_S, 7.5), "all workers there are seen to live: their push drains"

"""Questions for which there is no room yet, here or on the prefill side: their receives wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.worker.decode_instance import Decode, in_its_thread, set_faults, until
from tests.support.worker.writer import freed, hold_writes, pushed
from vllm_pd_connector.errors import Busy, ProtocolError
from vllm_pd_connector.protocol.peer import Suspected
from vllm_pd_connector.protocol.push import registrations
from vllm_pd_connector.protocol.wire.messages import GetManifests, ReadDone
from vllm_pd_connector.protocol.wire.push_messages import PushInto, WithdrawPush
from vllm_pd_connector.sidechannel import client
from vllm_pd_connector.worker.receive import confirm, ending, push_request

FULL = "1024 requests are under way there, the limit is 1024"
BUSY = Busy(FULL)


@pytest.fixture(autouse=True)
def soon_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (confirm, push_request):
        monkeypatch.setattr(module, "RETRY_S", 0.01)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[Decode, type, Collection[int]], list[object]]:
    """Let these of a worker's questions of one kind find no room, or meet another error, the first being number 1;
    `heard`: that is what comes of them later. Returns the questions."""

    def make(
        decode: Decode, kind: type, numbers: Collection[int], error: Exception = BUSY, heard: bool = False
    ) -> list[object]:
        ask, asked = decode.loop._calls.ask, []

        def refuse(address: str, request: Any, timeout_s: float, handler: Any = None) -> None:
            if isinstance(request, kind):
                asked.append(request)
                if len(asked) in numbers and heard:
                    handler(error, time.monotonic())
                    return
                if len(asked) in numbers:
                    raise error
            ask(address, request, timeout_s, handler)

        monkeypatch.setattr(decode.loop._calls, "ask", refuse)
        return asked

    return make


@pytest.mark.parametrize("heard", [False, True], ids=["raised", "heard later"])
def test_a_push_that_cannot_be_asked_for_yet_is_asked_for_again(writer, target, full, heard):
    asked = full(target, PushInto, {1, 2}, heard=heard)
    assert pushed(writer, target) and len(asked) == 3
    assert not target.failures and not target.quarantined
    assert writer.server.counts()["GetManifests"] == 1, "nothing says that the peer is gone"


def test_the_end_of_a_push_is_asked_for_again_where_that_cannot_be_sent_for_now(writer, target, full):
    asked = full(target, WithdrawPush, {1, 2}, heard=True)
    hold_writes(writer, target)
    target.loop.submit([], ["d"])
    target.until(lambda: len(asked) > 2, "more questions")
    set_faults(writer.transports, held=False)
    target.until(lambda: target.drained == target.quarantined == {"d"}, "the end of the quarantine")
    assert writer.server.counts()["GetManifests"] == 1, "nothing says that the peer is gone"


@pytest.mark.parametrize("heard", [False, True], ids=["raised", "heard later"])
def test_a_peer_that_cannot_be_asked_whether_it_is_there_loses_nothing_that_is_read_from_it(
    prefill, decode, full, heard
):
    """As where no file is left here for a while."""
    decode.transport.faults.held = True
    decode.loop.submit([prefill.request("a")], [])
    until(lambda: decode.reads("a"), "the read")
    asked, links = full(decode, GetManifests, range(1, 7), heard=heard), decode.loop._receives._links
    for link in links._links.values():
        object.__setattr__(link.machine._backoff, "base_s", 0.01)
        in_its_thread(decode.loop, partial(links.drive, link, Suspected("it was silent")))
    decode.until(lambda: len(asked) > 6, "questions in vain")
    decode.transport.faults.held = False
    assert decode.wait_for("a") == [True]


def test_how_far_a_push_is_can_be_asked_later(writer, target, full, monkeypatch):
    monkeypatch.setattr("vllm_pd_connector.protocol.push.table.ANSWER_S", 0.02)
    asked = full(target, PushInto, {2, 3})
    hold_writes(writer, target)
    target.until(lambda: len(asked) > 4, "more questions")
    set_faults(writer.transports, held=False)
    assert target.wait_for("d") == [True]


def test_a_push_for_which_there_was_no_room_gives_its_prefill_back_and_blames_no_peer(
    writer, target, monkeypatch, caplog
):
    """That nothing of it is needed can be said all the same; and its peer's other receives go on."""
    limits = target.loop._receives._limits
    object.__setattr__(limits, "silent_s", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(client, "MAX_PENDING", 0)
        assert not pushed(writer, target)
        assert target.failures == {"deadline": 1}
        full = "0 requests are under way there, the limit is 0"
        assert f"took longer than 0.2 s: it had to be asked again: {full}" in caplog.text
        freed(writer, "a")
    assert "WithdrawPush" not in writer.server.counts()
    target.until(lambda: target.drained == target.quarantined, "nothing to be in quarantine")
    object.__setattr__(limits, "silent_s", 30.0)
    assert pushed(writer, target, "later", "b")
    assert writer.server.counts()["GetManifests"] == 1, "nothing says that the peer is gone"


def test_a_push_that_can_never_be_asked_for_gives_its_prefill_back(writer, target, full, caplog):
    full(target, PushInto, range(1 << 20), ProtocolError("PushInto has 2097152 bytes"))
    assert not pushed(writer, target)
    assert target.failures == {"internal": 1} and "failed: PushInto has 2097152 bytes" in caplog.text
    freed(writer, "a")
    assert "WithdrawPush" not in writer.server.counts()
    target.until(lambda: target.drained == target.quarantined, "nothing to be in quarantine")


def test_a_question_that_left_before_a_defect_may_be_obeyed_and_is_withdrawn(writer, target, monkeypatch):
    """Blocks would be free that are being written."""
    set_faults(writer.transports, held=True)
    writer.whole()
    ask, met = target.loop._calls.ask, []

    def broken(address: str, request: Any, timeout_s: float, handler: Any = None) -> None:
        ask(address, request, timeout_s, handler)
        if isinstance(request, PushInto) and not met:
            met.append(request)
            raise RuntimeError("a defect")

    monkeypatch.setattr(target.loop._calls, "ask", broken)
    assert not target.received(target.request(writer))[0]
    assert target.quarantined == {"d"}
    set_faults(writer.transports, held=False)
    target.until(lambda: target.drained == {"d"}, "the prefill side's word")
    assert writer.server.counts()["WithdrawPush"]


def test_a_push_for_which_the_prefill_side_has_no_room_yet_waits(writer, target, monkeypatch):
    """Each rank of each decode instance asks, so a thousand good requests may be too many for a while."""
    with monkeypatch.context() as patch:
        patch.setattr(registrations, "MAX_WAITING", 0)
        writer.whole()
        target.loop.submit([target.request(writer)], [])
        target.until(lambda: writer.server.counts().get("PushInto", 0) > 2, "questions in vain")
        target.collect()
        assert not target.finished
    assert target.wait_for("d") == [True]


@pytest.mark.parametrize("heard", [False, True], ids=["raised", "heard later"])
def test_a_read_that_cannot_be_confirmed_yet_is_confirmed_later(prefill, decode, full, heard):
    asked = full(decode, ReadDone, {1, 2}, heard=heard)
    assert decode.received(prefill.request("a")) == [True] and len(asked) == 3
    assert prefill.server.counts()["GetManifests"] == 1, "nothing says that the peer is gone"


@pytest.mark.parametrize("lease", [SimpleNamespace(request_id="p-1", nonce=b""), None], ids=["a lease", "a push"])
def test_what_is_given_back_later_keeps_nothing_else_of_its_receive(lease: Any) -> None:
    """A thousand may wait for half a minute, each with plan, block tables and transfers."""
    later: list[Any] = []
    calls = SimpleNamespace(give_back=lambda endpoint, make, timeout_s: later.append(make))
    active: Any = SimpleNamespace(
        lease=lease, question=None, request=object(), began=1.0, link=SimpleNamespace(endpoint="")
    )
    ending.give_back(active, calls)  # type: ignore[arg-type]
    kept = [cell.cell_contents for cell in later[0].__closure__]
    assert len(kept) == 3 and not any(thing is active for thing in kept)

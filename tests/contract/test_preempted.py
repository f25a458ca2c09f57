"""Prefills that vLLM preempts while a decode instance is written from them, through vLLM's own scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.request import RequestStatus

from tests.support.scheduler.engines import BLOCK, FULL, STATES, given_back, transfer, until
from tests.support.scheduler.push_halves import ASK, PushPeer
from vllm_pd_connector.compat.blocks import prompt_digest
from vllm_pd_connector.protocol.wire.push_messages import Pushed, PushState
from vllm_pd_connector.scheduler.prefill_progress import STUCK_S, PrefillProgress

PUSH = transfer("kv_producer", mode="push")
OTHER = list(range(BLOCK - 1))


@pytest.fixture
def asked() -> Iterator[Callable[..., tuple[Any, Callable[[], Pushed]]]]:
    """Adds a prefill of so many blocks that a decode instance waits for; the request, and what that is answered."""
    peers: list[PushPeer] = []

    def ask(prefill: Any, blocks: int, *, hidden: bool = False) -> tuple[Any, Callable[[], Pushed]]:
        prompt = list(range(100, 100 + blocks * BLOCK))
        request = prefill.add("p", prompt, ASK, max_tokens=1, priority=5)
        # As with `prompt_logprobs`: vLLM looks nothing up for it.
        request.skip_reading_prefix_cache = request.sampling_params.skip_reading_prefix_cache = hidden
        peers.append(peer := PushPeer(prefill.connector.scheduler))
        digest, stop = prompt_digest(request, request.num_prompt_tokens), request.num_prompt_tokens
        first = peer.register(digest, stop)  # it is known from now on

        def answer() -> Pushed:
            if (answered := first()).state in (PushState.DONE, PushState.FAILED):
                return answered
            return peer.register(digest, stop)()  # type: ignore[no-any-return]

        return request, answer

    yield ask
    for peer in peers:
        peer.close()


def preempted(request: Any, prefill: Any) -> bool:
    for _ in range(20):
        prefill.step()
        if request.num_preemptions:
            return True
    return False


def goes_on(prefill: Any, *names: str) -> None:
    """These requests end, some time."""

    def ended() -> bool:
        prefill.step()
        return not prefill.scheduler.requests.keys() & set(names)

    until(ended, f"the end of {names}")


@pytest.mark.parametrize(
    ("groups", "pool", "answer_tokens", "blocks", "hidden"),
    [
        ((FULL,), 6, 2 * BLOCK, 4, False),
        ((FULL,), 8, BLOCK, 6, True),
        ((FULL, STATES), 11, BLOCK, 6, True),
    ],
    ids=["another", "itself, of which nothing is looked up", "itself, beside states"],
)
def test_a_preempted_prefill_that_is_written_from_is_in_nobodys_way(
    engine: Any, asked: Any, groups: Any, pool: int, answer_tokens: int, blocks: int, hidden: bool
) -> None:
    """What is held of it leaves no room for who is to go on before it, or for itself."""
    prefill = engine(PUSH, step_tokens=BLOCK + 1, scheduling="priority", blocks=pool, groups=groups)
    prefill.add("other", OTHER, max_tokens=answer_tokens, priority=-1)
    prefill.step()
    request, answer = asked(prefill, blocks, hidden=hidden)
    assert preempted(request, prefill)
    assert prefill.connector.scheduler.producer.progress.blocks.num_held_for("p") > 1
    goes_on(prefill, "other", "p")
    assert answer().state is PushState.FAILED and "in the way of all that could go on" in answer().reason
    given_back(prefill)


def test_a_preempted_prefill_of_which_vllm_finds_what_is_held_goes_on_for_who_asked(engine: Any, asked: Any) -> None:
    prefill = engine(PUSH, step_tokens=BLOCK + 1, scheduling="priority", blocks=8)
    prefill.add("other", OTHER, max_tokens=BLOCK, priority=-1)
    prefill.step()
    request, answer = asked(prefill, 6)
    assert preempted(request, prefill)
    prefill.run("other", "p")
    assert answer().state is not PushState.FAILED and prefill.held() == 6


def test_what_will_free_blocks_is_waited_for(engine: Any, asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = engine(PUSH, step_tokens=BLOCK + 1, scheduling="priority", blocks=8)
    other = prefill.add("other", OTHER, max_tokens=BLOCK, priority=-1)
    prefill.step()
    request, _ = asked(prefill, 6, hidden=True)
    assert preempted(request, prefill)
    half, scheduler = prefill.connector.scheduler, prefill.scheduler
    assert other.status is RequestStatus.RUNNING and not half._stands_still()
    prefill.run("other")
    prefill.rest()
    assert half._stands_still()
    for status in (RequestStatus.WAITING_FOR_REMOTE_KVS, RequestStatus.FINISHED_LENGTH_CAPPED):
        with monkeypatch.context() as patch:  # that another connector loads, or keeps
            patch.setitem(scheduler.requests, "kept", SimpleNamespace(status=status))
            assert not half._stands_still(), status
    for status in (RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR, RequestStatus.WAITING_FOR_STREAMING_REQ):
        with monkeypatch.context() as patch:  # that has no blocks yet, or a session whose client says nothing
            patch.setitem(scheduler.requests, "idle", SimpleNamespace(status=status))
            assert half._stands_still(), status
    for owner, name, value in (
        (scheduler, "deferred_frees", [(1, [])]),
        (type(half._quarantine), "num_blocks", 1),
        (type(half.consumer), "waiting", {"x"}),
        (type(half.operations), "busy", True),
        (type(half.producer), "num_leases", 2),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, value)
            assert not half._stands_still(), name
    assert half._stands_still()


class Told:
    """What stands for the pushes and the blocks of an instance: everything is asked for."""

    def __init__(self) -> None:
        self.failed_ones: list[str] = []
        self.released: list[str] = []

    num_in_pool = 8

    def needed(self, going: dict[str, Any]) -> set[str]:
        return set(going)

    def progressed(self, offers: Any, step: int) -> None: ...

    def failed(self, name: str, reason: str) -> None:
        self.failed_ones.append(name)

    def take_given_up(self) -> list[str]:
        return list(self.failed_ones)

    def hold_ids(self, name: str, ids: Any) -> None: ...

    def num_held_for(self, name: str) -> int:
        return 1

    def release(self, name: str) -> None:
        self.released.append(name)


@pytest.fixture
def progress() -> PrefillProgress:
    """Of four prefills, of which the first runs and the others were preempted."""
    group = SimpleNamespace(kv_cache_spec=FULL, layer_names=["layer"], host_resident=False)
    config: Any = SimpleNamespace(kv_cache_groups=[group], transfer_groups=[group], transfer_group_ids=[0])
    made, told = PrefillProgress(True, config), Told()
    made.pushes = made.blocks = told  # type: ignore[assignment]
    made.tables = lambda _: [[1]]
    for name, priority, arrival in (("runs", 9, 9.0), ("a", 0, 2.0), ("b", 0, 1.0), ("c", -1, 3.0)):
        status = RequestStatus.RUNNING if name == "runs" else RequestStatus.PREEMPTED
        request: Any = SimpleNamespace(
            request_id=name, priority=priority, arrival_time=arrival, status=status, max_tokens=1
        )
        made.add(request, 40)
    made.advance(dict.fromkeys(("runs", "a", "b", "c"), 16))
    return made


def test_nobody_gets_the_latest_of_the_preempted_ones_one_after_the_other(progress: PrefillProgress) -> None:
    told: Any = progress.pushes
    for second in range(20):
        progress.make_way(second * STUCK_S / 2)
    assert told.failed_ones == ["a", "b", "c"] and set(told.released) == {"a", "b", "c"}


def test_nobody_fails_while_something_ends_now_and_then(progress: PrefillProgress) -> None:
    told: Any = progress.pushes
    for number in range(40):
        progress.make_way(number * 0.6 * STUCK_S)
        if number % 2:
            progress.went_on()
    assert told.failed_ones == []
    progress.make_way(40 * STUCK_S)
    progress.make_way(50 * STUCK_S)
    assert told.failed_ones == ["a"], "a long time goes by between two looks where somebody computes anew each time"


def test_what_was_given_back_meanwhile_may_be_what_it_lacked(progress: PrefillProgress) -> None:
    told: Any = progress.pushes
    progress.make_way(0.0)
    told.failed_ones.append("b")  # its readers have given up
    progress.let_go()
    progress.make_way(1.5 * STUCK_S)
    assert told.failed_ones == ["b"] and told.released == ["b"]
    progress.make_way(2.5 * STUCK_S)
    assert told.failed_ones == ["b", "a"]

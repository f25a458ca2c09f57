"""Pools of a few blocks: leases, loads and vLLM's own preemption in each other's way, through vLLM's own scheduler.

The last test has two engines that prefill for each other and any order of arrivals, steps, reads, failures and aborts:
whatever it was, in the end every request has ended and nothing is left.
"""

from __future__ import annotations

import itertools
import json
import time
from typing import Any, ClassVar, Literal

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from vllm.v1.request import RequestStatus

from tests.support.effort import examples
from tests.support.scheduler.engines import (
    BLOCK,
    FULL,
    KEEP,
    RING,
    STATES,
    WINDOWED,
    Engine,
    given_back,
    loading,
    prefilled,
    read,
    transfer,
)
from tests.support.scheduler.workers import SimulatedWorker
from vllm_pd_connector.scheduler.half import GAUGES

PROMPT = list(range(40))
"""Three blocks."""
TINY = 21
"""Of which requests get 20, and leases 16."""


def leased(engine: Any, number: int) -> list[dict[str, Any]]:
    return [prefilled(engine, f"p-{i}", [100 + i, *PROMPT[1:]]) for i in range(number)]


def gauges(engine: Any) -> dict[str, float]:
    """What the engine's scheduler half has told of itself; nothing before its first step."""
    return dict(zip(GAUGES, engine.connector.scheduler._gauges, strict=False))


def test_an_engine_s_own_requests_find_room_beside_leases_that_nobody_reads(engine: Any) -> None:
    prefill = engine("kv_producer", blocks=TINY)
    leased(prefill, 5)
    prefill.add("p-5", [105, *PROMPT[1:]], KEEP, max_tokens=1)
    prefill.add("plain", PROMPT[::-1] + PROMPT[:20])
    prefill.run("plain")
    assert "p-5" in prefill.scheduler.requests and not prefill.scheduler.running, (
        "it waits, and nothing is wasted on it"
    )
    prefill.rest()
    told = gauges(prefill)
    assert (told["leased blocks"], told["leased blocks limit"], told["prefills held back"]) == (15, 16, 1)


def test_a_prefill_that_was_held_back_begins_when_a_lease_has_ended(engine: Any) -> None:
    prefill, decode = engine("kv_producer", blocks=TINY), engine("kv_consumer")
    params = leased(prefill, 5)
    prefill.add("p-5", [105, *PROMPT[1:]], KEEP, max_tokens=1)
    prefill.rest()
    assert not prefill.scheduler.running and prefill.held() == 15
    loading(decode, "d-0", [100, *PROMPT[1:]], params[0])
    assert read(decode.receive_of("d-0"))
    prefill.run("p-5")
    assert prefill.ended("p-5").kv_transfer_params is not None
    decode.step(received={"d-0"})
    decode.run("d-0")


def test_no_prefix_is_looked_up_behind_what_is_held_back(engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would look for each that queues, in each step."""
    prefill, looked = engine("kv_producer", blocks=TINY), []
    leased(prefill, 5)
    for number in range(5, 9):
        prefill.add(f"p-{number}", [100, *PROMPT[1:]], KEEP, max_tokens=1)
    coordinator = prefill.scheduler.kv_cache_manager.coordinator
    find = coordinator.find_longest_cache_hit

    def counted(*given: Any) -> Any:
        looked.append(given)
        return find(*given)

    monkeypatch.setattr(coordinator, "find_longest_cache_hit", counted)
    prefill.step()
    assert len(looked) == 1 and prefill.connector.scheduler.share.num_held_back == 4
    prefill.add("plain", PROMPT)
    prefill.run("plain")
    assert len(looked) > 1, "others look"


def test_a_prefill_with_log_probabilities_of_its_prompt_begins_and_counts(engine: Any) -> None:
    """vLLM computes it whatever is answered."""
    prefill = engine("kv_producer", blocks=TINY)
    leased(prefill, 5)
    request = prefill.add("p-5", [105, *PROMPT[1:]], KEEP, max_tokens=1)
    request.skip_reading_prefix_cache = request.sampling_params.skip_reading_prefix_cache = True
    prefill.add("p-6", [106], KEEP, max_tokens=1)
    assert prefill.step().num_scheduled_tokens == {"p-5": len(PROMPT)}
    assert prefill.connector.scheduler.share.num_held_back == 1, "p-6 is behind what p-5 takes"
    prefill.run("p-5")
    prefill.rest()
    assert prefill.connector.scheduler.share.num_leased == 18 and "p-6" in prefill.scheduler.requests


def test_a_prompt_above_the_share_is_computed_alone(engine: Any) -> None:
    prefill, decode = engine("kv_producer", blocks=TINY), engine("kv_consumer")
    small = prefilled(prefill, "p-small", PROMPT)
    large = list(range(500, 500 + 18 * BLOCK))
    prefill.add("p-large", large, KEEP, max_tokens=1)
    prefill.rest()
    assert not prefill.scheduler.running
    loading(decode, "d-small", PROMPT, small)
    assert read(decode.receive_of("d-small"))
    prefill.run("p-large")
    assert prefill.ended("p-large").kv_transfer_params is not None
    decode.step(received={"d-small"})


def test_a_running_prefill_that_nobody_has_asked_for_is_preempted_with_all_its_blocks(engine: Any) -> None:
    """What its steps complete may be written from, and is held, from before anybody has asked."""
    prefill = engine(transfer("kv_producer", mode="push"), blocks=6, step_tokens=BLOCK + 1, scheduling="priority")
    prefill.add("other", PROMPT[: BLOCK - 1], max_tokens=2 * BLOCK, priority=-1)
    prefill.step()
    running = prefill.add("p", list(range(100, 100 + 4 * BLOCK)), KEEP, max_tokens=1, priority=5)
    blocks, held = prefill.connector.scheduler.producer._blocks, 0
    for _ in range(10):
        prefill.step()
        if running.status is RequestStatus.PREEMPTED:
            break
        held = max(held, blocks.num_held_for("p"))
    assert running.status is RequestStatus.PREEMPTED and held > 1
    assert prefill.held() == len(prefill.blocks_of("other"))
    prefill.run("other", "p")
    assert prefill.ended("p").kv_transfer_params is not None and prefill.held() == 4


def test_a_reset_in_the_midst_of_a_prefill_that_nobody_has_asked_for_comes_about(engine: Any) -> None:
    prefill = engine(transfer("kv_producer", mode="push"), step_tokens=BLOCK)
    prefill.add("p", PROMPT, KEEP, max_tokens=1)
    prefill.step()
    assert prefill.connector.scheduler.producer._blocks.num_held_for("p")
    assert prefill.scheduler.reset_prefix_cache(reset_running_requests=True)
    assert prefill.held() == 0
    prefill.run("p")
    assert prefill.ended("p").kv_transfer_params is not None


def test_prefills_that_wait_for_leases_begin_in_the_order_of_their_priority(engine: Any) -> None:
    prefill, decode = engine("kv_producer", blocks=TINY, scheduling="priority"), engine("kv_consumer")
    params = leased(prefill, 5)
    for name, priority in (("low", 5), ("high", -1), ("middle", 2)):
        prefill.add(name, [ord(name[0]) + 500, *PROMPT[1:]], KEEP, max_tokens=1, priority=priority)
    prefill.rest()
    order = []
    for i in range(3):
        loading(decode, f"d-{i}", [100 + i, *PROMPT[1:]], params[i])
        assert read(decode.receive_of(f"d-{i}"))
        decode.step(received={f"d-{i}"})
        waiting = prefill.scheduler.requests.keys() & {"low", "middle", "high"}
        for _ in range(10):
            prefill.step()
        [ended] = waiting - prefill.scheduler.requests.keys()
        order.append(ended)
    assert order == ["high", "middle", "low"]


@pytest.mark.parametrize("engine", [False], indirect=True)
def test_a_running_request_is_not_preempted_for_blocks_that_a_lease_has_just_given_back(engine: Any) -> None:
    prefill, decode = engine("kv_producer", blocks=6), engine("kv_consumer")
    params = prefilled(prefill, "p-1", PROMPT[: 2 * BLOCK])
    plain = prefill.add("plain", PROMPT[:0:-1][: 3 * BLOCK - 10], max_tokens=30)
    loading(decode, "d-1", PROMPT[: 2 * BLOCK], params)
    while plain.num_computed_tokens < 3 * BLOCK:
        prefill.step()
    assert prefill.held() == 5, "the pool is full, and its next token needs another block"
    assert read(decode.receive_of("d-1"))
    prefill.run("plain")
    assert plain.num_preemptions == 0
    decode.step(received={"d-1"})
    given_back(prefill)


def test_a_ring_of_latest_tokens_counts_as_the_one_block_that_it_is(engine: Any) -> None:
    prefill = engine("kv_producer", blocks=TINY, groups=(FULL, RING))
    for i in range(4):
        prefill.add(f"p-{i}", [100 + i, *PROMPT[1:]], KEEP, max_tokens=1)
    assert len(prefill.step().num_scheduled_tokens) == 4, "16 blocks, which is the share"
    prefill.run("p-0", "p-1", "p-2", "p-3")
    prefill.rest()
    assert gauges(prefill)["leased blocks"] == 16


@pytest.mark.parametrize(
    "groups",
    [(FULL,), (FULL, WINDOWED), (FULL, STATES), (FULL, RING)],
    ids=["full", "window", "states", "ring"],
)
def test_a_lease_takes_no_more_blocks_than_it_was_admitted_for(engine: Any, groups: Any) -> None:
    prefill = engine("kv_producer", groups=groups, blocks=200)
    share = prefill.connector.scheduler.share
    for length in (1, 15, 16, 17, 33, 64, 65, 250):
        prompt = [length, *range(length - 1)]
        before = gauges(prefill).get("leased blocks", 0)
        prefill.add(f"p-{length}", prompt, KEEP, max_tokens=1)
        need = share._needs[f"p-{length}"]
        prefill.run(f"p-{length}")
        prefill.rest()
        assert 0 < gauges(prefill)["leased blocks"] - before <= need


# -- two engines that prefill for each other --------------------------------------------------------------------------

POOL = 13
SHARE = 0.5
"""Of 12 blocks, so that a request of 6 always finds room some time."""
LONGEST = 5 * BLOCK
LEASE_S = 0.4
PATIENCE_S = 60.0
BOTH = st.sampled_from([0, 1])
ANY = st.integers(0, 1000)
ARRIVAL: dict[str, Any] = {
    "at": BOTH,
    "tokens": st.integers(1, LONGEST),
    "more": st.integers(1, BLOCK),
    "priority": st.integers(0, 2),
    "remote": st.sampled_from([True, True, False]),
    "beginning": st.integers(0, 3),
}


class Pressure(RuleBasedStateMachine):
    """A router and the workers of two engines of role kv_both. Leases live by the clock, so no rule has a
    precondition: one that finds nothing to do does nothing. `loads` have come, of each example."""

    loads: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.engines: list[Engine] = []
        self.workers: list[SimulatedWorker] = []
        self.numbers = itertools.count()
        self.asked: list[dict[str, int]] = [{}, {}]  # names by engine, with their prompts' lengths
        self.aborted: set[str] = set()
        self.ready: list[tuple[int, str, list[int], int, int, Any]] = []
        self.prefills: dict[str, tuple[int, list[int], int, int]] = {}
        self.loads.append(0)

    @initialize(
        policy=st.sampled_from(["fail", "recompute"]),
        scheduling=st.sampled_from(["fcfs", "priority"]),
        step_tokens=st.sampled_from([BLOCK, 40, 256]),
        first=st.lists(st.fixed_dictionaries(ARRIVAL), min_size=4, max_size=8),
    )
    def start(
        self, policy: str, scheduling: Literal["fcfs", "priority"], step_tokens: int, first: list[dict[str, Any]]
    ) -> None:
        """Hypothesis leaves whole rules out of most examples, and without arrivals nothing happens."""
        for _ in range(2):
            config = transfer("kv_both", kv_lease_duration=LEASE_S, kv_lease_share=SHARE)
            engine = Engine(
                config, blocks=POOL, policy=policy, scheduling=scheduling, step_tokens=step_tokens, requests=4
            )
            self.engines.append(engine)
            self.workers.append(SimulatedWorker(engine))
        for arrival in first:
            self.arrive(**arrival)

    @rule(**ARRIVAL)
    def arrive(self, at: int, tokens: int, more: int, priority: int, remote: bool, beginning: int) -> None:
        """Prompts with the same beginning share prefixes."""
        name = f"r{next(self.numbers)}"
        prompt = [beginning, *range(tokens - 1)]
        self.asked[at][name] = tokens
        if remote:
            self.prefills[name] = 1 - at, prompt, more, priority
            self.engines[at].add(name, prompt, KEEP, max_tokens=1, priority=priority)
        else:
            self.engines[at].add(name, prompt, max_tokens=more, priority=priority)

    @rule(at=BOTH)
    def step(self, at: int) -> None:
        self._step(at, set(), set())

    @rule(which=ANY)
    def hand_over(self, which: int) -> None:
        if not self.ready:
            return
        at, name, prompt, more, priority, params = self.ready.pop(which % len(self.ready))
        self.asked[at][f"{name}-d"] = len(prompt)
        self.engines[at].add(f"{name}-d", prompt, params, max_tokens=more, priority=priority)

    @rule(which=ANY)
    def forget(self, which: int) -> None:
        """The router goes no further with a prefill."""
        if self.ready:
            self.ready.pop(which % len(self.ready))

    @rule(at=BOTH, which=ANY, well=st.sampled_from([True, True, False]))
    def end_load(self, at: int, which: int, well: bool) -> None:
        worker = self.workers[at if self.workers[at].orders else 1 - at]
        if not worker.orders:
            return
        name = sorted(worker.orders)[which % len(worker.orders)]
        came = worker.read(name) if well else worker.fail(name)
        self._step(self.workers.index(worker), {name} if came else set(), set() if came else {name})

    @rule(at=BOTH, which=ANY)
    def abort(self, at: int, which: int) -> None:
        live = self.engines[at if self.engines[at].scheduler.requests else 1 - at].scheduler
        going = sorted(name for name, request in live.requests.items() if not request.is_finished())
        if not going:
            return  # who was aborted while it loads is still there
        name = going[which % len(going)]
        self.aborted.add(name)
        live.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    @invariant()
    def leases_have_their_share(self) -> None:
        for engine in self.engines:
            share = engine.connector.scheduler.share
            assert share.num_leased <= share.limit

    def teardown(self) -> None:
        """Everything goes on well from here."""
        try:
            until = time.monotonic() + PATIENCE_S
            while self.ready or any(engine.scheduler.requests or engine.held() for engine in self.engines):
                assert time.monotonic() < until, self._left()
                while self.ready:
                    self.hand_over(0)
                for at, worker in enumerate(self.workers):
                    came = {name for name in sorted(worker.orders) if worker.read(name)}
                    self._step(at, came, worker.take_ended() - came)
            for at, engine in enumerate(self.engines):
                engine.check_empty()
                ends = [said.request_id for said in engine.said if said.finish_reason is not None]
                assert len(ends) == len(set(ends))
                assert set(ends) | self.aborted >= set(self.asked[at])
        finally:
            for worker in self.workers:
                worker.close()
            for engine in self.engines:
                engine.connector.shutdown()

    def _step(self, at: int, received: set[str], failed: set[str]) -> None:
        engine, worker = self.engines[at], self.workers[at]
        worker.take_ended()
        self.loads[-1] += len(received)
        before = len(engine.said)
        engine.step(received=received, failed=failed)
        worker.listen()
        for said in engine.said[before:]:
            if said.finish_reason is not None and said.kv_transfer_params is not None:
                other, prompt, more, priority = self.prefills[said.request_id]
                params = json.loads(json.dumps(said.kv_transfer_params))
                self.ready.append((other, said.request_id, prompt, more, priority, params))

    def _left(self) -> str:
        return "; ".join(
            f"{[(r.request_id, r.status.name) for r in engine.scheduler.requests.values()]}, {engine.held()} blocks"
            for engine in self.engines
        )


class TestPressure(Pressure.TestCase):  # type: ignore[name-defined,misc]  # made by hypothesis
    settings = settings(
        max_examples=examples(90),
        stateful_step_count=60,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
        phases=[Phase.explicit, Phase.reuse, Phase.generate],  # who waits for ever takes PATIENCE_S, each time
    )

    def runTest(self) -> None:
        """All of it goes as well where no load ever comes."""
        Pressure.loads.clear()
        super().runTest()
        assert sum(Pressure.loads) >= 10, "several come in most examples"

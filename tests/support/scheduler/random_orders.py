"""Two engines that prefill and decode for each other, whose caches hold digests, and a router and clients that do
anything in any order.

What must hold, whatever the order was:

- a step finds in its blocks what its own request's tokens make, nothing else;
- no block that is to be filled is left unfilled, but in the first of a window, which is then not shared;
- a request that nobody aborts hears its end, and none hears it twice;
- under the policy "recompute" no request ends with an error;
- when the router has gone away and all loads have ended, no request is left and no block is held.

All choices come from one seed. Some leases live so shortly that they end by the clock in the midst of things: the same
seed may then go another way, so what was done is noted as it is done, and told with a failure.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.kv_cache_interface import CircularBufferSpec, KVCacheSpec, MambaSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import RequestStatus

from tests.support.scheduler.caches import Caches, Computed, digests
from tests.support.scheduler.engines import BLOCK, FULL, KEEP, RING, SAMPLED, STATES, WINDOWED, Engine, transfer
from tests.support.scheduler.halves import until
from tests.support.scheduler.workers import SimulatedWorker
from vllm_pd_connector.metadata import ReceiveRequest, WorkerReport
from vllm_pd_connector.protocol.lease import End

GROUPS: Mapping[str, tuple[KVCacheSpec, ...]] = {
    "full": (FULL,),
    "window": (FULL, WINDOWED),
    "states": (FULL, STATES),
    "ring": (FULL, RING),
    "all": (FULL, WINDOWED, STATES),
}
OPERATIONS = {
    "step": 40.0, "end_load": 22.0, "hand_over": 14.0, "prefill": 9.0, "abort": 5.0, "ask": 3.5, "next_turn": 3.5,
    "forget": 3.0, "drop": 0.5, "reset": 0.5,
}  # fmt: skip
"""Methods of `RandomOrders`, and how often they are drawn."""


@dataclass(frozen=True)
class Setting:
    """Of both engines, but for the sizes of their blocks."""

    groups: str
    blocks: tuple[int, int]
    pool: int
    overlapping: bool
    conversations: bool
    policy: str
    scheduling: Literal["fcfs", "priority"]
    step_tokens: int
    lease_s: float

    @classmethod
    def draw(cls, rng: random.Random, groups: str) -> Setting:
        blocks = rng.choice([(BLOCK, BLOCK), (BLOCK, BLOCK), (BLOCK, 2 * BLOCK), (2 * BLOCK, 3 * BLOCK)])
        least = max(2 * BLOCK, *blocks)  # of less a step has no whole block, and states wait for ever
        return cls(
            groups,
            blocks=blocks,
            pool=rng.choice([14, 24, 60]) * len(GROUPS[groups]),
            overlapping=rng.random() < 0.5,
            conversations=rng.random() < 0.5,
            policy=rng.choice(["fail", "recompute"]),
            scheduling=rng.choice(["fcfs", "priority"]),
            step_tokens=rng.choice([least, least + BLOCK // 2, 256]),
            lease_s=rng.choice([0.4, 1.2, 600.0]),
        )

    def make(self, at: int) -> ComputingEngine:
        """One of the two."""
        config = transfer(
            "kv_both",
            kv_lease_duration=self.lease_s,
            kv_lease_share=0.5,
            conversations=self.conversations,
            conversation_lease=self.lease_s / 2,
        )
        block = self.blocks[at]
        specs = [s if isinstance(s, CircularBufferSpec) else replace(s, block_size=block) for s in GROUPS[self.groups]]
        return ComputingEngine(
            config | {"engine_id": f"engine-{at}"},
            specs,
            block=block,
            blocks=self.pool,
            policy=self.policy,
            scheduling=self.scheduling,
            step_tokens=self.step_tokens,
            requests=4,
            overlapping=self.overlapping,
        )


class ComputingEngine(Engine):
    """An engine whose steps compute digests; `wrong` is what was found to be wrong. `worker` takes its orders, which
    `begins` is told of; `received` are those that have come, with the blocks that are not to be shared."""

    def __init__(self, config: Mapping[str, Any], specs: Sequence[KVCacheSpec], **arguments: Any) -> None:
        self.caches, self.wrong = Caches(specs), list[str]()
        self.received: dict[str, dict[int, int]] = {}
        self.begins: Callable[[ReceiveRequest], None] = lambda order: None
        self._steps: dict[int, list[Computed]] = {}
        super().__init__(config, specs, **arguments)
        # As vLLM has it for a model with states; this one's model has none.
        self.scheduler.need_mamba_block_aligned_split = any(isinstance(spec, MambaSpec) for spec in specs)
        self.port = config["kv_connector_extra_config"]["side_channel_port"]
        self.worker = SimulatedWorker(self)

    def compute(self, output: SchedulerOutput) -> None:
        """Note what the step was given; what it samples is known by now. Loads begin, while steps are in flight."""
        parts = self._steps[id(output)] = []
        for name, count in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[name]
            stop = int(request.num_computed_tokens)
            tokens = [*request.all_token_ids, *[SAMPLED] * stop][:stop]
            tables = [list(table) for table in self.scheduler.kv_cache_manager.get_block_ids(name)]
            parts.append(Computed(name, stop - count, stop, digests(tokens), tables))
        self.worker.listen()
        for order in self.told[-1].receives:
            self.begins(order)

    def look(self, output: SchedulerOutput, results: ModelRunnerOutput) -> None:
        """The last moment at which a step can have computed."""
        for part in self._steps.pop(id(output)):
            self.wrong += self.caches.compute(part)
        super().look(output, results)

    def close(self) -> None:
        self.worker.close()
        self.connector.shutdown()


class RandomOrders:
    """See the module. `play` is all that a test calls; `loads` have come that were held until the end."""

    def __init__(self, seed: int, groups: str) -> None:
        self._rng = random.Random(seed)
        self._setting = Setting.draw(self._rng, groups)
        self.loads = 0
        self._title = f"seed {seed}, {self._setting}"
        self._engines = [self._setting.make(at) for at in range(2)]
        self._caches = {engine.port: engine.caches for engine in self._engines}
        for at, engine in enumerate(self._engines):
            engine.begins = partial(self._begin_load, at)
        self._numbers = itertools.count()
        self._prompts: tuple[dict[str, list[int]], ...] = ({}, {})
        self._aborted: set[str] = set()
        self._ready: list[tuple[list[int], Any]] = []
        self._talks: list[tuple[list[int], Any]] = []
        self._noted: list[tuple[str, int]] = []

    def play(self, operations: int) -> None:
        """So many operations, then all goes on well until nothing is left.

        Raises:
            AssertionError: a rule did not hold. It, and any other error, has the seed and what was done in its notes.
        """
        try:
            names, weights = list(OPERATIONS), list(OPERATIONS.values())
            for engine in self._engines:
                engine.step()  # overlapping steps report with the next
            for name in self._rng.choices(names, weights, k=operations):
                getattr(self, name)(self._rng.randint(0, 1))
            self._finish()
        except Exception as error:
            error.add_note("\n".join([self._title, *(f"{n}x {what}" if n > 1 else what for what, n in self._noted)]))
            raise
        finally:
            for engine in self._engines:
                engine.close()

    # -- what clients and the router do -------------------------------------------------------------------------------

    def prefill(self, at: int) -> None:
        """Prompts with the same beginning share prefixes."""
        rng = self._rng
        prompt = [rng.randint(0, 3), *range(rng.randint(0, self._longest))]
        if rng.random() < 0.1:
            prompt = prompt[: max(1, len(prompt) // BLOCK * BLOCK)]
        self._add(at, f"p{next(self._numbers)}", prompt, KEEP, 1 if rng.random() < 0.8 else 3)

    def ask(self, at: int) -> None:
        """A request that is nobody else's."""
        prompt = [self._rng.randint(0, 3), *range(self._rng.randint(0, self._longest))]
        self._add(at, f"r{next(self._numbers)}", prompt, None, self._rng.randint(1, BLOCK))

    def next_turn(self, at: int) -> None:
        """Of a conversation, or of what it was some time ago."""
        if not self._talks:
            return self.prefill(at)
        rng = self._rng
        said, params = rng.choice(self._talks)
        common = rng.randint(1, len(said)) if rng.random() < 0.3 else len(said)
        prompt = said[:common] + [rng.randint(50, 60) for _ in range(rng.randint(1, 9))]
        self._add(at, f"t{next(self._numbers)}", prompt, params, 1 if rng.random() < 0.8 else 3)

    def hand_over(self, at: int) -> None:
        """Some prefills go to two requests, some with a prompt that is not theirs, some to one with n > 1."""
        if not self._ready:
            return
        rng = self._rng
        k = rng.randrange(len(self._ready))
        prompt, params = self._ready[k] if rng.random() < 0.15 else self._ready.pop(k)
        longer = prompt + [99] * rng.randint(1, 20)
        changed = [longer, prompt[:-1] or [5], [9, *prompt[1:]], prompt]
        [prompt] = rng.choices(changed, [0.12, 0.06, 0.04, 0.78])
        number = next(self._numbers)
        several = [f"{child}_d{number}" for child in range(rng.randint(2, 3))]
        for name in several if rng.random() < 0.1 else [f"d{number}"]:
            self._add(at, name, prompt, params, rng.randint(1, BLOCK))

    def forget(self, at: int) -> None:
        """The router goes no further with a prefill."""
        if self._ready:
            self._ready.pop(self._rng.randrange(len(self._ready)))

    def abort(self, at: int) -> None:
        """A client goes away."""
        requests = self._engines[at].scheduler.requests
        going = sorted(name for name, request in requests.items() if not request.is_finished())
        if going:
            name = self._rng.choice(going)
            self._note(f"{at} aborts {name}")
            self._aborted.add(name)
            self._engines[at].scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    # -- what engines do ----------------------------------------------------------------------------------------------

    def step(self, at: int) -> None:
        """A step that reports nothing."""
        self._note(f"{at} steps")
        self._step(at)

    def end_load(self, at: int) -> None:
        """Well, or not."""
        at = at if self._engines[at].worker.orders else 1 - at
        if orders := self._engines[at].worker.orders:
            self._end_load(at, self._rng.choice(sorted(orders)), well=self._rng.random() < 0.8)

    def reset(self, at: int) -> None:
        """A trainer forgets what is cached. vLLM preempts running requests for it between two steps alone."""
        running = not self._setting.overlapping and self._rng.random() < 0.5
        connector = self._rng.random() < 0.5
        try:
            done = str(self._engines[at].scheduler.reset_prefix_cache(running, connector))
        except RuntimeError as error:  # vLLM's own: blocks are held by others than running requests
            done = str(error)
        self._note(f"{at} resets, running requests {running}, connector {connector}: {done}")

    def drop(self, at: int) -> None:
        """All leases of an engine end at once."""
        self._note(f"{at} drops its leases")
        self._engines[at].connector.scheduler.producer.end_leases(End.DROPPED)

    # -- how ----------------------------------------------------------------------------------------------------------

    @property
    def _longest(self) -> int:
        return (5 if len(GROUPS[self._setting.groups]) == 1 else 4) * BLOCK

    def _note(self, what: str) -> None:
        last, times = self._noted[-1] if self._noted else ("", 0)
        self._noted[-1:] = [(what, times + 1)] if what == last else [*self._noted[-1:], (what, 1)]

    def _add(self, at: int, name: str, prompt: list[int], params: Any, more: int) -> None:
        self._prompts[at][name] = prompt
        ends: dict[str, Any] = {
            "max_tokens": more,
            "stop": SAMPLED if self._rng.random() < 0.05 else -1,
            "prompt_logprobs": 1 if self._rng.random() < 0.12 else None,
            "priority": self._rng.randint(0, 2),
        }
        origin = params.get("remote_request_id", "nobody") if params else "nobody"
        self._note(f"{at} gets {name}, {len(prompt)} tokens {prompt[:1]}…{prompt[-1:]} after {origin}, {ends}")
        self._engines[at].add(name, prompt, params, **ends)

    def _begin_load(self, at: int, order: ReceiveRequest) -> None:
        """Half of the loads come at once, the others when they end."""
        if order.read is not None and self._rng.random() < 0.5:
            self._note(f"{at} has read {order.request_id}")
            self._receive(at, order)

    def _receive(self, at: int, order: ReceiveRequest) -> None:
        assert order.read is not None, order.source
        engine = self._engines[at]
        engine.received[order.request_id] = engine.caches.receive(order, self._caches[order.read.peer.port])

    def _end_load(self, at: int, name: str, *, well: bool) -> None:
        """A load that is not wanted any more, or cannot be, ends badly."""
        engine, worker = self._engines[at], self._engines[at].worker
        order = worker.orders[name]
        late: dict[int, int] = {}
        if order.read is None or name in worker.aborted or not well:
            if order.read is not None:
                engine.caches.spoil(order)
            held = worker.fail(name)
        else:
            if name not in engine.received:
                self._receive(at, order)
            late = engine.received[name]
            held = worker.read(name)
        engine.received.pop(name, None)
        self.loads += held
        self._note(f"{at} ends the load of {name} [{order.start}, {order.stop}), held: {held}, late: {late}")
        spared = not held and order.spare
        report = WorkerReport(unshareable={name: late} if held and late else {}, spared={name} if spared else set())
        worker.take_ended()
        self._step(at, received={name} if held else set(), failed=set() if held else {name}, report=report)

    def _step(self, at: int, **reported: Any) -> None:
        engine = self._engines[at]
        before = len(engine.said)
        engine.step(**reported)
        for said in engine.said[before:]:
            if said.finish_reason is not None:
                self._answer(at, said)
        assert not engine.wrong, engine.wrong

    def _answer(self, at: int, said: EngineCoreOutput) -> None:
        self._note(f"{said.request_id} ends: {said.finish_reason}")
        assert self._setting.policy == "fail" or said.finish_reason is not FinishReason.ERROR, said
        if said.kv_transfer_params is None:
            return
        params = json.loads(json.dumps(said.kv_transfer_params))
        prompt = self._prompts[at][said.request_id]
        if params["do_remote_prefill"]:
            self._ready.append((prompt, params))
        else:
            answered = params["remote_num_tokens"] - len(prompt) + 1
            self._talks = [*self._talks[-7:], (prompt + [SAMPLED] * answered, params)]

    def _finish(self) -> None:
        self._note("the router goes away")

        def over() -> bool:
            for at, engine in enumerate(self._engines):
                engine.connector.scheduler.producer.end_leases(End.DROPPED)
                for name in sorted(engine.worker.orders):
                    if name in engine.worker.orders:
                        self._end_load(at, name, well=True)
                self.step(at)
            return not any(engine.scheduler.requests or engine.held() for engine in self._engines)

        until(over, "requests that end, and blocks that are free")
        for at, engine in enumerate(self._engines):
            engine.check_empty()
            ends = [said.request_id for said in engine.said if said.finish_reason is not None]
            assert len(ends) == len(set(ends)), "some heard their end twice"
            assert set(ends) | self._aborted >= self._prompts[at].keys()

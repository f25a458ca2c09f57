"""An engine whose one worker is real: a worker half with its transfer thread and transport, over bytes in RAM.

What a forward would write for a token is a number made of all tokens up to it. Before a step writes its own tokens it
looks at every earlier one of its requests, as attention would: bytes that are of another request, came too early or
were overwritten show at the first step that would have used them.
"""

from __future__ import annotations

import secrets
from collections import Counter
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from vllm.v1.core.sched.output import SchedulerOutput

from tests.support.geometry.world import Model, Side, instance
from tests.support.scheduler.engines import BLOCK, Engine, transfer
from tests.support.worker.prefill_instance import real
from vllm_pd_connector.config import parse_config
from vllm_pd_connector.connector import EncodedManifest
from vllm_pd_connector.worker import half as half_module
from vllm_pd_connector.worker.half import WorkerHalf

MODEL = Model(layers=2, heads=2)


class WorkedEngine(Engine):
    """See the module. `wrong` has a sentence for each look that found other bytes than it should; `counted` are
    receives and their bytes.

    Args:
        layout: of the caches, as in `tests.support.geometry.world`.
        extra: of `kv_connector_extra_config`.
    """

    def __init__(self, role: str, layout: str, blocks: int, extra: dict[str, Any], **arguments: Any) -> None:
        name = f"{role}-{secrets.token_hex(4)}"
        config = {**transfer(role, **extra), "engine_id": name}
        [self._worker] = instance(MODEL, Side(layout=layout, block_tokens=BLOCK, num_blocks=blocks), name)
        self.wrong: list[str] = []
        self.counted: Counter[str] = Counter()
        self.half = self._make_half(role, config["kv_connector_extra_config"])
        start = EncodedManifest(self.half.encoded_manifest(), self.half.token, weights=self.half.weights)
        super().__init__(config, blocks=blocks, worker=start, **arguments)

    def _make_half(self, role: str, extra: dict[str, Any]) -> WorkerHalf:
        roles = SimpleNamespace(is_kv_producer=role != "kv_consumer", is_kv_consumer=role != "kv_producer")
        place = SimpleNamespace(data_parallel_index=0, use_ubatching=False)
        config = parse_config({"shutdown_timeout": 0, **extra})
        half = WorkerHalf(config, SimpleNamespace(kv_transfer_config=roles, parallel_config=place), SimpleNamespace())

        def manifest(*_: object, incarnation: str, **__: object) -> Any:
            return msgspec.structs.replace(real(self._worker), incarnation=incarnation)

        patched = vars(half_module)
        before, patched["build_manifest"] = patched["build_manifest"], manifest  # what vLLM would have told
        try:
            half.register({})
        finally:
            patched["build_manifest"] = before
        return half

    def turn(self) -> bool:
        """A step with what the worker has reported; whether it computed anything or heard of an end. In an engine core
        vLLM is told before of what the worker rang for, and is held for no time."""
        if (loop := self.connector.scheduler.hold._loop) is not None:
            loop.wait = lambda seconds: None
            self.connector.scheduler.hold._between()
            while not loop._queue.empty():
                loop._queue.get_nowait()
        results = self.half.transfer_results()
        failed = set(results.failed_recving)
        self.step(received=set(results.finished_recving) - failed, failed=failed, report=self.half.take_report())
        if (stats := self.half.take_stats()) is not None:
            self.counted.update(receives=stats.data["receives"], bytes=stats.data["bytes"])
        worked = bool(self.scheduled[-1] or results.finished_recving)
        self.told.clear()
        self.scheduled.clear()
        return worked

    def compute(self, output: SchedulerOutput) -> None:
        self.half.start_step(self.told[-1])
        for name, count in output.num_scheduled_tokens.items():
            self._forward(name, count)
        self.half.step_launched()

    def _forward(self, name: str, count: int) -> None:
        request = self.scheduler.requests[name]
        stop = int(request.num_computed_tokens)
        begin = stop - count
        tokens = np.asarray(request.all_token_ids[:stop], np.int64)
        numbers = np.cumsum((tokens + 1) * (2 * np.arange(stop) + 1))
        blocks = np.asarray([block.block_id for block in self.blocks_of(name)], np.intp)
        at = np.arange(stop)
        pages, slots = blocks[at // BLOCK], at % BLOCK
        memory = self._worker.memory
        for number, index in enumerate(self._worker.where.values()):
            places = index[pages, slots]
            values = _spread(numbers + 17 * number, places.shape[1:])
            if (found := (memory[places[:begin]] != values[:begin]).any(axis=(1, 2, 3))).any():
                bad = np.flatnonzero(found)
                self.wrong.append(f"{name}: {len(bad)} of {begin} tokens, from {bad[0]} on, of {len(tokens)}")
            memory[places[begin:]] = values[begin:]

    def close(self) -> None:
        self.half.shutdown()
        self.connector.shutdown()


def _spread(numbers: NDArray[np.int64], shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Bytes for every head and channel of each token."""
    return (numbers.reshape(-1, 1, 1, 1) + np.arange(int(np.prod(shape))).reshape(1, *shape)).astype(np.uint8)

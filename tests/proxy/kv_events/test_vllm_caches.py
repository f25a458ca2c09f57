"""What the router knows by vLLM's own events is what vLLM's own prefix cache finds."""

from __future__ import annotations

import random

import msgspec
import pytest

pytest.importorskip("vllm")
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.request import Request

from vllm_pd_connector.proxy.kv_events.block_keys import PromptBlocks
from vllm_pd_connector.proxy.kv_events.known_prefixes import Announcements

pytestmark = pytest.mark.libraries

BLOCK, NUM_BLOCKS, ROUNDS = 4, 40, 150
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
OTHER = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=16, dtype=torch.float32)
WINDOW = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=8)
STATES = MambaSpec(
    block_size=BLOCK, shapes=((3, 16), (2, 8, 8)), dtypes=(torch.float32, torch.float32), mamba_cache_mode="align"
)


class Engine:
    """vLLM's cache manager, what requests do to it, and what the router hears of it."""

    def __init__(self, specs: tuple[KVCacheSpec, ...]):
        init_none_hash(sha256)
        groups = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(specs)]
        self.manager = KVCacheManager(
            KVCacheConfig(num_blocks=NUM_BLOCKS * len(specs), kv_cache_tensors=[], kv_cache_groups=groups),
            max_model_len=2048, enable_caching=True, scheduler_block_size=BLOCK, hash_block_size=BLOCK,
            enable_kv_cache_events=True,
        )  # fmt: skip
        self.known = Announcements()
        self._running: list[Request] = []
        self._batches = 0

    def request(self, prompt: list[int]) -> Request:
        hasher = get_request_block_hasher(BLOCK, sha256)
        return Request(f"r-{self._batches}", prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)

    def compute(self, prompt: list[int]) -> None:
        request = self.request(prompt)
        found, hit, *_ = self.manager.get_computed_blocks(request)
        allocated = self.manager.allocate_slots(
            request, len(prompt) - hit, num_new_computed_tokens=hit, new_computed_blocks=found
        )
        if allocated is not None:
            self._running.append(request)
            request.num_computed_tokens = len(prompt)
        self._step()

    def finish(self) -> None:
        if self._running:
            self.manager.free(self._running.pop(0))
        self._step()

    def forget(self) -> None:
        while self._running:
            self.finish()
        assert self.manager.reset_prefix_cache()
        self._step()

    def hit(self, prompt: list[int]) -> int:
        """Tokens that vLLM finds of a prompt; it always computes the last one."""
        return int(self.manager.get_computed_blocks(self.request(prompt))[1])

    def told(self, prompt: list[int]) -> int:
        held = self.known.held.length(PromptBlocks(prompt, "m", ""), adapter=False)
        return min(held, (len(prompt) - 1) // BLOCK * BLOCK)

    def _step(self) -> None:
        batch = KVEventBatch(ts=0.0, events=self.manager.take_events(), data_parallel_rank=0)
        assert self.known.missing_from(self._batches) is None
        self.known.take(self._batches, msgspec.msgpack.encode(batch))
        self._batches += 1


@pytest.mark.parametrize(
    "specs",
    [
        pytest.param((FULL,), id="full attention"),
        pytest.param((FULL, OTHER), id="two kinds of it"),
        pytest.param((FULL, WINDOW), id="and a window"),
        pytest.param((WINDOW, FULL), id="behind a window"),
        pytest.param((FULL, STATES), id="and states"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_what_was_announced_is_what_vllm_finds(specs: tuple[KVCacheSpec, ...], seed: int) -> None:
    engine, chance = Engine(specs), random.Random(seed)
    beginnings = [[chance.randrange(9) for _ in range(24)] for _ in range(4)]
    found = 0
    for _ in range(ROUNDS):
        beginning = chance.choice(beginnings)
        prompt = beginning[: chance.randrange(1, 24)] + [chance.randrange(9) for _ in range(chance.randrange(1, 20))]
        match chance.randrange(12):
            case 0:
                engine.forget()
            case 1 | 2 | 3 | 4:
                engine.finish()
            case _:
                engine.compute(prompt)
        for asked in (prompt, *beginnings):
            hit, told = engine.hit(asked), engine.told(asked)
            if all(isinstance(spec, FullAttentionSpec) for spec in specs):
                assert told == hit
            else:  # what a window or a state has lost cannot be taken up, though full attention holds it
                assert told >= hit
            found += told
    assert found and engine.known.losses == {}

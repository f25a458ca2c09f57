"""How much of the prompts the chosen instances hold: by their KV-cache events, and by what the router sent them.

Conversations of several lengths go on by turns, popular ones more often; each prompt is the conversation so far and a
new turn. The instances' caches are vLLM's own (`KVCacheManager`), together smaller than all conversations, so that
blocks are evicted all the time. A request occupies its blocks while AT_ONCE others come. The router's choice is the
router's own code, with the events in the form in which they come over the wire; no request is computed.

Of a second case half of the requests come through another router, of which the first one knows nothing but the events.

    python benchmarks/routing.py [--requests 1000] [--seeds 3] [--json results.json]
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
from vllm.distributed.kv_events import KVEventBatch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.report import write  # noqa: E402
from vllm_pd_connector.proxy.choice import Candidate, Chooser, prompt_prefix  # noqa: E402
from vllm_pd_connector.proxy.kv_events.known_prefixes import KnownPrefixes  # noqa: E402

BLOCK_TOKENS = 16
INSTANCES, BLOCKS_EACH = 4, 1500
CONVERSATIONS, TURN_TOKENS, MAX_TURNS = 64, (40, 400), 12
SYSTEM_PROMPTS, SYSTEM_TOKENS = 4, 320
AT_ONCE = 8
SLACK = 2
VOCABULARY = 32_000
POLICIES = ("load", "prefix", "kv-events")


class Instance:
    """An instance's cache: vLLM's."""

    def __init__(self, url: str):
        self.url = url
        self.in_flight = 0
        spec = FullAttentionSpec(block_size=BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
        self._manager = KVCacheManager(
            KVCacheConfig(BLOCKS_EACH, [], [KVCacheGroupSpec(["layer"], spec)]),
            max_model_len=1 << 16, enable_caching=True, scheduler_block_size=BLOCK_TOKENS,
            hash_block_size=BLOCK_TOKENS, enable_kv_cache_events=True,
        )  # fmt: skip

    def start(self, name: str, prompt: list[int]) -> tuple[Request, int]:
        """Take a request in; how many tokens of its prompt need not be computed."""
        hasher = get_request_block_hasher(BLOCK_TOKENS, sha256)
        request = Request(name, prompt, SamplingParams(max_tokens=1), None, block_hasher=hasher)
        found, hit, *_ = self._manager.get_computed_blocks(request)
        allocated = self._manager.allocate_slots(
            request, len(prompt) - hit, num_new_computed_tokens=hit, new_computed_blocks=found
        )
        assert allocated is not None, "a cache holds less than the requests in flight; raise BLOCKS_EACH"
        self.in_flight += 1
        return request, hit

    def finish(self, request: Request) -> None:
        self._manager.free(request)
        self.in_flight -= 1

    def announced(self) -> bytes | None:
        """What the last step has to tell."""
        events = self._manager.take_events()
        return msgspec.msgpack.encode(KVEventBatch(0.0, events, 0)) if events else None


@dataclass(slots=True)
class Router:
    """The router's choice by one policy, and the processor seconds that it took."""

    policy: str
    choosing: list[float] = field(default_factory=list)
    hearing: list[float] = field(default_factory=list)
    _chooser: Chooser = field(default_factory=lambda: Chooser(SLACK))
    _known: KnownPrefixes = field(default_factory=KnownPrefixes)
    _batches: dict[str, Iterator[int]] = field(default_factory=dict)

    def choose(self, instances: dict[str, Instance], prompt: list[int]) -> Instance:
        began = time.thread_time()
        prefix = prompt_prefix({"model": "m", "prompt": prompt})
        keys = prefix.keys if self.policy != "load" else ()
        held = self._known.lengths(prefix.blocks, instances) if self.policy == "kv-events" else {}
        url, _ = self._chooser.choose([Candidate(i.url, i.in_flight) for i in instances.values()], keys, held)
        self._chooser.took(url, keys)
        self.choosing.append(time.thread_time() - began)
        return instances[url]

    def hear(self, url: str, payload: bytes) -> None:
        if self.policy == "kv-events":
            began = time.thread_time()
            self._known.begin(url)
            self._known.take(url, next(self._batches.setdefault(url, itertools.count())), payload)
            self.hearing.append(time.thread_time() - began)


def prompts(count: int, seed: int) -> Iterator[list[int]]:
    """Prompts of conversations that go on; a conversation that is over begins anew with other words."""
    chance = random.Random(seed)

    def words(number: int) -> list[int]:
        return [chance.randrange(VOCABULARY) for _ in range(number)]

    systems = [words(SYSTEM_TOKENS) for _ in range(SYSTEM_PROMPTS)]
    talks = [[*chance.choice(systems)] for _ in range(CONVERSATIONS)]
    turns = [chance.randrange(MAX_TURNS) for _ in range(CONVERSATIONS)]
    popularity = [1 / (rank + 3) for rank in range(CONVERSATIONS)]
    for _ in range(count):
        [which] = chance.choices(range(CONVERSATIONS), popularity)
        turns[which] += 1
        if turns[which] > MAX_TURNS:
            talks[which], turns[which] = [*chance.choice(systems)], 1
        talks[which] += words(chance.randrange(*TURN_TOKENS))
        yield [*talks[which]]


def run(policy: str, routers: int, requests: int, seed: int) -> tuple[float, list[Router]]:
    """Share of all prompts' tokens that the chosen instances held, and the routers."""
    init_none_hash(sha256)
    instances = {url: Instance(url) for url in (f"http://{number}" for number in range(INSTANCES))}
    used = [Router(policy) for _ in range(routers)]
    running: deque[tuple[Instance, Request]] = deque()
    chance = random.Random(seed)
    hits = tokens = 0
    for number, prompt in enumerate(prompts(requests, seed)):
        if len(running) == AT_ONCE:
            instance, request = running.popleft()
            instance.finish(request)
        instance = chance.choice(used).choose(instances, prompt)
        request, hit = instance.start(f"r-{number}", prompt)
        running.append((instance, request))
        hits, tokens = hits + hit, tokens + len(prompt)
        if (payload := instance.announced()) is not None:
            for router in used:
                router.hear(instance.url, payload)
    return hits / tokens, used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3, help="workloads of each case")
    parser.add_argument("--json", type=Path, help="write the results here")
    options = parser.parse_args()
    rows = []
    print(f"{'routers':>7}  {'policy':<10} {'held':>7}  {'least':>7}  {'choice':>9} {'a batch':>9}   (of tokens; us)")
    for routers, policy in itertools.product((1, 2), POLICIES):
        runs = [run(policy, routers, options.requests, seed) for seed in range(options.seeds)]
        rates = [rate for rate, _ in runs]
        choosing, hearing = (
            [seconds for _, used in runs for router in used for seconds in getattr(router, name)] or [0.0]
            for name in ("choosing", "hearing")
        )
        row = {
            "routers": routers,
            "policy": policy,
            "hit_rate": statistics.mean(rates),
            "hit_rates": rates,
            "least": min(rates),
            "choice_us": statistics.median(choosing) * 1e6,
            "batch_us": statistics.median(hearing) * 1e6,
        }
        rows.append(row)
        print(
            f"{routers:>7}  {policy:<10} {row['hit_rate']:7.1%}  {min(rates):7.1%}  {row['choice_us']:9.0f} "
            f"{row['batch_us']:9.0f}"
        )
    if options.json:
        write(options.json, {"results": rows})


if __name__ == "__main__":
    main()

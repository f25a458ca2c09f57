"""What a finished request leaves behind for the next turn of its conversation, who wants its blocks, and who need not
look for what is cached.

Source: vLLM 0.32, `v1/request.py`, `v1/core/sched/scheduler.py` (`update_from_output`).
"""

from __future__ import annotations

import hashlib
from functools import wraps
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import RequestStatus

from vllm_pd_connector.compat.blocks import medium_name
from vllm_pd_connector.compat.model.adapters import by_files

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request


def known_tokens(request: Request) -> int:
    """How many of a finished request's tokens, from the first on, have caches: all but the last that was sampled, or
    less. What a step that is still under way computes is not counted, nor drafts that were rejected."""
    return int(min(request.num_tokens - 1, request.num_computed_tokens - request.num_in_flight_tokens))


def steps_beyond(request: Request, num_tokens: int) -> bool:
    """Whether a finished request's caches go on behind `num_tokens`, or a step is under way that takes them there. For
    attention this is no matter; a recurrent state stands at the end and nowhere else."""
    return int(request.num_computed_tokens) != num_tokens


def is_text(request: Request) -> bool:
    """Whether all of the prompt is token ids, beside media: embeddings are another prompt in every turn."""
    return request.prompt_token_ids is not None and request.prompt_embeds is None


def prefix_digests(
    request: Request,
    lengths: Sequence[int],
    adapter_of: Callable[[Request], str] = by_files,
    medium_of: Callable[[MultiModalFeatureSpec], str] = medium_name,
) -> list[str]:
    """16 hex digits for each of these prefixes of a request's tokens (prompt and answer), `lengths` ascending: over the
    tokens, the media that begin among them, the adapter, and the salt by which a client keeps its caches to itself.

    Raises:
        ProtocolError: a medium or the adapter of the request cannot be told from others.
    """
    tokens = np.asarray(list(request.all_token_ids[: lengths[-1]] if lengths else ()), dtype="<i8")
    media = sorted((feature.mm_position.offset, medium_of(feature)) for feature in request.mm_features or ())
    rest = adapter_of(request), request.cache_salt
    digest, digests, done = hashlib.blake2b(digest_size=8), [], 0
    for length in lengths:
        digest.update(tokens[done:length].tobytes())
        here, done = digest.copy(), length
        here.update(repr((length, [medium for medium in media if medium[0] < length], rest)).encode())
        digests.append(here.hexdigest())
    return digests


def note_without_blocks(manager: KVCacheManager, told: Callable[[str, bool], None], frees: Callable[[], bool]) -> None:
    """Have `told` hear of each request that finds no blocks from now on, and whether it waits with what was loaded for
    it: vLLM asks for more blocks before it runs, and not about it any more. One that runs looks again as long as
    `frees` gives some back: vLLM would have it miss the step, in which those that wait take what is free by then.

    Source: vLLM 0.32, `KVCacheManager.allocate_slots`, of which the scheduler alone learns it.
    """
    allocate = manager.allocate_slots

    @wraps(allocate)
    def allocate_slots(request: Request, *args: Any, **more: Any) -> KVCacheBlocks | None:
        while (found := allocate(request, *args, **more)) is None:
            if request.status is not RequestStatus.RUNNING or not frees():
                break
        if found is None and not _next_step(manager, **more):
            told(request.request_id, request.status is not RequestStatus.RUNNING and request.num_computed_tokens > 0)
        return found

    manager.allocate_slots = allocate_slots


def _next_step(manager: KVCacheManager, new_computed_blocks: KVCacheBlocks | None = None, **_: Any) -> bool:
    """Whether vLLM puts a request off to the next step, however many blocks are free: it begins with a recurrent state
    that is there behind this one (`MambaManager.get_num_blocks_to_allocate`)."""
    hits = new_computed_blocks.blocks if new_computed_blocks is not None else ()
    return any(
        blocks and blocks[-1].block_hash in getattr(group, "cached_blocks_this_step", ())
        for blocks, group in zip(hits, manager.coordinator.single_type_managers, strict=False)
    )


def spare_lookups(manager: KVCacheManager, held_back: Callable[[str], bool]) -> None:
    """Have no cached prefix looked up of requests that are held back in any case: vLLM does that before it asks whether
    one may begin, in each step and for all that queue.

    Source: vLLM 0.32 and 0.33, `Scheduler.schedule`, `KVCacheManager.get_computed_blocks`.
    """
    enabled = manager.prefix_cache_lookup_enabled

    @wraps(enabled)
    def prefix_cache_lookup_enabled(request: Request) -> bool:
        return not held_back(request.request_id) and bool(enabled(request))

    manager.prefix_cache_lookup_enabled = prefix_cache_lookup_enabled

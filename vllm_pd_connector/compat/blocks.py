"""vLLM's requests, block tables and block pool, as the scheduler half needs them.

Source: vLLM 0.32, `v1/request.py`, `v1/core/kv_cache_manager.py`, `v1/core/block_pool.py`.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from copy import copy
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm.multimodal.hasher import MultiModalHasher
from vllm.v1.kv_cache_interface import MambaSpec
from vllm.v1.request import RequestStatus

from vllm_pd_connector.compat.model.adapters import by_files
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.blocks import NULL_BLOCK

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from vllm.config import VllmConfig
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_pd_connector.geometry.blocks import BlockTables

_LOCAL_NAME = re.compile(r"\brenderer\d+-mm-\d+-")
"""How vLLM begins the names of media that it does not hash, because it caches neither them nor prefixes: by a counter
of each process. What follows is the kind and number of the item, which says nothing of its content.

Source: vLLM 0.32, `vllm/renderers/base.py` (`_process_mm_uuids`)."""

_WHOLE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_REPETITION)


def finished_normally(request: Request) -> bool:
    """Whether the request ran to its end (length, stop token, or tokens that repeat themselves), so that its caches are
    whole."""
    return request.status in _WHOLE


def is_preempted(request: Request) -> bool:
    """Whether vLLM has taken a request's blocks and will compute it anew (`Scheduler._preempt_request`)."""
    return request.status is RequestStatus.PREEMPTED


def was_aborted(request: Request) -> bool:
    """Whether its client is gone, or it was withdrawn."""
    return request.status is RequestStatus.FINISHED_ABORTED


def was_refused(request: Request) -> bool:
    """Whether this stands for a request that vLLM's API server refused, or whose failure it reports, and is aborted at
    once: it brings the parameters alone, under an id and with a prompt of its own.

    Source: vLLM 0.32, `AsyncLLM.notify_kv_transfer_request_rejected`.
    """
    return bool(request.abort_immediately)


def transfer_params(request: Request) -> Any:
    """The request's `kv_transfer_params`, as the client sent them."""
    return request.kv_transfer_params


def drop_other_params(request: Request) -> None:
    """Have vLLM not look into parameters that are no object: it does when its connector has heard of the request, and
    the engine core ends with the error. Clients send them as `vllm_xargs`, whose values may be of other types. Others
    look for them where they came from.

    Source: vLLM 0.32 and 0.33, `Scheduler.add_request`; `lmcache_integration/vllm_v1_adapter.py`.
    """
    if not isinstance(request.kv_transfer_params, dict):
        request.kv_transfer_params = None
        if (sampling := request.sampling_params) is not None and sampling.extra_args:
            others = {name: value for name, value in sampling.extra_args.items() if name != "kv_transfer_params"}
            request.sampling_params = copy(sampling)  # several choices of a request share theirs
            request.sampling_params.extra_args = others


def computed_again(request: Request) -> str:
    """Why a request that has ended is not whole: a part is still to be computed, or is by a step in flight, since a
    load of another connector had failed when the step was under way that ended it. Empty if it is whole.

    Source: vLLM 0.32, `Scheduler._update_requests_with_invalid_blocks`, `update_from_output`.
    """
    settled = request.num_computed_tokens - request.num_in_flight_tokens
    if settled >= request.num_prompt_tokens:
        return ""
    return (
        f"{settled} of its {request.num_prompt_tokens} tokens are computed: another connector failed to load a part "
        "while the step that ended it ran, and vLLM computes that again; send the request again"
    )


def fails_over_unequal_hits(manager: KVCacheManager) -> bool:
    """Whether vLLM's cache manager may end the engine over a prefix hit that is deeper in one group than in another: it
    cuts such a hit at the end of a whole block where hits end inside of one, as beside states of larger blocks, and
    takes every group but those with states to have all that is left.

    Source: vLLM 0.32, `KVCacheManager.truncate_computed_blocks`, `HybridKVCacheCoordinator.enable_partial_hash_hits`.
    """
    coordinator = manager.coordinator
    specs = (group.kv_cache_spec for group in manager.kv_cache_config.kv_cache_groups)
    others = [spec for spec in specs if spec.prefix_cacheable and not isinstance(spec, MambaSpec)]
    return coordinator.enable_partial_hash_hits and len(others) > 1


def trace_headers(request: Request) -> dict[str, str] | None:
    """Headers of the client's trace; None where there are none, or vLLM exports none (0.32, `AsyncLLM.add_request`)."""
    return dict(request.trace_headers) if request.trace_headers else None


def computes_itself(request: Request) -> bool:
    """Whether vLLM computes the whole prompt here whatever could be loaded, as it does for its log-probabilities."""
    return bool(request.get_skip_reading_prefix_cache())


def computed_after(output: SchedulerOutput, among: Collection[str]) -> dict[str, int]:
    """By request id the tokens whose cache is there after this step, of those requests that are scheduled in it."""
    now, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    before = zip(cached.req_ids, cached.num_computed_tokens, strict=True)
    after = {name: computed + now[name] for name, computed in before if name in among}
    for new in output.scheduled_new_reqs:
        if new.req_id in among:
            after[new.req_id] = new.num_computed_tokens + now[new.req_id]
    return after


def begun_in(output: SchedulerOutput) -> Iterator[tuple[str, bool]]:
    """(request id, whether caches were found for it) of every request that begins in this step, or begins anew after it
    was preempted."""
    for new in output.scheduled_new_reqs:
        yield new.req_id, new.num_computed_tokens > 0
    cached = output.scheduled_cached_reqs
    if not cached.resumed_req_ids:
        return
    for request_id, computed in zip(cached.req_ids, cached.num_computed_tokens, strict=True):
        if request_id in cached.resumed_req_ids:
            yield request_id, computed > 0


def encoded_media(scheduler: Any) -> Mapping[str, object]:
    """What vLLM has kept of encoded media, by the names that `media_of` gives; each has an object of its own, another
    one when it is encoded anew. Models with an encoder and a decoder keep nothing.

    Source: vLLM 0.32, `v1/core/encoder_cache_manager.py` (`cached`: who uses each; `reset`).
    """
    return dict(getattr(scheduler.encoder_cache_manager, "cached", ()))


def media_of(request: Request) -> Iterator[str]:
    """By which names vLLM looks for a request's media among those it has encoded."""
    return (str(feature.identifier) for feature in request.mm_features or ())


def media_begun_in(output: SchedulerOutput) -> tuple[set[str], bool]:
    """The names (`media_of`) of media of all requests that begin in this step, and whether any begins anew after it was
    preempted, whose media vLLM does not tell again."""
    names = {name for new in output.scheduled_new_reqs for name in media_of(new)}
    return names, bool(output.scheduled_cached_reqs.resumed_req_ids)


def media_names(config: VllmConfig) -> Callable[[MultiModalFeatureSpec], str]:
    """`medium_name`, as an engine can rely on vLLM's. Where it caches neither media nor prefixes, its hash may be that
    of a counter, with a request's options. With an EC connector names are clients', and the content may lie elsewhere.

    Source: vLLM 0.32, `vllm/renderers/base.py` (`_process_mm_uuids`), `ProcessorInputs.get_mm_hashes`.
    """
    media = config.model_config.multimodal_config
    hashed = media is None or media.mm_processor_cache_gb != 0 or config.cache_config.enable_prefix_caching
    return partial(medium_name, named=hashed or config.ec_transfer_config is not None)


def medium_name(feature: MultiModalFeatureSpec, *, named: bool = True) -> str:
    """What tells an image or another medium from all others, on every instance: vLLM's hash of it or the client's name
    for it; where vLLM has only named it for itself, or hashed such a name (not `named`), what the model gets of it.

    Raises:
        ProtocolError: there is neither.
    """
    name = str(feature.identifier)
    local = _LOCAL_NAME.search(name)
    if named and local is None:
        return name
    if feature.data is None:
        raise ProtocolError(f"the medium {name} has neither a hash nor content here: enable vLLM's processor cache")
    content = hashlib.blake2b(digest_size=16)
    for chunk in MultiModalHasher.iter_item_to_bytes("medium", dict(sorted(feature.data.get_data().items()))):
        content.update(chunk)
    return (_LOCAL_NAME.sub("", name) if local else feature.modality) + content.hexdigest()


def prompt_digest(
    request: Request,
    num_tokens: int,
    adapter_of: Callable[[Request], str] = by_files,
    medium_of: Callable[[MultiModalFeatureSpec], str] = medium_name,
) -> str:
    """16 hex digits over the first `num_tokens` prompt tokens and what else decides their cached numbers: embeddings,
    images and other media (`media_names`), the adapter (`Adapters.name_of`).

    A receiver compares it with its own, so that parameters of one request are never used for another prompt.

    Raises:
        ProtocolError: a medium or the adapter of the request cannot be told from others.
    """
    digest = hashlib.blake2b(num_tokens.to_bytes(8, "little"), digest_size=8)
    if request.prompt_token_ids is not None:
        digest.update(np.asarray(request.prompt_token_ids[:num_tokens], dtype="<i8").tobytes())
    if request.prompt_embeds is not None:
        digest.update(request.prompt_embeds[:num_tokens].flatten().contiguous().view(torch.uint8).numpy())
    media = [medium_of(feature) for feature in request.mm_features or ()]
    digest.update(repr((media, adapter_of(request))).encode())
    return digest.hexdigest()


def owned_blocks(blocks: KVCacheBlocks, groups: Sequence[int]) -> list[KVCacheBlock]:
    """The real (non-null) blocks of the given groups."""
    return [block for group in groups for block in blocks.blocks[group] if not block.is_null]


def first_lacking(blocks: Sequence[KVCacheBlock], hit_blocks: int) -> int:
    """The number of the first block in a request's group that is to be filled; all are if it is 0.

    Those before it are null (nobody looks at them), or the prefix cache found them among the first `hit_blocks`. Groups
    may differ in this: vLLM may take the hit of its first full-attention group for the request's, and allocates anew
    what other groups lack of it.

    Source: vLLM 0.32, `KVCacheManager.get_computed_blocks_for_connector`, `SingleTypeKVCacheManager`
    (add_local_computed_blocks, allocate_external_computed_blocks); `BlockPool.get_new_blocks`: a new block has no hash.
    """
    found = (block.is_null or (i < hit_blocks and block.block_hash is not None) for i, block in enumerate(blocks))
    return next((i for i, has in enumerate(found) if not has), len(blocks))


def keep_unshared(manager: KVCacheManager, request_id: str, group: int, block: int) -> None:
    """Have the prefix cache never share the blocks of a request in KV-cache group `group` up to number `block`.

    The count of blocks that vLLM takes for cached already is raised: it goes on with those behind them. To be called
    after the blocks were allocated and before the request goes on with its received caches, which is when vLLM caches
    them. The count ends with the request.

    Source: vLLM 0.32, `SingleTypeKVCacheManager.cache_blocks`, `Scheduler._update_waiting_for_remote_kv`.
    """
    counts = manager.coordinator.single_type_managers[group].num_cached_block
    if request_id in counts:  # else vLLM has freed the request
        counts[request_id] = max(counts[request_id], block + 1)


def around_reset(pool: BlockPool, give_back: Callable[[], object], was_reset: Callable[[], object]) -> None:
    """Have `give_back` called before the pool forgets its prefixes, which it refuses while a block is referenced, and
    `was_reset` when it has.

    An idle engine takes no steps in which ended leases are given back, and vLLM asks its connector only after the pool.

    Source: vLLM 0.32, `Scheduler.reset_prefix_cache`, `KVCacheCoordinator.reset_prefix_cache`.
    """
    reset = pool.reset_prefix_cache

    def reset_prefix_cache() -> bool:
        give_back()
        if done := bool(reset()):
            was_reset()
        return done

    pool.reset_prefix_cache = reset_prefix_cache


def is_empty(pool: BlockPool) -> bool:
    """Whether a pool holds no caches: no block is in use, and none has a hash by which it would be found."""
    unused = pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # the null block is always in use
    return unused and all(block.block_hash is None for block in pool.blocks)


class HeldBlocks:
    """Extra references on the blocks of finished prefills, while a lease keeps them for a reader.

    vLLM can keep a finished request's blocks itself until its workers report them as sent, but then its engine steps
    without pause as long as one is kept, and takes the cores from whoever wants to read. With references of our own
    the engine goes idle. Called in the scheduler's thread only.
    """

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._blocks: dict[str, dict[int, KVCacheBlock]] = {}
        self._holders: Counter[int] = Counter()  # of each block

    @property
    def num_blocks(self) -> int:
        """Blocks that are held, each counted once however many leases share it."""
        return len(self._holders)

    @property
    def num_in_pool(self) -> int:
        """Blocks that the pool has for requests: all but the null block."""
        return int(self._pool.num_gpu_blocks) - 1

    def num_held_for(self, request_id: str) -> int:
        return len(self._blocks.get(request_id, ()))

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._blocks

    def ids_of(self, request_id: str) -> tuple[int, ...]:
        """The blocks that are held for the request."""
        return tuple(self._blocks.get(request_id, ()))

    @property
    def pool_sizes(self) -> tuple[int, int]:
        """Blocks of the pool, and how many of them are free."""
        return int(self._pool.num_gpu_blocks), int(self._pool.get_num_free_blocks())

    def holds_any(self, request_id: str, ids: Collection[int]) -> bool:
        """Whether one of these blocks is held for the request."""
        return any(block in ids for block in self._blocks.get(request_id, ()))

    def hold(self, request_id: str, tables: BlockTables) -> None:
        """Reference these blocks, null blocks and those held for it already aside; the request still owns them."""
        self.hold_ids(request_id, [i for table in tables for i in table.narrow.tolist()])

    def hold_ids(self, request_id: str, ids: Iterable[int]) -> None:
        """The same of a few."""
        held, blocks = self._blocks.get(request_id, ()), self._pool.blocks
        new = {i: blocks[i] for i in ids if i != NULL_BLOCK and i not in held}
        more = list(new.values())
        self._pool.touch(more)
        self._blocks.setdefault(request_id, {}).update(new)  # behind what may raise: what is here is given back
        self._holders.update(new.keys())

    def release(self, request_id: str) -> None:
        """Give the references back, the tail of the prompt first (vLLM evicts in this order)."""
        blocks = self._blocks.pop(request_id)
        self._pool.free_blocks(reversed(blocks.values()))
        for block in blocks:
            self._holders[block] -= 1
            if not self._holders[block]:
                del self._holders[block]


class Quarantine:
    """Extra references on blocks that a failed read may still write into.

    vLLM frees a failed request's blocks as soon as the failure is reported; a reference held here keeps them out of
    the free queue until the last rank says that nothing moves any more.
    """

    def __init__(self, pool: BlockPool):
        self._pool = pool
        self._blocks: dict[str, list[KVCacheBlock]] = {}
        self._ranks: dict[str, int] = {}

    @property
    def num_blocks(self) -> int:
        return sum(map(len, self._blocks.values())) if self._blocks else 0

    @property
    def num_free_blocks(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def add(self, request_id: str, blocks: list[KVCacheBlock], ranks: int) -> None:
        """`ranks` more ranks may still write into `blocks`, which the request still owns. Those of an earlier one of
        its name wait for them, too."""
        held = self._blocks.setdefault(request_id, [])
        known = {block.block_id for block in held}
        more = [block for block in blocks if block.block_id not in known]
        self._pool.touch(more)
        held += more
        self._ranks[request_id] = self._ranks.get(request_id, 0) + ranks

    def drain(self, request_id: str, ranks: int) -> None:
        """`ranks` ranks are done with the request's blocks; the last one gives them back."""
        if request_id not in self._ranks:
            return
        self._ranks[request_id] -= ranks
        if self._ranks[request_id] <= 0:
            del self._ranks[request_id]
            self._pool.free_blocks(reversed(self._blocks.pop(request_id)))

"""What is done to an engine beside its requests: weights and adapters that change in place, pauses, resets, sleep.

vLLM tells its connector of none of these but the reset of caches, and of that only when it is over. So the calls that
the engine core and its scheduler get are watched: both are looked for among the callers when the scheduler half is
built, and their methods are wrapped, each engine's own. What is wrapped does what it did; the `Operator` hears of it.

Weights are changed by methods of vLLM's workers, through the engine core's `collective_rpc`. Those of a worker
extension cannot be told from harmless ones by their names: their trainer names the new weights (`set_weight_version`),
while the engine is paused.

Source: vLLM 0.32 and 0.33, `v1/engine/core.py` (`collective_rpc`, `set_weight_version`, `pause_scheduler`,
`resume_scheduler`, `_finish_pause`, `add_lora`, `remove_lora`), `v1/core/sched/scheduler.py` (`reset_prefix_cache`,
`defer_block_free`), `v1/executor/abstract.py` (`sleep`, `discard`), `v1/worker/gpu_worker.py`,
`entrypoints/rl/online/api_router.py`.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import TYPE_CHECKING, Any, Final, Protocol

from vllm.v1.request import RequestStatus

from vllm_pd_connector.compat.base import FOLLOWS_SLEEP
from vllm_pd_connector.compat.engine import caller
from vllm_pd_connector.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from vllm_pd_connector.compat.types import KVCacheManager, LoRARequest, Request

CHANGE_WEIGHTS: Final = frozenset(
    {
        "add_lora",
        "finish_weight_update",
        "reload_weights",
        "remove_lora",
        "reset_weights",
        "start_draft_weight_update",
        "start_weight_update",
        "update_weights",
    }
)
"""Methods of vLLM's workers after which a model may have other numbers. Those of adapters are told of by the engine
core's own methods; who calls the workers' says nothing of the numbers."""
LOSES_WEIGHTS: Final = 2
"""The sleep level from which on weights are not kept."""


_QUEUED = frozenset(
    {
        RequestStatus.WAITING,
        RequestStatus.PREEMPTED,
        RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR,
        RequestStatus.WAITING_FOR_STREAMING_REQ,
    }
)


class Operator(Protocol):
    """Who hears of it, in the engine core's thread."""

    def weights_changing(self, what: str) -> None:
        """Before `what` changes weights in place."""

    def weights_named(self, version: str) -> None:
        """After somebody said which weights there are."""

    def adapter_loaded(self, lora: LoRARequest, *, done: bool) -> None:
        """After the workers have loaded an adapter, anew where `load_inplace` says so, and downloaded it where it lies
        nowhere here; `done`: all of them."""

    def adapter_removed(self, number: int) -> None:
        """Before they give it away; who uses it has it loaded again."""

    def pausing(self, mode: str, *, clears: bool) -> Callable[[], None]:
        """Before a pause begins: "abort", "wait" or "keep"; whether caches are cleared when it has come about. Returns
        what takes it back, where vLLM refuses it."""

    def resumed(self) -> None:
        """After a pause."""

    def resetting(self, *, forced: bool) -> None:
        """Before the prefix cache forgets; `forced`: requests that run are computed again, or the connector is to
        forget, too."""

    def all_reset(self) -> None:
        """After it has, and every other connector of this engine, too."""

    def not_reset(self) -> None:
        """After it could not, because blocks are in use."""

    def losing_caches(self) -> None:
        """Before the workers give the caches' memory away."""


def watch(operator: Operator, *, loads: bool) -> Any:
    """Have `operator` hear of what is done to the engine that is being built further up in this thread. Returns vLLM's
    scheduler; None if no engine is being built.

    `loads`: caches are received here, whatever the role says. Where a step is scheduled while another is in flight, the
    blocks of a request that was aborted are then given to no other before the step that may still write them is done.
    vLLM sees to that for consumers alone, but a prefill instance receives conversations, and in a MultiConnector the
    role that vLLM looks at is not ours.

    Raises:
        InvalidConfig: an engine whose scheduler is another than vLLM's.
    """
    scheduler = caller("vllm.v1.core.sched.scheduler", "Scheduler")
    core = caller("vllm.v1.engine.core", "EngineCore")
    if core is not None and scheduler is None:
        raise InvalidConfig(
            f"scheduler_cls is {core.vllm_config.scheduler_config.scheduler_cls!r}: it is not derived from vLLM's "
            "Scheduler, whose resets this connector follows and whose requests it has computed again; derive it, or "
            "leave it out"
        )
    if scheduler is not None:
        _watch_scheduler(scheduler, operator)
        scheduler.defer_block_free |= loads and scheduler.vllm_config.max_concurrent_batches > 1
    if core is not None:
        _watch_weights(core, operator)
        _watch_pauses(core, operator)
    return scheduler


def _watch_scheduler(scheduler: Any, operator: Operator) -> None:
    def reset(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = _given(call, args, kwargs)
        reset_running_requests, reset_connector = given["reset_running_requests"], given["reset_connector"]
        if reset_running_requests and _writes_on(scheduler):
            raise RuntimeError(
                "the prefix cache was not reset, and nothing was ended for it: a step is under way that may still "
                "write into the blocks of requests that run. POST /pause?mode=keep waits for it and then resets; "
                "POST /resume goes on"
            )
        operator.resetting(forced=reset_running_requests or reset_connector)
        done = False
        try:
            done = call(*args, **kwargs)
        finally:
            if not done:
                operator.not_reset()
            elif reset_connector:
                operator.all_reset()
        return done

    _wrap(scheduler, "reset_prefix_cache", reset)


def _writes_on(scheduler: Any) -> bool:
    """Whether vLLM would keep the blocks of a request that it preempts now (`_request_blocks_can_be_freed`)."""
    return bool(scheduler.defer_block_free) and any(
        request.last_sched_seq > scheduler.processed_step_seq for request in scheduler.running
    )


def _watch_weights(core: Any, operator: Operator) -> None:
    def collective_rpc(call: Callable[..., Any], method: Any, *args: Any, **kwargs: Any) -> Any:
        name = method if isinstance(method, str) else getattr(method, "__name__", "")
        if name in CHANGE_WEIGHTS:
            operator.weights_changing(name)
        return call(method, *args, **kwargs)

    def set_weight_version(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = call(*args, **kwargs)
        operator.weights_named(_given(call, args, kwargs)["weight_version"])
        return result

    def add_lora(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        done, given = False, _given(call, args, kwargs)
        try:
            done = call(*args, **kwargs)
        finally:
            operator.adapter_loaded(given["lora_request"], done=bool(done))
        return done

    def remove_lora(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        operator.adapter_removed(_given(call, args, kwargs)["lora_id"])
        return call(*args, **kwargs)

    calls: list[Callable[..., Any]] = [collective_rpc, set_weight_version, add_lora, remove_lora]
    for instead in calls:
        _wrap(core, instead.__name__, instead)


def _require_lasting_caches(core: Any) -> None:
    """Refuse to give away memory that a transport has registered and is not told of, as where sleep mode is enabled
    (`served.require_lasting_memory`): vLLM asks nobody whether it is, and the allocator alone is enough.

    Raises:
        RuntimeError: this vLLM tells connectors nothing, and the caches' memory would go.

    Source: vLLM 0.32, `EngineCore.sleep`, `GPUWorker.initialize_from_config`.
    """
    if not FOLLOWS_SLEEP and core.vllm_config.model_config.enable_cumem_allocator:
        raise RuntimeError(
            "the caches' memory cannot be given away: this vLLM tells no connector, and transports have it registered; "
            "nothing was done. Serve without --enable-cumem-allocator, or with vLLM 0.33 or later"
        )


def _watch_pauses(core: Any, operator: Operator) -> None:
    number = 2  # of the pauses until the next resume, never `True`: vLLM carries it as `clear_cache`

    def pause_scheduler(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        given = _given(call, args, kwargs)
        clears = bool(given["clear_cache"])
        take_back = operator.pausing(given["mode"], clears=clears)
        try:
            return _call(call, args, kwargs, clear_cache=number if clears else 0)
        except ValueError:  # no such mode, or not in this kind of engine
            take_back()
            raise

    def resume_scheduler(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal number
        result = call(*args, **kwargs)
        operator.resumed()
        number += not core.is_scheduler_paused()
        return result

    def finish_pause(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        clear_cache = _given(call, args, kwargs)["clear_cache"]
        # vLLM goes on to wait for a pause that was taken back before it came about, and would clear what runs then, or
        # sleep. Who asked for it is not to be told that it did: it may change weights next.
        if clear_cache and clear_cache != number:
            raise RuntimeError(
                "the pause was taken back (POST /resume or /wake_up) before it came about: nothing was cleared and the "
                "engine goes on; pause again"
            )
        return _call(call, args, kwargs, clear_cache=bool(clear_cache))

    def fall_asleep(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if _given(call, args, kwargs)["level"] > 0:  # before leases are ended for it
            _require_lasting_caches(core)
        return call(*args, **kwargs)

    def sleep(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        operator.losing_caches()
        if (level := _given(call, args, kwargs)["level"]) >= LOSES_WEIGHTS:
            operator.weights_changing(f"sleep level {level}")
        return call(*args, **kwargs)

    def discard(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if "kv_cache" in _given(call, args, kwargs)["tags"]:
            _require_lasting_caches(core)
            operator.losing_caches()
        return call(*args, **kwargs)

    _wrap(core, "pause_scheduler", pause_scheduler)
    _wrap(core, "resume_scheduler", resume_scheduler)
    _wrap(core, "_finish_pause", finish_pause)
    _wrap(core, "sleep", fall_asleep)
    _wrap(core.model_executor, "sleep", sleep)
    _wrap(core.model_executor, "discard", discard)


def _wrap(owner: Any, name: str, instead: Callable[..., Any]) -> None:
    """Have `owner.name(…)` call `instead(original, …)`."""
    call = getattr(owner, name)

    @wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return instead(call, *args, **kwargs)

    setattr(owner, name, wrapped)


def _given(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a method of vLLM's gets, by its names, defaults included: a later release may have more of them."""
    bound = inspect.signature(call).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def _call(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], **changed: Any) -> Any:
    """Call it so, but for these arguments."""
    bound = inspect.signature(call).bind(*args, **kwargs)
    bound.arguments.update(changed)
    return call(*bound.args, **bound.kwargs)


def will_free_blocks(scheduler: Any) -> bool:
    """Whether a request runs, loads, or has ended and is kept, or a step in flight still writes what was freed; those
    that wait in a queue have no blocks, or wait for more, or, a streaming session, for what its client says next."""
    states = (request.status for request in scheduler.requests.values())
    return bool(scheduler.deferred_frees) or not _QUEUED.issuperset(states)


def with_adapter(scheduler: Any, number: int) -> set[str]:
    """The requests that a scheduler has with the adapter of this number."""
    lora = ((name, request.lora_request) for name, request in scheduler.requests.items())
    return {name for name, found in lora if found is not None and found.lora_int_id == number}


def compute_here(scheduler: Any, request_id: str, *, at_once: bool) -> bool:
    """Have vLLM compute a request itself whose load has just ended, or ended and was not scheduled since; `at_once`:
    its blocks are given back now. Returns whether there is such a request.

    It takes the way of a failed load under `recompute`, whatever the policy is: nothing of it has failed. vLLM may have
    put it among those that wait already, with its blocks, and have passed over it (no place for its adapter, no block
    for its next token). Then its caches are in the prefix cache, too, where they would be found again.

    Source: vLLM 0.32 and 0.33, `Scheduler._handle_failed_recving`, `_update_waiting_for_remote_kv`, `_holds_kv_blocks`.
    """
    request, manager = scheduler.requests.get(request_id), scheduler.kv_cache_manager
    if request is None:
        return False
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
        scheduler.failed_recving_kv_req_ids.add(request_id)
    elif request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) and request.num_computed_tokens:
        at_once = True
        manager.evict_blocks(set(_received(request, manager)))
    else:
        return False
    request.num_computed_tokens = 0
    if at_once:
        manager.free(request)
    return True


def _received(request: Request, manager: KVCacheManager) -> Iterator[int]:
    """The blocks behind those that vLLM's prefix cache had of a request when it began to load; all, if it does not say
    (`Scheduler.schedule` notes it of requests that were not preempted)."""
    stats = request.prefill_stats
    local = stats.num_local_cached_tokens if stats is not None and not request.num_preemptions else 0
    groups = zip(manager.get_block_ids(request.request_id), manager.coordinator.single_type_managers, strict=True)
    for ids, group in groups:
        yield from ids[local // group.block_size :]

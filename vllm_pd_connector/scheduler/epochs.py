"""Which caches of this engine were computed with the weights that it has now (`protocol.weights`).

A prefill is handed over under one name, so all of it must be of one epoch: the one in which it began, or began anew
after a preemption. Several calls make one change that peers are told of; an engine may step between two of them, so
here each call ends an epoch. What vLLM's prefix cache holds when weights change is of the former ones until vLLM resets
it, and what other connectors of the engine hold until they do; a prefill that begins with a hit is of no epoch.
Trainers have vLLM reset its caches while it is paused (`POST /pause` does), before they change anything, so that
nothing is refused.

vLLM keeps encoded media, too, and finds them by their content, and by their adapter's name where that changes the
encoder; it forgets them in a pause that clears caches. A prefill with media that were encoded before is of no epoch.

An adapter is loaded again in place without any of this. Its name is its content, so nothing waits for one; but whatever
had come before the change is not handed over: it may be of both, or was promised under the former name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vllm_pd_connector.compat.blocks import begun_in, is_empty, media_begun_in, media_of
from vllm_pd_connector.compat.model.adapters import Adapters
from vllm_pd_connector.protocol.weights import HOW_TO_NAME, OwnWeights

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm_pd_connector.compat.types import BlockPool, LoRARequest, Request, SchedulerOutput

NO_EPOCH: Final = -1
IN_TURN: Final = -2
"""In the place of an adapter's age: another was loaded in turn with it."""
OLD_MEDIA: Final = -3
"""In the place of an epoch: it has media that were encoded in an earlier one, or with a former adapter."""


class Epochs:
    """See the module. One per engine, in the scheduler's thread. `adapter_ids`, `lora` (vLLM's): as configured;
    `beside`: whether other connectors of this engine may hold what was computed, and have vLLM find it."""

    def __init__(self, adapter_ids: Mapping[str, str], lora: Any, beside: Callable[[], bool]) -> None:
        self.own = OwnWeights()
        self.adapters = Adapters(adapter_ids, lora, lambda: bool(self._came) or self._cached())
        self.pool: BlockPool | None = None
        self.encoded: Callable[[], Mapping[str, object]] = dict  # `encoded_media`, once there is a scheduler
        self._encoded_before: dict[str, object] = {}
        self._beside = beside
        self._stored = True  # other connectors may hold something, if there are any
        self._outdated = False  # the prefix cache may hold what other weights computed
        self._epoch = 0
        self._begun: dict[str, int] = {}  # of running prefills: the epoch of their caches
        self._came: dict[str, tuple[int, LoRARequest]] = {}  # with which adapter, and its age then

    def moved(self) -> None:
        """An epoch has ended. Leases must have been given back."""
        self._epoch += 1
        self._outdated = self._cached()
        self._encoded_before = dict(self.encoded())

    def adapter_moved(self, name: str) -> None:
        """An adapter of this name has another content."""
        before = self._encoded_before
        self._encoded_before = {
            key: one
            for key, one in self.encoded().items()
            if one is before.get(key, self) or key.startswith(f"{name}:")
        }

    def _are_old(self, media: Iterable[str]) -> bool:
        """Whether vLLM still has one of these as it was encoded before."""
        names = [name for name in media if name in self._encoded_before]
        held = self.encoded() if names else {}
        return any(held.get(name, self) is self._encoded_before[name] for name in names)

    def _cached(self) -> bool:
        return self.pool is None or not is_empty(self.pool) or (self._stored and self._beside())

    def was_reset(self) -> None:
        """The prefix cache has forgotten everything, and so have other connectors."""
        self._outdated = self._stored = False
        if self._encoded_before:
            held = self.encoded()
            self._encoded_before = {key: one for key, one in self._encoded_before.items() if held.get(key) is one}
        self.adapters.was_reset(lora for _, lora in self._came.values())

    def arrived(self, request: Request) -> None:
        """Any request has come."""
        if (lora := request.lora_request) is None:
            return
        age = self.adapters.age(request)
        others = (other for _, other in self._came.values() if other.load_inplace) if age else ()
        if any(self.adapters.in_turn(other, lora) for other in others):
            age = IN_TURN
        self._came[request.request_id] = age, lora

    def advance(self, output: SchedulerOutput, *wanted: Mapping[str, Request]) -> None:
        """A step begins: of the requests whose caches may be handed over (those in `wanted`), remember the epochs of
        those that begin with it."""
        self._stored = self._stored or bool(output.num_scheduled_tokens)
        for request_id, hit in begun_in(output) if any(wanted) else ():
            for request in (some[request_id] for some in wanted if request_id in some):
                self._begun[request_id] = NO_EPOCH if hit and self._outdated else self._epoch
                if self._are_old(media_of(request)):
                    self._begun[request_id] = OLD_MEDIA
                if hit and request.lora_request is not None and self.adapters.spoilt(request):
                    self._came[request_id] = NO_EPOCH, request.lora_request
        if self._encoded_before and not self._outdated:
            media, anew = media_begun_in(output)
            self._outdated = anew or self._are_old(media)  # what any request computes of them may be found later

    def not_advanced(self) -> None:
        """A defect met the beginning of a step: it may have computed anything with media of an earlier epoch."""
        self._outdated = self._outdated or bool(self._encoded_before)

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._begun.pop(request_id, None)
        self._came.pop(request_id, None)

    def mixed(self, request: Request) -> str:
        """Why a finished prefill is not to be handed over; empty if it is."""
        request_id = request.request_id
        if self.own.nameless:
            return f"weights: changed in place and not named yet; {HOW_TO_NAME}"
        begun = self._begun.get(request_id, self._epoch)
        if begun == NO_EPOCH:
            return (
                "weights: changed in place, and it began with a prefix that may be of the former ones: "
                "have the prefix cache reset when weights change (POST /pause does it, or POST /reset_prefix_cache); "
                "beside a connector that cannot be reset, start again with its store empty"
            )
        if begun == OLD_MEDIA:
            return (
                "weights: changed in place, its adapter's perhaps, and its media had been encoded with former ones: "
                "have vLLM forget encoded media when they change (POST /pause does it, or POST /reset_encoder_cache, "
                "then POST /reset_prefix_cache)"
            )
        if begun != self._epoch:
            return f"weights: changed in place while it was computed (epoch {begun} then, {self._epoch} now)"
        return self._of_two_adapters(request)

    def _of_two_adapters(self, request: Request) -> str:
        if request.request_id not in self._came:
            return ""
        now, (came, _) = self.adapters.age(request), self._came[request.request_id]
        if came == IN_TURN:
            return (
                "lora_request: when it came, requests still ran that have its adapter read from another path in each "
                "of their steps: let those end before weights are loaded in place"
            )
        if came == NO_EPOCH:
            return (
                "lora_request: the adapter's name and path were those of other weights, and it began with a prefix "
                "that may be of these: load changed weights from a new path, or have the prefix cache reset (POST "
                "/reset_prefix_cache)"
            )
        if came != now:
            return f"lora_request: the adapter was loaded in place since it came (change {came} then, {now} now)"
        return ""

"""What an operator or a trainer does to the engine, as far as caches are handed over or on their way (`Operator`).

**New weights.** When weights begin to change, leases end, pushes under way fail, loads are given up, and caches that
have come for requests which have not gone on with them are not used: vLLM computes those here. Until the weights have a
name nothing is handed over and nothing taken (`epochs`).

**An adapter that is loaded again in place** is another for the requests that have it, and for nobody else: what they
load is given up in the same way, and none that came before is handed over. Its content names it, so nothing waits for a
name, and leases of what was computed before go on under the name that they have.

**Reset.** vLLM's prefix cache forgets only if no block is in use. A forced reset (one that runs requests anew, or that
is meant for the connector, too) ends the leases and gives back what has come; a plain one leaves them, and vLLM says
that it was not done. Either way the log says what is in the way.

**Pause.** One that clears caches resets them, by force, when vLLM finds the engine idle. It is not idle as long as
`busy`: under `wait` until prefills' leases were read or have run out; else they are ended, and waited for is only what
still moves: pushes that a worker has not given up yet, reads that failed and may still write, and the loads that `keep`
keeps. It waits without a limit: where a prefill machine is gone while it writes, nobody ever says that this is over. An
engine that is told to end does not wait: vLLM would wait with it, and be killed.

**Sleep.** vLLM resets caches first. Before the memory goes, peers are told that the instance leaves; the workers close
their transports then. `Producer.serve` is called again after the waking, and begins a new incarnation.
"""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING

from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.blocks import encoded_media
from vllm_pd_connector.compat.operations import compute_here, watch, will_free_blocks, with_adapter
from vllm_pd_connector.observability.stats import ComputedHere
from vllm_pd_connector.protocol.lease import End
from vllm_pd_connector.protocol.weights import HOW_TO_NAME

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm_pd_connector.compat.beside import Beside
    from vllm_pd_connector.compat.blocks import Quarantine
    from vllm_pd_connector.compat.types import LoRARequest, Request
    from vllm_pd_connector.scheduler.consumer import Consumer
    from vllm_pd_connector.scheduler.epochs import Epochs
    from vllm_pd_connector.scheduler.producer import Producer

logger = init_logger(__name__)

WRITES_END_S = 5.0
"""For so long a forced reset waits for writes from leased blocks to end: the workers are told to give them up."""
_LOOK_S = 0.002
_TELL_EVERY_S = 10.0

_WRITTEN_INTO = "blocks that a failed read may still write into"
_NO_END = (
    ". That may have no end: where the machine of the prefill instance is gone, nobody says that nothing is written "
    "any more, and only a restart of this instance gives the blocks back. /resume takes the pause back"
)


class Operations:
    """See the module; an `Operator`. One per engine, in the scheduler's thread. `ends`: whether the engine was told to;
    `loads`: see `watch`."""

    def __init__(
        self,
        epochs: Epochs,
        producer: Producer,
        consumer: Consumer,
        beside: Beside,
        quarantine: Callable[[], Quarantine | None],
        ends: Callable[[], bool],
        *,
        loads: bool,
    ) -> None:
        self._epochs = epochs
        self._producer = producer
        self._consumer = consumer
        self._beside = beside
        self._quarantine = quarantine
        self._ends = ends
        self._pause = ""  # the mode of a pause that clears caches
        self._tell_at = 0.0
        self._scheduler = watch(self, loads=loads)
        if self._scheduler is not None:
            epochs.encoded = partial(encoded_media, self._scheduler)

    def weights_changing(self, what: str) -> None:
        self._epochs.adapters.removed()  # with some of these calls the workers give them away
        if self._epochs.own.changing():
            self._move(f"the weights are changed in place ({what})")
            logger.warning("%s: nothing is handed over or taken until they are named; %s", what, HOW_TO_NAME)
        else:
            self._epochs.moved()

    def adapter_loaded(self, lora: LoRARequest, *, done: bool) -> None:
        self._epochs.adapters.loaded(lora, done=done)
        self._adapters_moved()

    def adapter_removed(self, number: int) -> None:
        self._epochs.adapters.removed(number)

    def arrived(self, request: Request) -> None:
        """Any request has come: vLLM may read its adapter's files anew."""
        self._epochs.arrived(request)
        self._adapters_moved()

    def _adapters_moved(self) -> None:
        for lora in self._epochs.adapters.take_moved():
            reason = f"lora_request: adapter {lora.lora_name!r} was loaded in place from {lora.lora_path}"
            logger.warning("%s: what requests that came before have computed or load is not used", reason)
            self._epochs.adapter_moved(lora.lora_name)
            names = with_adapter(self._scheduler, lora.lora_int_id)
            self._compute_here(self._consumer.outdate(reason, names), at_once=False)

    def weights_named(self, version: str) -> None:
        if self._epochs.own.named(version):
            self._move(f"the weights are called {version!r} from now on")
        else:
            self._producer.compute_with("")
        logger.info("weights: %s, epoch %d", self._epochs.own.now.name, self._epochs.own.now.epoch)

    def _move(self, reason: str) -> None:
        """An epoch ends."""
        self._producer.compute_with(reason)
        self._producer.end_leases(End.WEIGHTS)
        self._compute_here(self._consumer.outdate(reason), at_once=False)
        self._epochs.moved()

    def received(self, request_id: str, spared: str = "", *, failed: bool) -> None:
        """Every rank of this engine has reported a receive. `spared`: why what came is of no use, if it is not."""
        try:
            if spared:
                self._consumer.lost(request_id, spared)
            of_use = self._consumer.received(request_id, failed=failed)
        except Exception:  # a defect, after which nobody knows what came
            logger.exception("request %s: the end of its load", request_id)
            of_use = False
        if not of_use and not failed:
            self._compute_here({request_id}, at_once=False)

    def pausing(self, mode: str, *, clears: bool) -> Callable[[], None]:
        before = self._pause

        def take_back() -> None:
            self._pause = before

        # One that clears nothing, behind another that waits, does not take from it what it waits for.
        self._pause, self._tell_at = mode if clears else before, time.monotonic() + _TELL_EVERY_S
        return take_back

    def resumed(self) -> None:
        self._pause = ""

    @property
    def runs(self) -> bool:
        """Whether vLLM has requests that will give blocks back by themselves, or nobody knows."""
        return self._scheduler is None or will_free_blocks(self._scheduler)

    @property
    def busy(self) -> bool:
        """Whether a pause has not come about yet: vLLM asks before it clears the caches, and before it ends."""
        if not self._pause or self._ends():
            return False
        if self._pause != "wait":
            self._producer.end_leases(End.RESET)
        self._producer.make_room()
        if not (left := self._in_use()):
            return False
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + _TELL_EVERY_S
            no_end = _NO_END if left.endswith(_WRITTEN_INTO) and ", " not in left else ""
            logger.warning("a pause (mode %s) waits until it can clear the caches: %s%s", self._pause, left, no_end)
        return True

    def resetting(self, *, forced: bool) -> None:
        if not forced:
            return
        until = time.monotonic() + WRITES_END_S
        self._producer.end_leases(End.RESET)
        while self._producer.num_leases and time.monotonic() < until:
            time.sleep(_LOOK_S)
            self._producer.drain()
        self._compute_here(self._consumer.take_arrived(), at_once=True)

    def all_reset(self) -> None:
        if not (keeping := self._beside.keeping):
            return self._epochs.was_reset()
        logger.warning(
            "the caches were reset but for those of %s, which cannot be: when weights change now, prefills that begin "
            "with a hit are not handed over, since it may be of former ones. Empty that store by its own means, and "
            "start this instance again",
            ", ".join(keeping),
        )

    def not_reset(self) -> None:
        logger.error(
            "the prefix cache was not reset: %s. POST /pause waits for what is in the way (mode wait) or ends it; "
            "/reset_prefix_cache with reset_external=true ends the leases",
            self._in_use() or "vLLM's own requests hold blocks",
        )

    def losing_caches(self) -> None:
        self._producer.leave()

    def _in_use(self) -> str:
        """What holds blocks beside vLLM's own requests; empty if nothing does."""
        quarantine, conversations = self._quarantine(), self._producer.lending.num_held
        found = {
            "prefills held for decode instances": self._producer.num_leases - conversations,
            "conversations held for a next turn": conversations,
            "requests that load": sum(map(self._consumer.loads, self._consumer.waiting)),
            _WRITTEN_INTO: quarantine.num_blocks if quarantine is not None else 0,
        }
        return ", ".join(f"{count} {what}" for what, count in found.items() if count)

    def _compute_here(self, request_ids: set[str], *, at_once: bool) -> None:
        for request_id in request_ids:
            if compute_here(self._scheduler, request_id, at_once=at_once):
                self._beside.forget_blocks(request_id)
                self._consumer.computed.counted[ComputedHere.OUTDATED] += 1
                logger.warning("request %s: the caches that have come for it are not used, it is computed here",
                               request_id)  # fmt: skip

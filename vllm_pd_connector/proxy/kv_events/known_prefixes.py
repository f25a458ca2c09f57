"""What the router knows of each instance's prefix cache, by the events that it heard; no sockets here.

An instance numbers its batches from 0, and publishes each once: what was published before a router listened, or while
the connection was down, is gone, unless the instance keeps it for a replay.

    heard                              then
    the number that is due             it is taken over
    a higher one                       `missing_from` says from which number on to ask for a replay; what a replay does
                                       not bring is a loss, and everything known of the instance is forgotten
    a lower one than the last heard    the instance is another process: forgotten, and its batches count from 0
    a lower one than is due            a replay brought it already: passed over
    a batch that cannot be read,       forgotten; what comes later is taken over
    or blocks beyond all bounds

What is forgotten is learned again as the instance stores blocks. Meanwhile it is taken for an instance that holds less
than it does, which costs hits and is shown by `losses`.

Not told apart is an instance that was started anew and had published exactly as many batches before the router was
connected again, or more if it keeps them for a replay. One that says another engine id is forgotten by `Fleet`, and
so is one at which nobody listened meanwhile.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.proxy.kv_events.held_blocks import MAX_BLOCKS, HeldBlocks
from vllm_pd_connector.proxy.kv_events.wire import BlockStored, decode_batch

if TYPE_CHECKING:
    from collections.abc import Iterable

    from vllm_pd_connector.proxy.kv_events.block_keys import PromptBlocks
    from vllm_pd_connector.proxy.kv_events.wire import Batch

MAX_ADAPTERS = 1024


class Loss(StrEnum):
    """Why what was known of an instance was forgotten."""

    GAP = "gap"
    RESTART = "restart"
    UNREADABLE = "unreadable"


class Announcements:
    """One instance's events in their order; see the module."""

    def __init__(self, limit: int = MAX_BLOCKS):
        self.held = HeldBlocks(limit)
        self.losses: Counter[Loss] = Counter()
        self._due = 0
        self._last_heard = -1

    def missing_from(self, number: int) -> int | None:
        """Call it with the number of each message that was published, before `take`. The first number of what is
        missing before it, None if nothing is."""
        if number <= self._last_heard:
            self._forget(Loss.RESTART)
            self._due = 0
        self._last_heard = number
        return self._due if number > self._due else None

    @property
    def due(self) -> int:
        """The number of the batch that comes next."""
        return self._due

    def take(self, number: int, payload: bytes) -> Batch | None:
        """A batch that was published or replayed; returns it if it was taken over.

        Raises:
            ProtocolError: it cannot be read, or says what cannot be; what was known is forgotten.
        """
        if number < self._due:
            return None
        if number > self._due:
            self._forget(Loss.GAP)
        self._due = number + 1
        try:
            batch = decode_batch(payload)
            self.held.apply(batch.events)
        except ProtocolError:
            self._forget(Loss.UNREADABLE)
            raise
        return batch

    def _forget(self, loss: Loss) -> None:
        self.losses[loss] += 1
        self.held.clear()


class KnownPrefixes:
    """All instances that are followed, by their URLs."""

    def __init__(self) -> None:
        self._instances: dict[str, Announcements] = {}
        self._adapters: Bounded[str, None] = Bounded(MAX_ADAPTERS)

    def begin(self, url: str) -> Announcements:
        """Know nothing of an instance yet."""
        return self._instances.setdefault(url, Announcements())

    def forget(self, url: str) -> None:
        self._instances.pop(url, None)

    def of(self, url: str) -> Announcements:
        """What is known of an instance that is followed."""
        return self._instances[url]

    def take(self, url: str, number: int, payload: bytes) -> None:
        """A batch of an instance that is followed.

        Raises:
            ProtocolError: as `Announcements.take`.
        """
        batch = self._instances[url].take(number, payload)
        for event in batch.events if batch is not None else ():
            if isinstance(event, BlockStored) and event.lora_name and event.lora_name not in self._adapters:
                self._adapters[event.lora_name] = None

    def lengths(self, prompt: PromptBlocks | None, urls: Iterable[str]) -> dict[str, int]:
        """How many tokens of a prompt, from the first on, each of these instances holds; none for unknown tokens.

        A model is taken for a LoRA adapter once an instance has announced blocks of one with this name.
        """
        if prompt is None:
            return {}
        adapter = prompt.model in self._adapters
        return {
            url: known.held.length(prompt, adapter) for url in urls if (known := self._instances.get(url)) is not None
        }

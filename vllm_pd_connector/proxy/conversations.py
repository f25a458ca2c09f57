"""Which decode instance holds what of a conversation, by the prompts that the router has seen: nothing is asked of
clients, and nothing is taken from them but their prompts.

A turn is remembered under its whole prompt: of a chat under all of its messages, else under the pieces by which
prompts are known (`choice`). The next turn begins with that prompt, so its beginnings are looked up, longest first.
What is found is used once, since it can be read once. It may be wrong (two clients that say the same are one
conversation here): the prefill instance compares the tokens, and computes what is not the same.

vLLM tells a request's parameters where it answers in one piece. Of a stream the router knows the name that it gave the
decode request, under which the prefill instance asks the decode instance, and the engine: of several data-parallel ones
it chooses itself, by the header that vLLM's API server obeys. The one that had the last turn goes first, unless it has
`slack` requests more than the least busy one.

Bounded by number and by size; the oldest are forgotten first, and what is of an instance that is gone.
"""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.proxy.choice import prefix_keys
from vllm_pd_connector.proxy.instance import pinned
from vllm_pd_connector.routing.handoff import NOTHING

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from vllm_pd_connector.instance_info import EngineInfo
    from vllm_pd_connector.proxy.instance import Instance
    from vllm_pd_connector.proxy.legs import Headers

MAX_TURNS = 1 << 16
MAX_BYTES = 256 << 20
KEPT_S = 3600.0
"""After which a turn is forgotten: longer than decode instances keep one for a user who thinks."""
MAX_MESSAGES = 1024
MAX_PIECES = 1024
"""More than decide where a prompt goes: of two conversations with one long beginning each keeps its own. 3 ms are spent
on so many."""


@dataclass(frozen=True, slots=True)
class _Turn:
    engine_id: str
    params: bytes
    until: float


@dataclass(frozen=True, slots=True)
class Taken:
    """A turn that was looked up, and is not here any more."""

    key: bytes
    turn: _Turn

    @property
    def params(self) -> dict[str, Any]:
        """For the prefill of the next."""
        found: dict[str, Any] = json.loads(self.turn.params)
        return found


class Conversations:
    """See the module."""

    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self._turns: dict[bytes, _Turn] = {}
        self._bytes, self._max_bytes = 0, max_bytes

    def __len__(self) -> int:
        return len(self._turns)

    def remember(self, keys: Sequence[bytes], engine_id: str, params: Mapping[str, Any]) -> None:
        """A decode instance's engine holds the turn with these keys; `params` are for the prefill of the next."""
        if not keys:
            return
        self._pop(keys[-1])
        self._add(keys[-1], _Turn(engine_id, json.dumps(params).encode(), time.monotonic() + KEPT_S))

    def _add(self, key: bytes, turn: _Turn) -> None:
        self._turns[key] = turn
        self._bytes += len(turn.params)
        while self._turns and (len(self._turns) > MAX_TURNS or self._bytes > self._max_bytes):
            self._pop(next(iter(self._turns)))

    def take(self, keys: Sequence[bytes], usable: Collection[str]) -> Taken | None:
        """What is known for a prefill with these keys; `usable` are the ids of the engines that are there."""
        for key in reversed(keys):
            if (turn := self._pop(key)) is not None and turn.engine_id in usable and turn.until > time.monotonic():
                return Taken(key, turn)
        return None

    def put_back(self, taken: Taken) -> None:
        """It was told to nobody: it is there for the next, unless a newer one has its place."""
        if taken.key not in self._turns:
            self._add(taken.key, taken.turn)

    def _pop(self, key: bytes) -> _Turn | None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._bytes -= len(turn.params)
        return turn


class Turn:
    """One request: what is known of its conversation, and what will be. Without a memory nothing is.

    `usable` are the ids of the engines of decode instances that are there.
    """

    def __init__(
        self,
        memory: Conversations | None = None,
        body: Mapping[str, Any] = NOTHING,
        usable: Collection[str] = (),
        slack: int = 0,
    ):
        self._memory = memory
        self._slack = slack
        self._keys = turn_keys(body) if memory is not None else []
        self._taken = memory.take(self._keys, usable) if memory is not None else None
        self._params = self._taken.params if self._taken is not None else {}
        self._told = False
        self._engine: EngineInfo | None = None
        self._counted: tuple[Instance, int] | None = None

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self._leave()
        if self._memory is not None and self._taken is not None and not self._told:
            self._memory.put_back(self._taken)

    @property
    def found(self) -> bool:
        """Whether an engine holds the prompt's beginning."""
        return bool(self._params)

    def brought_to(self, instance: Instance) -> dict[str, Any]:
        """Parameters for a prefill instance beside the usual."""
        return self._params if reads_turns(instance) else {}

    def was_brought(self) -> None:
        """A prefill instance was sent the request; without that the turn is there for the next attempt."""
        self._told = True

    def sent_to(self, instance: Instance) -> Headers:
        """A decode instance gets the request: which of its engines, as headers. A former one did not take it."""
        self._leave()
        self._engine = None
        if self._memory is None or not reads_turns(instance):
            return {}
        index = self._choose(instance)
        self._engine, self._counted = instance.engines[index], (instance, index)
        instance.at_engine[index] += 1
        return pinned(instance.engines, index)

    def ended(self, name: str, answer: object = None) -> None:
        """The turn was answered in full: in one piece, or by a stream, in which only its name is known. Of one without
        a name nothing is kept."""
        if self._memory is None or self._engine is None or not name:
            return
        params = by_name(self._engine, name) if answer is None else told(answer)
        if params is not None:
            self._memory.remember(self._keys, self._engine.engine_id, params)

    def _choose(self, instance: Instance) -> int:
        least = min(instance.at_engine[index] for index in instance.engines)
        home = self._taken.turn.engine_id if self._taken is not None else ""
        for index, engine in instance.engines.items():
            if engine.engine_id == home and instance.at_engine[index] <= least + self._slack:
                return index
        return min(instance.in_turn(), key=lambda index: instance.at_engine[index])

    def _leave(self) -> None:
        if self._counted is not None:
            instance, index = self._counted
            instance.at_engine[index] -= 1
            self._counted = None


def turn_keys(body: Mapping[str, Any]) -> list[bytes]:
    """By what a prompt and its beginnings are known here, shortest first."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return prefix_keys(body, MAX_PIECES)
    digest = hashlib.blake2b(str(body.get("model")).encode(errors="surrogatepass"), digest_size=16)
    keys = []
    for message in messages[:MAX_MESSAGES]:
        said = json.dumps(message, sort_keys=True, separators=(",", ":"))
        digest.update(len(said).to_bytes(8, "little") + said.encode())
        keys.append(digest.digest())
    return keys


def reads_turns(instance: Instance) -> bool:
    """Whether a prefill instance reads what decode instances keep, or a decode instance keeps it: all its engines."""
    return bool(instance.engines) and all(engine.conversations for engine in instance.engines.values())


def by_name(engine: EngineInfo, name: str) -> dict[str, Any]:
    """Parameters by which a prefill instance asks a decode instance's engine for what it keeps of a request."""
    return {
        "remote_engine_id": engine.engine_id,
        "remote_host": engine.side_channel_host,
        "remote_port": engine.side_channel_port,
        "remote_request_id": name,
        **({"pd_connector": {"server_key": engine.server_key}} if engine.server_key else {}),
    }


def told(answer: object) -> dict[str, Any] | None:
    """What a decode instance's answer says of the turn that it keeps."""
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return params if isinstance(params, dict) and params.get("do_remote_decode") is True else None

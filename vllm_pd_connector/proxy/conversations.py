"""Which decode instance holds what of a conversation, by the prompts that the router has seen: nothing is asked of
clients, and nothing is taken from them but their prompts.

A turn is remembered under its whole prompt: of a chat under all of its messages, else under the pieces by which
prompts are known (`choice`). The next turn begins with that prompt, so its beginnings are looked up, longest first.
What is found is used once, since it can be read once. It may be wrong (two clients that say the same are one
conversation here): the prefill instance compares the tokens, and computes what is not the same.

vLLM tells a request's parameters where it answers in one piece. Of a stream the router knows the name that it gave the
decode request, under which the prefill instance asks the decode instance.

Bounded by number and by size; the oldest are forgotten first, and what is of an instance that is gone.
"""

from __future__ import annotations

import hashlib
import json
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.proxy.choice import prefix_keys

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from vllm_pd_connector.instance_info import EngineInfo
    from vllm_pd_connector.proxy.fleet import Instance

MAX_TURNS = 1 << 16
MAX_BYTES = 256 << 20
KEPT_S = 3600.0
"""After which a turn is forgotten: longer than decode instances keep one for a user who thinks."""
MAX_MESSAGES = 1024


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

    def take(self, keys: Sequence[bytes], usable: set[str]) -> Taken | None:
        """What is known for a prefill with these keys; `usable` are the ids of the engines that are there."""
        for key in reversed(keys):
            if (turn := self._pop(key)) is not None and turn.engine_id in usable and turn.until > time.monotonic():
                return Taken(key, turn)
        return None

    @contextmanager
    def at_hand(self, keys: Sequence[bytes], usable: set[str], told: Callable[[], bool]) -> Iterator[dict[str, Any]]:
        """Parameters as `take` has them, empty if there are none; if in the end they were `told` to nobody, they are
        put back."""
        taken = self.take(keys, usable)
        try:
            yield {} if taken is None else taken.params
        finally:
            if taken is not None and not told():
                self.put_back(taken)

    def put_back(self, taken: Taken) -> None:
        """It was told to nobody: it is there for the next, unless a newer one has its place."""
        if taken.key not in self._turns:
            self._add(taken.key, taken.turn)

    def _pop(self, key: bytes) -> _Turn | None:
        turn = self._turns.pop(key, None)
        if turn is not None:
            self._bytes -= len(turn.params)
        return turn


def turn_keys(body: Mapping[str, Any]) -> list[bytes]:
    """By what a prompt and its beginnings are known here, shortest first."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return prefix_keys(body)
    digest = hashlib.blake2b(str(body.get("model")).encode(errors="surrogatepass"), digest_size=16)
    keys = []
    for message in messages[:MAX_MESSAGES]:
        said = json.dumps(message, sort_keys=True, separators=(",", ":"))
        digest.update(len(said).to_bytes(8, "little") + said.encode())
        keys.append(digest.digest())
    return keys


def keeps_turns(instance: Instance) -> EngineInfo | None:
    """The engine of a decode instance that keeps turns; None if it does not, or has several, of which vLLM chooses."""
    engines = list(instance.engines.values())
    return engines[0] if len(engines) == 1 and engines[0].conversations else None


def reads_turns(instance: Instance) -> bool:
    """Whether a prefill instance reads what decode instances keep."""
    return bool(instance.engines) and all(engine.conversations for engine in instance.engines.values())


def by_name(engine: EngineInfo, name: str) -> dict[str, Any]:
    """Parameters by which a prefill instance asks a decode instance's engine for what it keeps of a request."""
    return {
        "remote_engine_id": engine.engine_id,
        "remote_host": engine.side_channel_host,
        "remote_port": engine.side_channel_port,
        "remote_request_id": name,
    }


def told(answer: object) -> dict[str, Any] | None:
    """What a decode instance's answer says of the turn that it keeps."""
    params = answer.get("kv_transfer_params") if isinstance(answer, dict) else None
    return params if isinstance(params, dict) and params.get("do_remote_decode") is True else None

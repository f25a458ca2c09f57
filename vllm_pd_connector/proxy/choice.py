"""Which instance takes a request: the one with the least to do, unless another has the prompt's beginning in its cache.

Load is the number of requests that this router has in flight at an instance. A prompt is cut into pieces; the key of
each piece is a hash over everything up to its end, so equal keys mean equal beginnings, as in vLLM's own prefix cache.
The router remembers at which instance it sent which key last. An instance that knows a longer part of the prompt is
preferred, as long as it has at most `slack` requests more than the one with the least: otherwise a popular beginning
would draw all requests to one instance. Ties go to whoever was chosen longest ago, so idle instances take turns.

Where instances announce what they hold (`kv_events`), those that hold the longest beginning go first. The memory then
decides among these alone: it knows of what is being computed and not yet announced, and of prompts whose tokens the
router does not know.

Pure but for the memory of keys, which holds the most recent ones only.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.proxy.kv_events.block_keys import PromptBlocks, prompt_blocks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

PIECE_TOKENS = 64
PIECE_CHARACTERS = 256
"""About as many tokens of text as PIECE_TOKENS."""
MAX_PIECES = 64
"""A prompt's later pieces decide nothing: who knows this many knows where the prompt's cache is."""

_JSON = json.JSONEncoder(separators=(",", ":"))
NOTHING_HELD: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Candidate:
    """An instance that could take a request."""

    url: str
    in_flight: int


@dataclass(frozen=True, slots=True)
class PromptPrefix:
    """By what a prompt's beginning is known: keys of its pieces, and its blocks where the router knows its tokens."""

    keys: Sequence[bytes] = ()
    blocks: PromptBlocks | None = None


def prompt_prefix(body: Mapping[str, Any]) -> PromptPrefix:
    return PromptPrefix(prefix_keys(body), prompt_blocks(body))


def prefix_keys(body: Mapping[str, Any], most: int = MAX_PIECES) -> list[bytes]:
    """One key per full piece of the prompt (token ids or text) or of the chat's messages, shortest beginning first, for
    at `most` so many pieces."""
    prompt = body.get("prompt")
    pieces: Iterator[bytes]
    if isinstance(prompt, list):
        full = range(PIECE_TOKENS, len(prompt) + 1, PIECE_TOKENS)
        pieces = (repr(prompt[end - PIECE_TOKENS : end]).encode() for end in full)
    else:
        text = prompt if isinstance(prompt, str) else _beginning(body.get("messages"), most * PIECE_CHARACTERS)
        full = range(PIECE_CHARACTERS, len(text) + 1, PIECE_CHARACTERS)
        pieces = (text[end - PIECE_CHARACTERS : end].encode(errors="surrogatepass") for end in full)
    digest = hashlib.blake2b(str(body.get("model")).encode(errors="surrogatepass"), digest_size=16)
    keys = []
    for piece in itertools.islice(pieces, most):
        digest.update(piece)
        keys.append(digest.digest())
    return keys


def _beginning(messages: Any, length: int) -> str:
    """How the JSON of a chat begins, in at least so many characters: the rest may be images of megabytes."""
    parts, so_far = [], 0
    for part in _JSON.iterencode(messages):
        parts.append(part)
        if (so_far := so_far + len(part)) >= length:
            break
    return "".join(parts)


class Chooser:
    """Chooses among the instances of one role; see the module."""

    def __init__(self, slack: int, capacity: int = 1 << 16):
        self._slack = slack
        self._homes: Bounded[bytes, str] = Bounded(capacity)
        self._chosen_at: dict[str, int] = {}
        self._turns = itertools.count(1)

    def choose(
        self, candidates: Sequence[Candidate], keys: Sequence[bytes], held: Mapping[str, int] = NOTHING_HELD
    ) -> tuple[str, bool]:
        """URL of the instance to ask, and whether it was preferred for its cache. `candidates` must not be empty;
        `held` is how many tokens of the prompt, from the first on, instances have announced."""
        least = min(candidate.in_flight for candidate in candidates)
        near = [c for c in candidates if c.in_flight <= least + self._slack]
        longest = max(held.get(c.url, 0) for c in near)
        best = {c.url: c.in_flight for c in near if held.get(c.url, 0) == longest}
        for key in reversed(keys):
            home = self._homes.get(key)
            if home in best:
                return home, True
        least = min(best.values())
        idle = [url for url, in_flight in best.items() if in_flight == least]
        return min(idle, key=lambda url: self._chosen_at.get(url, 0)), longest > 0

    def took(self, url: str, keys: Sequence[bytes]) -> None:
        """`url` was sent a request with these keys."""
        self._chosen_at[url] = next(self._turns)
        for key in keys:
            self._homes[key] = url

    def forget(self, url: str) -> None:
        """`url` has lost its cache or is gone."""
        self._chosen_at.pop(url, None)
        for key in [key for key, home in self._homes.items() if home == url]:
            del self._homes[key]

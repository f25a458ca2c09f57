"""The router's own keys of blocks: a hash over all tokens up to a block's end, and what else than tokens counts.

Engines name blocks by hashes of an algorithm and a seed of their own (`--prefix-caching-hash-algo`, PYTHONHASHSEED).
So the router takes those for names only, and computes keys of its own from the tokens, which events and requests both
have. Keys are chained block by block: equal keys mean equal beginnings, cut into blocks of the same size.

Source for what else counts: vLLM 0.32, `generate_block_hash_extra_keys` and `to_event_extra_keys`: an adapter's name in
every block, the client's `cache_salt` in the first.
"""

from __future__ import annotations

import hashlib
from array import array
from typing import TYPE_CHECKING, Any

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEY_BYTES = 16
ROOT = bytes(KEY_BYTES)
"""The key of nothing: the parent of a first block."""
TOKEN_BYTES = array("I").itemsize
NO_EXTRAS = (b"\xc0", b"\x90")
"""None and an empty list, in msgpack."""


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as bytes.

    Raises:
        OverflowError, TypeError: something that is no token id.
    """
    return array("I", tokens).tobytes()


def packed_or_nothing(tokens: Sequence[Any]) -> bytes:
    """A client's token ids as bytes, none if some are no token ids: the instance will say what it thinks of them."""
    try:
        return packed(tokens)
    except (OverflowError, TypeError):
        return b""


def extras(*words: str) -> bytes:
    """What else counts for a block, as events have it; empty words do not."""
    return msgspec.msgpack.encode([word for word in words if word])


def block_key(parent: bytes, tokens: bytes, extra: bytes) -> bytes:
    """The key of a block of packed tokens behind `parent`; `extra` is in msgpack."""
    digest = hashlib.blake2b(parent, digest_size=KEY_BYTES)
    digest.update(tokens)
    if extra not in NO_EXTRAS:
        digest.update(extra)
    return digest.digest()


class PromptBlocks:
    """The keys of a prompt's blocks, computed as far as somebody asks."""

    def __init__(self, tokens: Sequence[int], model: str, salt: str):
        self.model = model
        self._tokens = tokens
        self._salt = salt
        self._packed: bytes | None = None
        self._known: dict[tuple[int, bool], list[bytes]] = {}

    def key(self, number: int, block_size: int, adapter: bool) -> bytes | None:
        """The key of block `number`, from 0; None behind the last full one. `adapter`: the model is a LoRA adapter."""
        if self._packed is None:
            self._packed = packed_or_nothing(self._tokens)
        if (number + 1) * block_size * TOKEN_BYTES > len(self._packed):
            return None
        keys = self._known.setdefault((block_size, adapter), [])
        while len(keys) <= number:
            width = block_size * TOKEN_BYTES
            tokens = self._packed[len(keys) * width : (len(keys) + 1) * width]
            extra = extras(self.model if adapter else "", "" if keys else self._salt)
            keys.append(block_key(keys[-1] if keys else ROOT, tokens, extra))
        return keys[number]


def prompt_blocks(body: Mapping[str, Any]) -> PromptBlocks | None:
    """The blocks of a request's prompt; None where the router does not know its tokens (text, chats)."""
    prompt = body.get("prompt")
    if not isinstance(prompt, list):
        return None
    salt = body.get("cache_salt")
    # Half a pair of surrogates is no text that an event could have.
    readable = salt.encode(errors="ignore").decode() == salt if isinstance(salt, str) else True
    return PromptBlocks(prompt, str(body.get("model")), salt if isinstance(salt, str) else "") if readable else None

"""Which LoRA adapter a request computes with, told by the content of its files, and which have become others.

vLLM knows an adapter by a number. What is loaded under one can be replaced: `load_inplace` has it loaded again, from
the same path or another, while requests of that number run and wait. They go on with what is there now. And of a
request whose own `LoRARequest` says `load_inplace` the files are read again in every step in which it is scheduled, so
two of such requests with two paths have their adapters loaded in turn. So the book that is kept here says what is
loaded under each number, and since which change (`age`).

Workers give away what they have no place for, and read it from its files again when it is used. Nobody tells when, so
once those have changed nobody knows what such an adapter is, until it is loaded anew.

vLLM's prefix cache finds an adapter's blocks by its name and path, not by its number or content: where either has had
other numbers, they are found, and mixed. A prompt that begins with such a hit is nobody's (`spoilt`) until the prefix
cache was reset.

Source: vLLM 0.32 and 0.33, `lora/worker_manager.py` (`LRUCacheWorkerLoRAManager.add_adapter`, `_apply_adapters`),
`entrypoints/openai/models/serving.py` (`load_lora_adapter`), `v1/core/kv_cache_utils.py` (`_gen_lora_extra_hash_keys`),
`v1/worker/lora_model_runner_mixin.py`, `lora/utils.py` (`get_adapter_absolute_path`).
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final

from vllm_pd_connector.bounded import Bounded
from vllm_pd_connector.compat.base import init_logger
from vllm_pd_connector.compat.model.weights import local_files
from vllm_pd_connector.content import adapter_digest, adapter_files
from vllm_pd_connector.errors import ProtocolError, Withdrawn

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from vllm.lora.request import LoRARequest
    from vllm.v1.request import Request

logger = init_logger(__name__)

ADAPTERS_KNOWN = 4096
"""Adapters whose content is remembered; one that is forgotten is read again."""
_MIXED: Final = "mixed"
_CONTENT: Final = "content"


@dataclass(slots=True)
class _Loaded:
    """What is loaded under a number: `name` is None while nobody knows."""

    name: str | None
    key: tuple[str, str]
    age: int
    failed: bool = False


class Adapters:
    """See the module. One per engine, in the scheduler's thread.

    Args:
        ids: `adapter_ids`, what adapters are called, by their names.
        config: vLLM's LoRAConfig; None if there are no adapters.
        cached: whether vLLM's pool holds caches, in use or in its prefix cache, or will when requests with adapters go
            on that have come.
    """

    def __init__(self, ids: Mapping[str, str], config: Any, cached: Callable[[], bool]) -> None:
        self._ids = ids
        self._places = int(config.max_cpu_loras) if config is not None else ADAPTERS_KNOWN
        # Of an adapter vLLM may be told to use some modules alone.
        self._modules = f" in {sorted(config.target_modules)}" if config is not None and config.target_modules else ""
        self._cached = cached
        self._age = 0
        self._loaded: Bounded[int, _Loaded] = Bounded(ADAPTERS_KNOWN)
        self._read_again: Bounded[int, None] = Bounded(ADAPTERS_KNOWN)  # the workers have not
        self._stamps: Bounded[int, tuple[Any, ...]] = Bounded(ADAPTERS_KNOWN)  # of the files that were loaded again
        self._files: Bounded[int, tuple[Any, ...]] = Bounded(ADAPTERS_KNOWN)  # stamps, as the workers have read them
        self._keys: Bounded[tuple[str, str], str | None] = Bounded(ADAPTERS_KNOWN)  # what was computed under them
        self._moved: list[LoRARequest] = []

    def name_of(self, request: Request) -> str:
        """The adapter that a request computes with: its name, and its id in `adapter_ids`, or else the content of its
        files; empty if there is none.

        Raises:
            ProtocolError: nobody knows which numbers are loaded, or others than those that the request came for.
        """
        lora = request.lora_request
        if lora is None:
            return ""
        loaded = self._look(lora)
        if loaded.name is None:
            raise ProtocolError(
                f"lora_request: adapter {lora.lora_name!r} was loaded in place from {loaded.key[1]}, which failed or "
                "whose files cannot be read here, so nobody can tell its content: load it from a path that this host "
                "has, on both sides"
            )
        if self._may_be_another(lora):
            raise ProtocolError(
                f"lora_request: the files of adapter {lora.lora_name!r} (id {lora.lora_int_id}) at {lora.lora_path} "
                "have changed since they were loaded, and the workers may have read them again: load it in place, or "
                "from another path, on both sides"
            )
        name = self._name(lora)
        if name != loaded.name:
            raise Withdrawn(
                f"lora_request: adapter {lora.lora_name!r} (id {lora.lora_int_id}) is {loaded.name} since it was "
                f"loaded in place, the request came for {name}: send it again"
            )
        return name + self._modules

    def age(self, request: Request) -> int:
        """Moves when the numbers become others with which a request computes, which has come."""
        if (lora := request.lora_request) is None:
            return 0
        age = self._look(lora).age
        if lora.lora_int_id not in self._files:  # the workers may read it for this request
            self._stamp_files(lora)
        return age

    def in_turn(self, one: LoRARequest, other: LoRARequest) -> bool:
        """Whether two that run at the same time, and are read in each of their steps, load other numbers in turn."""
        if one.lora_int_id != other.lora_int_id or one.lora_path == other.lora_path:
            return False
        return (name := self._name(one)) is None or name != self._name(other)

    def spoilt(self, request: Request) -> bool:
        """Whether the prefix cache may hold what another adapter computed, where this request looks."""
        return request.lora_request is not None and self._keys.get(_key(request.lora_request)) == _MIXED

    def loaded(self, lora: LoRARequest, *, done: bool) -> None:
        """The workers were asked to load it. What they have they load again in place only, all of them if it is
        `done`, else perhaps some."""
        number, new = lora.lora_int_id, lora.lora_int_id not in self._loaded
        if lora.load_inplace or new:
            self._update(lora)
        if lora.load_inplace and not done:
            self._loaded[number].name, self._loaded[number].failed = None, True
        elif new and not done:  # who uses it has it read again
            self._read_again[number] = None
            self._files.pop(number, None)
        elif (
            done and number in self._read_again and self._look(lora).name is not None and not self._may_be_another(lora)
        ):
            with suppress(OSError):  # now they have it
                self._stamps[number] = self._files[number] = _stamp(lora.lora_path)
                del self._read_again[number]

    def take_moved(self) -> list[LoRARequest]:
        """Since the last call: what was loaded under numbers that meant something else before."""
        moved, self._moved = self._moved, []
        return moved

    def removed(self, number: int | None = None) -> None:
        """The workers give an adapter away, or all: what is used again is read from its files again."""
        for one in tuple(self._loaded) if number is None else (number,):
            self._read_again[one] = None
            self._files.pop(one, None)

    def was_reset(self, live: Iterable[LoRARequest]) -> None:
        """The prefix cache has forgotten everything; `live`: those of the requests that will fill it again."""
        self._keys.clear()
        for lora in live:
            self._look(lora)

    def _look(self, lora: LoRARequest) -> _Loaded:
        """What is loaded for a request: the workers load what they do not have, and what is to be read again. Its
        blocks go under its own key, whatever they are computed with."""
        known = self._loaded.get(lora.lora_int_id)
        if known is None or (self._reads(lora) and not known.failed and known.name != self._name(lora)):
            known = self._update(lora)
        key = _key(lora)
        mixed = self._keys.get(key, known.name) != known.name and self._cached()
        self._keys[key] = _MIXED if mixed else known.name
        return known

    def _update(self, lora: LoRARequest) -> _Loaded:
        number, name = lora.lora_int_id, self._name(lora)
        known = self._loaded.get(number)
        age = known.age if known is not None else self._age
        if known is not None and (name is None or known.name != name):
            age = self._age = self._age + 1
            self._moved.append(lora)
            if known.key in self._keys:  # who came for it goes on under its key
                self._keys[known.key] = _MIXED
            logger.warning(
                "adapter %s (id %d) is another now, from %s: prompts that begin with what vLLM's prefix cache holds of "
                "a path that it had before are not handed over until that is reset; load new weights from new paths",
                lora.lora_name,
                number,
                lora.lora_path,
            )
        self._loaded[number] = _Loaded(name, _key(lora), age)
        if number not in self._read_again or number not in self._files:
            self._stamp_files(lora)
        return self._loaded[number]

    def _stamp_files(self, lora: LoRARequest) -> None:
        with suppress(OSError):
            if stamp := _stamp(lora.lora_path):  # else the workers have yet to download it
                self._files[lora.lora_int_id] = stamp

    def _may_be_another(self, lora: LoRARequest) -> bool:
        """Whether its files have become others, and workers may have read them since."""
        number = lora.lora_int_id
        if lora.load_inplace or str(lora.lora_name) in self._ids or number not in self._files:
            return False
        if number not in self._read_again and len(self._loaded) <= self._places:
            return False
        try:
            return _stamp(lora.lora_path) != self._files[number]
        except OSError:  # they are being replaced in this moment
            return True

    def _reads(self, lora: LoRARequest) -> bool:
        """Whether the workers look at its files again."""
        return lora.load_inplace or lora.lora_int_id in self._read_again

    def _name(self, lora: LoRARequest) -> str | None:
        """None: its files cannot be read, by whose content alone an adapter goes that is loaded in place."""
        try:
            stamp = _stamp(lora.lora_path) if self._reads(lora) else self._stamps.get(lora.lora_int_id, ())
        except OSError:  # they are being replaced in this moment
            return None
        if not lora.load_inplace:
            return repr(_told(lora, self._ids, stamp))
        told = _told(lora, {}, stamp)
        return repr(told) if told[1] == _CONTENT else None


def by_files(request: Request) -> str:
    """As `Adapters.name_of`, where nobody has given names and none was loaded again."""
    lora = request.lora_request
    return repr(_told(lora, {}, ())) if lora is not None else ""


def _told(lora: LoRARequest, ids: Mapping[str, str], stamp: tuple[Any, ...]) -> tuple[str, str, str]:
    """An adapter's name, by what it is told from others of this name, and that."""
    name, path = str(lora.lora_name), str(lora.lora_path)
    return (name, "id", ids[name]) if name in ids else (name, *_read(name, path, lora.lora_int_id, stamp))


def _key(lora: LoRARequest) -> tuple[str, str]:
    """By what vLLM's prefix cache tells an adapter from others."""
    return str(lora.lora_name), str(lora.lora_path)


@lru_cache(ADAPTERS_KNOWN)
def _read(name: str, path: str, number: int, stamp: tuple[Any, ...]) -> tuple[str, str]:
    try:
        found = local_files(path, None, None)
        digest = adapter_digest(found) if found is not None else None
    except OSError as error:
        logger.warning("adapter %s: %s: %s", name, path, error)
        digest = None
    if digest is None:
        logger.warning(
            "adapter %s: no files of it can be read here at %s, so it goes by that path: use one path on both sides, "
            "or name it in adapter_ids",
            name,
            path,
        )
        return "path", path
    logger.info("adapter %s (id %d) at %s has the content %s", name, number, path, digest)
    return _CONTENT, digest


def _stamp(path: str) -> tuple[Any, ...]:
    """Changes with the files of an adapter; empty if they are not here.

    Raises:
        OSError: they could not be looked at.
    """
    found = local_files(path, None, None)
    stats = [(file.name, file.stat()) for file in adapter_files(found)] if found is not None else []
    return tuple((name, stat.st_ino, stat.st_mtime_ns, stat.st_size) for name, stat in stats)

"""A store of blocks that loads and saves between steps, as OffloadingConnector and the stores of other projects do.

vLLM's own OffloadingConnector needs CUDA or XPU. This one follows the same contract: a prefix that it has is announced
as loaded asynchronously, the request waits until `get_finished` tells that it came, and a finished request's blocks are
kept until `get_finished` tells that they are stored. The store is a directory, a file for each block and rank, named by
vLLM's hash of the block. One KV-cache group only.
"""

from __future__ import annotations

import os
import tempfile
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

Blocks = list[tuple[str, int]]
"""(hash, block id) of each."""


@dataclass
class Steps(KVConnectorMetadata):
    loads: dict[str, Blocks] = field(default_factory=dict)
    saves: dict[str, Blocks] = field(default_factory=dict)


class StoringConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any = None) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._directory = Path(self._kv_transfer_config.get_from_extra_config("shared_storage_path", ""))
        self._block_size = vllm_config.cache_config.block_size
        self._num_blocks = kv_cache_config.num_blocks
        self._rank = vllm_config.parallel_config.rank
        self._next = Steps()
        self._found: dict[str, tuple[int, list[str]]] = {}
        self._pages: dict[str, Any] = {}
        self._threads = ThreadPoolExecutor(1)
        self._loading: dict[str, Future[None]] = {}
        self._saving: dict[str, Future[None]] = {}

    def _file(self, name: str) -> Path:
        return self._directory / f"{name}-{self._rank}"

    # -- the scheduler's side --

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """At least the last token is computed."""
        names = [block.hex() for block in request.block_hashes[: (request.num_tokens - 1) // self._block_size]]
        start = num_computed_tokens // self._block_size
        found = list(takewhile(lambda name: self._file(name).exists(), names[start:]))
        self._found[request.request_id] = start, found
        return len(found) * self._block_size, bool(found)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        start, found = self._found.pop(request.request_id, (0, []))
        if num_external_tokens:  # else another connector loads them
            [ids] = blocks.get_block_ids()
            self._next.loads[request.request_id] = list(zip(found, ids[start : start + len(found)], strict=True))

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        told, self._next = self._next, Steps()
        return told

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, None]:
        full = request.num_computed_tokens // self._block_size
        blocks = [
            (block.hex(), number)
            for block, number in zip(request.block_hashes[:full], block_ids, strict=False)
            if not self._file(block.hex()).exists()
        ]
        if blocks:
            self._next.saves[request.request_id] = blocks
        return bool(blocks), None

    def request_finished_all_groups(self, request: Any, block_ids: tuple[list[int], ...]) -> tuple[bool, None]:
        [only] = block_ids
        return self.request_finished(request, only)

    # -- the worker's side --

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        for name, cache in kv_caches.items():
            self._pages[name] = cache.movedim(list(cache.shape).index(self._num_blocks), 0)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        steps = self._get_connector_metadata()
        assert isinstance(steps, Steps)
        for request, blocks in steps.loads.items():
            self._loading[request] = self._threads.submit(self._load, blocks)
        for request, blocks in steps.saves.items():
            self._saving[request] = self._threads.submit(self._save, blocks)

    def _load(self, blocks: Blocks) -> None:
        for name, block in blocks:
            for layer, page in torch.load(self._file(name)).items():
                self._pages[layer][block].copy_(page)

    def _save(self, blocks: Blocks) -> None:
        for name, block in blocks:
            number, temporary = tempfile.mkstemp(dir=self._directory)
            with os.fdopen(number, "wb") as file:
                torch.save({layer: pages[block].clone() for layer, pages in self._pages.items()}, file)
            os.replace(temporary, self._file(name))  # never seen in part

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str], set[str]]:
        return tuple(_ended(running) for running in (self._saving, self._loading))  # type: ignore[return-value]

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass


def _ended(running: dict[str, Future[None]]) -> set[str]:
    ended = {request for request, future in running.items() if future.done()}
    for request in ended:
        running.pop(request).result()
    return ended

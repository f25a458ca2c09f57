"""A test switch (`digest_dir`): every worker writes the digests of what it sent or received, one file per request.

    sent-<request id>-tp<r>-pp<r>.npz       tokens [0, num_tokens) of a request held for a reader
    received-<request id>-tp<r>-pp<r>.npz   tokens [start, stop) that were read, with `remote_request_id`

`share` is which tokens the worker has under context parallelism: rank, size, interleave of `geometry.interleave`.

Each key "layer|role|head" is a uint64 array indexed by absolute token position, each key "layer|role|state" one
indexed by global head or channel; 0 where the worker holds nothing.
Equal digests on both sides mean equal logical elements, whatever the layouts; see `geometry.checksums.digest`. CPU
caches only.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.geometry.checksums.digest import digests

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from numpy.typing import NDArray

    from vllm_pd_connector.geometry.blocks import BlockTables
    from vllm_pd_connector.geometry.manifest import Manifest, Segment
    from vllm_pd_connector.metadata import HeldRequest, ReceiveRequest


class DigestTrace:
    """Writes the files of one worker.

    Raises:
        InvalidConfig: the caches are not in CPU memory.
    """

    def __init__(self, directory: Path, manifest: Manifest):
        if any(segment.device != "cpu" for segment in manifest.segments):
            raise InvalidConfig("digest_dir: digests are computed for CPU caches only; unset it on devices")
        self._directory = directory
        self._manifest = manifest
        self._states = {(tensor.layer, tensor.role) for tensor in manifest.tensors if tensor.page_tokens == 0}
        self._memory = [_bytes_of(segment) for segment in manifest.segments]
        directory.mkdir(parents=True, exist_ok=True)

    def held(self, request: HeldRequest) -> None:
        """A finished prefill: all of its tokens."""
        self._write("sent", request.request_id, request.blocks, 0, request.num_tokens)

    def received(self, request: ReceiveRequest, prefill: str, first_valid_tokens: Mapping[int, int]) -> None:
        """A finished receive: the tokens that came from the request `prefill`. In some groups these begin late, at the
        given positions."""
        extra = {"remote_request_id": np.array(prefill)}
        self._write(
            "received", request.request_id, request.blocks, request.start, request.stop, extra, first_valid_tokens
        )

    def _write(
        self,
        side: str,
        request_id: str,
        tables: BlockTables,
        start: int,
        stop: int,
        extra: dict[str, NDArray[np.str_]] | None = None,
        first_valid_tokens: Mapping[int, int] | None = None,
    ) -> None:
        late = {
            (t.layer, t.role): first_valid_tokens[t.group]
            for t in self._manifest.tensors
            if first_valid_tokens and t.group in first_valid_tokens
        }
        share = self._manifest.parallel.share
        arrays: dict[str, NDArray[np.generic]] = {"start": np.array(start), "stop": np.array(stop), **(extra or {})}
        arrays["share"] = np.array([share.rank, share.size, share.interleave])
        for digest in digests(self._manifest, self._memory, tables, start, stop).values():
            positions, indices = digest.values.shape
            if (digest.layer, digest.role) in self._states:
                values = np.zeros(digest.first_index + indices, dtype=np.uint64)
                values[digest.first_index :] = digest.values[0]
                arrays[f"{digest.layer}|{digest.role}|state"] = values
                continue
            for index in range(indices):
                values = np.zeros(start + positions, dtype=np.uint64)
                values[start:] = digest.values[:, index]
                values[: late.get((digest.layer, digest.role), 0)] = 0
                arrays[f"{digest.layer}|{digest.role}|{digest.first_index + index}"] = values
        place = self._manifest.parallel
        context = f"-pcp{place.pcp_rank}" if place.pcp_size > 1 else ""
        path = self._directory / f"{side}-{request_id}-tp{place.tp_rank}-pp{place.pp_rank}{context}.npz"
        part = path.with_suffix(".part")
        with part.open("wb") as file:
            np.savez(file, **arrays)  # type: ignore[arg-type]
        part.replace(path)  # who reads meanwhile finds it whole or not at all


def _bytes_of(segment: Segment) -> NDArray[np.uint8]:
    """The segment's bytes, without a copy; valid while vLLM keeps its caches."""
    return np.ctypeslib.as_array((ctypes.c_uint8 * segment.length).from_address(segment.address))

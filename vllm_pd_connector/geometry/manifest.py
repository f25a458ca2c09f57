"""The manifest: what one worker has, as strided logical tensors over memory segments.

A cache is a logical tensor; a layout only says at which byte each element lies:

    byte(page, i0, i1, …) = segment.address + offset + page * page_stride + i0 * axes[0].stride + i1 * axes[1].stride …

NHD and HND, K and V packed in one page, a transposed K, MLA's latent, conv and recurrent states, pages of several
layers packed in one block: all the same form with other numbers. K and V are two tensors even where they share a
page; two groups over the same bytes are two tensors with different page strides over one segment.

The structs are also the wire form (msgpack through msgspec), so a manifest received from a peer is only data: call
`validate` before using one. Lengths, strides and offsets are bytes; sizes, starts and totals are elements.

Source: vLLM 0.32 `vllm/v1/kv_cache_interface.py` (logical shape [L, B, H, N, C]).
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from collections.abc import Sequence

MANIFEST_VERSION = 2

CONFIGURATION = ", configuration "
"""Begins what `software` tells of the model's configuration beside releases: a field of its own would be refused by
the release before, which compares all of `ModelFacts`, and reads `software` to nobody."""


class Role(StrEnum):
    """What a logical tensor is; two sides' tensors are matched by (layer, role)."""

    KEY = "key"
    VALUE = "value"
    LATENT = "latent"
    LATENT_SCALE = "latent_scale"
    INDEX = "index"
    INDEX_SCALE = "index_scale"
    KEY_SCALE = "key_scale"
    VALUE_SCALE = "value_scale"
    CONV_Q = "conv_q"
    CONV_K = "conv_k"
    CONV_V = "conv_v"
    CONV_X = "conv_x"
    CONV_B = "conv_b"
    CONV_C = "conv_c"
    SSM = "ssm"
    OPAQUE = "opaque"


class AxisName(StrEnum):
    """Names of logical axes. TOKEN is addressed by absolute token position, all others by global index."""

    TOKEN = "token"
    HEAD = "head"
    CHANNEL = "channel"
    TAP = "tap"
    DK = "dk"
    DV = "dv"
    BYTE = "byte"


class GroupKind(StrEnum):
    """How a KV-cache group's block table is read."""

    FULL = "full"
    SLIDING_WINDOW = "sliding_window"
    CHUNKED_LOCAL = "chunked_local"
    STATE = "state"


class ManifestStruct(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Strict, immutable, comparable by value."""


class Segment(ManifestStruct, frozen=True):
    """One registered range of memory.

    `device` is "cpu" or "cuda"; `device_id` is the transport's device number (0 on the CPU).
    """

    address: int
    length: int
    device: str
    device_id: int


class TokenShare(ManifestStruct, frozen=True):
    """Which tokens a worker holds of a group: those whose stretch of `interleave` tokens is, of `size` in turn, the
    one of `rank`. See `geometry.interleave`."""

    rank: int
    size: int
    interleave: int


WHOLE = TokenShare(0, 1, 1)


class Axis(ManifestStruct, frozen=True):
    """One logical axis inside a page.

    The page holds elements [start, start + size) of `total` along this axis, `stride` bytes apart. For TOKEN axes
    start is 0 and total equals size (the page's tokens); an axis that parallelism does not shard has size == total.
    """

    name: AxisName
    size: int
    stride: int
    start: int
    total: int


READS_POWERS = " with scales that are powers of two"
"""Ends the dtype of bytes whose scales in the page are read so, and may be written so or as any float32."""


class Tensor(ManifestStruct, frozen=True):
    """One logical tensor of one layer: `pages` pages of equal shape, `page_stride` bytes apart.

    A logical block of the group is `pages_per_block` consecutive pages (kernel blocks). `page_tokens` is the size of
    the TOKEN axis (0 for states, which have none). `opaque` is empty for affine tensors; otherwise it describes the
    page's inner form in words that must be equal on both sides, and the page moves whole or not at all.
    """

    layer: str
    role: Role
    group: int
    dtype: str
    itemsize: int
    segment: int
    offset: int
    pages: int
    page_stride: int
    pages_per_block: int
    page_tokens: int
    axes: tuple[Axis, ...]
    opaque: str = ""

    def as_written(self, writers: Sequence[Manifest]) -> Tensor:
        """What is read as powers of two is read rightly unless context-parallel prefill ranks wrote it: they alone
        round no scales.

        Source: vLLM 0.32 and 0.33, `models/deepseek_v32/attention.py` (`use_pcp`: `concat_and_cache_mla` in place of
        `fused_norm_rope`), `flashinfer_mla_sparse_sm120.py` (`kv_scale_format`).
        """
        if writers[0].parallel.pcp_size > 1 or not self.dtype.endswith(READS_POWERS):
            return self
        return replace(self, dtype=self.dtype.removesuffix(READS_POWERS))


class Group(ManifestStruct, frozen=True):
    """One KV-cache group. `window` is in tokens (0: none).

    `block_tokens` is tokens per logical block, as the scheduler counts them: on all ranks together, where they hold
    shares of the tokens.
    """

    kind: GroupKind
    block_tokens: int
    num_blocks: int
    window: int = 0
    share: TokenShare = WHOLE


class ModelFacts(ManifestStruct, frozen=True):
    """Facts of the model that decide what the cached numbers mean; compared field by field.

    `weights` says which numbers the model was loaded with, `quantization` what they were made into.
    """

    model: str
    architecture: str
    num_layers: int
    hidden_size: int
    num_kv_heads: int
    head_size: int
    dtype: str
    kv_cache_dtype: str
    rope: str
    speculative: str
    weights: str
    quantization: str


Rank = tuple[int, int, int]
"""(pipeline, prefill-context, tensor) rank inside one instance."""


class Coordinates(ManifestStruct, frozen=True):
    """Where this worker stands in its instance's parallel groups.

    Decode-context parallel groups (`dcp`) are made of tensor and prefill-context parallel (`pcp`) ranks, so they add no
    workers. `interleave` is how many tokens in a row one rank of them holds (vLLM's cp_kv_cache_interleave_size).
    """

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    dp_rank: int
    dp_size: int
    dcp_size: int
    pcp_size: int
    dcp_rank: int = 0
    pcp_rank: int = 0
    interleave: int = 1

    @property
    def rank(self) -> Rank:
        return self.pp_rank, self.pcp_rank, self.tp_rank

    @property
    def share(self) -> TokenShare:
        """The tokens that this worker holds of a group whose ranks take turns with them."""
        return TokenShare(self.dcp_rank, self.dcp_size, self.interleave) if self.dcp_size > 1 else WHOLE

    @property
    def number(self) -> int:
        """Of this worker among those of its instance, in the order of their ranks."""
        return (self.pp_rank * self.pcp_size + self.pcp_rank) * self.tp_size + self.tp_rank

    @property
    def workers(self) -> int:
        """How many workers the instance has."""
        return self.pp_size * self.pcp_size * self.tp_size


class LivenessAddress(ManifestStruct, frozen=True):
    """Where a worker listens so that peers notice its end (`worker.peers.process_watch`): an IP address and a port, and
    the `name` that who dials must say."""

    address: str
    port: int
    name: str


class Manifest(ManifestStruct, frozen=True):
    """Everything one worker tells its peers, once per process start (`incarnation`, 32 hex digits).

    `scratch` is memory that holds nothing and that peers may read and write to see how fast that is; None if this
    worker cannot be asked to write, so that there is nothing to choose. `life`: None if it can only be guessed whether
    this worker is there, so that it is never asked to write. `draft_layers` are those of `tensors` that a drafter has.
    """

    version: int
    engine_id: str
    incarnation: str
    software: str
    model: ModelFacts
    parallel: Coordinates
    segments: tuple[Segment, ...]
    groups: tuple[Group, ...]
    tensors: tuple[Tensor, ...]
    transport: str
    endpoint: bytes
    scratch: Segment | None = None
    life: LivenessAddress | None = None
    draft_layers: tuple[str, ...] = ()

    @property
    def configuration(self) -> dict[str, str]:
        """What tells each file of the model's configuration from others; empty if this worker does not say."""
        told = self.software.partition(CONFIGURATION)[2].split()
        return {name: digest for name, _, digest in (one.partition("=") for one in told)}

"""What a writer puts into a page, the manifest finds: each byte of it, under the right role, and nothing else.

A writer here is the arithmetic of vLLM's own, in torch: which bytes of the cache it writes for one token. Caches are
the recorded ones, so every layout, padding and packing that vLLM makes of them takes part. A token's record is random
bytes, written by the writer's formula and read by the manifest's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from tests.recorded import read
from vllm_pd_connector.compat.model.pages import Form, page_of
from vllm_pd_connector.geometry.manifest import AxisName, Manifest, Role, Tensor

Bytes = NDArray[np.uint8]
Record = dict[Role, Bytes]
PAGE = 2


@dataclass(frozen=True, slots=True)
class Written:
    """A cache view [B, H, N, C] of bytes, the token's slot in its page, and the random bytes to draw from."""

    view: torch.Tensor
    slot: int
    rng: np.random.Generator

    def draw(self, size: int) -> Bytes:
        return self.rng.integers(1, 256, size, dtype=np.uint8)

    def row(self, head: int = 0) -> torch.Tensor:
        return self.view[PAGE, head, self.slot]

    def page(self) -> torch.Tensor:
        """The bytes of a page whose head and tokens lie side by side."""
        _, heads, tokens, content = self.view.shape
        start = self.view.storage_offset() + PAGE * self.view.stride(0)
        return torch.as_strided(self.view, (heads * tokens * content,), (1,), start)


def put(where: torch.Tensor, data: Bytes) -> None:
    where.copy_(torch.from_numpy(data))


def concat_and_cache_mla(at: Written) -> Record:
    """`models/deepseek_v32/common/kernels.py`: the latent, then the rope part, at block and entry strides."""
    record = at.draw(at.view.shape[3])
    rope = len(record) // 9
    put(at.row()[: len(record) - rope], record[: len(record) - rope])
    put(at.row()[len(record) - rope :], record[len(record) - rope :])
    return {Role.LATENT: record}


def fp8_ds_mla(at: Written) -> Record:
    """The same kernel: 512 values, 4 float32 scales, 64 bfloat16 rope values from the token's base on."""
    record = at.draw(656)
    for start, stop in ((0, 512), (512, 528), (528, 656)):
        put(at.row()[start:stop], record[start:stop])
    return {Role.LATENT: record}


def nvfp4_ds_mla(at: Written) -> Record:
    """The same kernel: 256 bytes of values, 64 rope bytes, 32 scales of which `s` lies at 8 * (s & 3) + (s >> 2)."""
    record = at.draw(352)
    put(at.row()[:320], record[:320])
    for scale in range(32):
        place = 320 + 8 * (scale & 3) + (scale >> 2)
        at.row()[place] = int(record[place])
    return {Role.LATENT: record}


def indexer_k_quant_and_cache(at: Written) -> Record:
    """`rocm_aiter_mla_sparse.py`, layout NORMAL: the first block_size * head_dim bytes are values, float32 scales
    follow."""
    tokens = at.view.shape[2]
    values, scale = at.draw(128), at.draw(4)
    page = at.page()
    put(page[: tokens * 128].view(tokens, 128)[at.slot], values)
    put(page[tokens * 128 :].view(tokens, 4)[at.slot], scale)
    return {Role.INDEX: values, Role.INDEX_SCALE: scale}


def deepseek_v4_quantize_and_insert(at: Written) -> Record:
    """`models/deepseek_v4/common/ops/cache_utils.py`: 448 values and 64 bfloat16 per token, then 8 scales per token."""
    tokens = at.view.shape[2]
    values, scales = at.draw(576), at.draw(8)
    page = at.page()
    put(page[at.slot * 576 :][:448], values[:448])
    put(page[at.slot * 576 + 448 :][:128], values[448:])
    put(page[tokens * 576 + at.slot * 8 :][:8], scales)
    return {Role.LATENT: values, Role.LATENT_SCALE: scales}


def vector(role: Role) -> Callable[[Written], Record]:
    """One vector at block and position strides: `minimax_m3/common/ops/index_topk.py`, V4's compressor states."""

    def write(at: Written) -> Record:
        record = at.draw(at.view.shape[3])
        put(at.row(), record)
        return {role: record}

    return write


def key_value(key_bytes: int) -> Callable[[Written], Record]:
    """`reshape_and_cache_flash` on the halves of the content, as FLASH_ATTN, HPC_ATTN and DIFFKV split it."""

    def write(at: Written) -> Record:
        blocks = at.view.transpose(1, 2)  # (B, N, H, C)
        heads, content = at.view.shape[1], at.view.shape[3]
        key, value = at.draw(heads * key_bytes), at.draw(heads * (content - key_bytes))
        put(blocks[PAGE, at.slot, :, :key_bytes], key.reshape(heads, -1))
        put(blocks[PAGE, at.slot, :, key_bytes:], value.reshape(heads, -1))
        return {Role.KEY: key, Role.VALUE: value}

    return write


def per_token_head(at: Written) -> Record:
    """`triton_attn.py`, `_ensure_scale_caches`: [K | scale | V | scale] per head and slot, a scale being 4 bytes."""
    heads, half = at.view.shape[1], at.view.shape[3] // 2
    record: Record = {}
    for side, (data, scale) in enumerate(((Role.KEY, Role.KEY_SCALE), (Role.VALUE, Role.VALUE_SCALE))):
        record[data], record[scale] = at.draw(heads * (half - 4)), at.draw(heads * 4)
        for head in range(heads):
            row = at.row(head)[side * half : (side + 1) * half]
            put(row[: half - 4], record[data].reshape(heads, -1)[head])
            put(row[half - 4 :], record[scale].reshape(heads, -1)[head])
    return record


def nvfp4(at: Written) -> Record:
    """`flashinfer.py`, `_nvfp4_kv_views`: [K data | K scale | V data | V scale], each side being half of the page, each
    region in the order of the page's slots."""
    _, slots, tokens, content = at.view.shape
    heads, page = slots // 2, at.view.storage_offset() + PAGE * at.view.stride(0)
    by_head = at.view.stride(1) > at.view.stride(2)
    everything = torch.as_strided(at.view, (slots * tokens * content,), (1,), page)
    record: Record = {}
    for side, roles in enumerate(((Role.KEY, Role.KEY_SCALE), (Role.VALUE, Role.VALUE_SCALE))):
        half = everything[side * heads * tokens * content :][: heads * tokens * content]
        data = heads * tokens * content * 8 // 9
        for role, region, width in ((roles[0], half[:data], content * 8 // 9), (roles[1], half[data:], content // 9)):
            shape = (heads, tokens, width) if by_head else (tokens, heads, width)
            where = region.view(shape)[:, at.slot] if by_head else region.view(shape)[at.slot]
            record[role] = at.draw(heads * width)
            put(where, record[role].reshape(heads, width))
    return record


def kpool_tail(at: Written) -> Record:
    """`glm5next`: the raw key and the gate's score are the two heads of a slot of the ring."""
    heads, content = at.view.shape[1], at.view.shape[3]
    record = at.draw(heads * content)
    for head in range(heads):
        put(at.row(head), record.reshape(heads, -1)[head])
    return {Role.INDEX: record}


INDEX = "indexer.k_cache"
WRITERS = [
    ("Kimi-K2", "FlashMLA", "attn", concat_and_cache_mla),
    ("Kimi-K2", "FlashMLA 256", "attn", concat_and_cache_mla),
    ("Kimi-K2", "FlashInfer MLA packed", "attn", concat_and_cache_mla),
    ("Kimi-K2", "FlashMLA fp8", "attn", concat_and_cache_mla),
    ("Kimi-K2", "TokenSpeed fp8", "attn", concat_and_cache_mla),
    ("DeepSeek-V3.2", "FlashMLA sparse fp8_ds_mla, Hopper", "attn", fp8_ds_mla),
    ("DeepSeek-V3.2", "FlashMLA sparse fp8_ds_mla, Blackwell", "attn", fp8_ds_mla),
    ("DeepSeek-V3.2", "FlashMLA sparse fp8_ds_mla packed", "attn", fp8_ds_mla),
    ("DeepSeek-V3.2", "FlashMLA sparse nvfp4_ds_mla", "attn", nvfp4_ds_mla),
    ("DeepSeek-V3.2", "FlashMLA sparse fp8_ds_mla, Hopper", INDEX, indexer_k_quant_and_cache),
    ("DeepSeek-V3.2", "FlashMLA sparse fp8_ds_mla, Blackwell", INDEX, indexer_k_quant_and_cache),
    ("GLM-5", "FlashMLA sparse fp8_ds_mla packed", INDEX, indexer_k_quant_and_cache),
    ("DeepSeek-V4", "FlashMLA fp8_ds_mla", "swa_cache", deepseek_v4_quantize_and_insert),
    ("DeepSeek-V4", "FlashInfer bf16", "swa_cache", vector(Role.LATENT)),
    ("DeepSeek-V4", "FlashMLA fp8_ds_mla", "compressor.state_cache", vector(Role.LATENT)),
    ("MiniMax-M3", "M3 sparse bf16", INDEX, vector(Role.INDEX)),
    ("MiniMax-M3", "M3 sparse bf16", "attn", key_value(256)),
    ("MiMo-V2 Flash", "FA DIFFKV NHD", "attn", key_value(2 * 192)),
    ("MiMo-V2 Flash", "Triton DIFFKV", "attn", key_value(2 * 192)),
    ("Gemma-4 31B", "Triton+FA", "layers.2.self_attn.attn", key_value(2 * 512)),
    ("Llama-3 70B", "HPC NHD", "attn", key_value(2 * 128)),
    ("Llama-3 70B", "FA BHLNC", "attn", key_value(2 * 128)),
    ("Llama-3 70B", "FA fp8", "attn", key_value(128)),
    ("Llama-3 70B", "Triton int8/head", "attn", per_token_head),
    ("Llama-3 70B", "Triton fp8/head NHD", "attn", per_token_head),
    ("Llama-3 70B", "Triton int4/head", "attn", per_token_head),
    ("Llama-3 70B", "FlashInfer NVFP4, Hopper", "attn", nvfp4),
    ("Llama-3 70B", "FlashInfer NVFP4 NHD, SM120", "attn", nvfp4),
    ("GLM-5-Next", "FlashMLA sparse bf16, Hopper", "tail_cache", kpool_tail),
]


@pytest.mark.parametrize(
    ("model", "setup", "layer", "writer"), WRITERS, ids=lambda part: part if isinstance(part, str) else None
)
def test_the_manifest_finds_every_byte_that_a_writer_puts_into_a_page(
    model: str, setup: str, layer: str, writer: Callable[[Written], Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    fixture = next(
        one
        for one in read.fixtures(read.RECORDINGS[0])
        if (one.model.name, one.setup.name) == (model, setup) and one.tp > 1
    )
    views = read.kv_caches(fixture)
    monkeypatch.setattr(read, "kv_caches", lambda _: views)
    manifest = read.manifests(fixture)[1]
    name = next(name for name in views if name.endswith(layer))
    memory = views[name].untyped_storage()
    raw = torch.empty(0, dtype=torch.uint8).set_(memory)
    raw.zero_()
    view = views[name].view(torch.uint8)
    slot = view.shape[2] - 2
    record = writer(Written(view, slot, np.random.default_rng(5)))
    tensors = [tensor for tensor in manifest.tensors if tensor.layer == name]
    assert {tensor.role for tensor in tensors} == set(record)
    everything = raw.numpy()
    for tensor in tensors:
        where = places(manifest, tensor, slot)
        assert np.array_equal(everything[where].ravel(), record[tensor.role]), tensor.role
        everything[where] = 0
    assert not everything.any(), "the writer wrote what no tensor of the layer has"


def places(manifest: Manifest, tensor: Tensor, slot: int) -> NDArray[np.int64]:
    """Offsets in the segment of each byte of one token of page PAGE, heads first, then channels, then bytes."""
    assert manifest.segments[tensor.segment].device == "cpu"
    found = np.array(tensor.offset + PAGE * tensor.page_stride)
    for axis in tensor.axes:
        if axis.name in (AxisName.TOKEN, AxisName.TAP):
            found = found + slot * axis.stride
        else:
            found = np.add.outer(found, np.arange(axis.size) * axis.stride)
    return np.add.outer(found, np.arange(tensor.itemsize)).astype(np.int64)


@pytest.mark.parametrize("rocm", [False, True])
@pytest.mark.parametrize("width", [128 + 4, 64 + 4])
@pytest.mark.parametrize(
    "backend", ["DEEPSEEK_V41_INDEXER", "DEEPSEEK_V41_SPARSE_INDEXER", "DEEPSEEK_V41_ROCM_MXFP4_INDEXER"]
)
def test_an_indexer_of_bytes_that_vllm_does_not_call_one_is_not_taken_for_a_record_per_token(
    backend: str, width: int, rocm: bool
) -> None:
    """DeepSeek-V4.1, layers of ratio 1 (`DeepseekV4IndexerCache.get_kv_cache_spec`): its writer puts the values of all
    tokens before the scales (`deepseek_v41/common/ops/indexer_k_store.py`), and its spec looks like plain vectors."""
    spec = MLAAttentionSpec(block_size=128, num_kv_heads=1, head_size=width, dtype=torch.uint8, tokens_per_state=1)
    page = page_of(spec, backend, rocm=rocm)
    assert page.form is Form.OPAQUE and backend in page.reason
    elements = replace(spec, head_size=512, dtype=torch.bfloat16)
    assert page_of(elements, backend, rocm=rocm).form is Form.ROWS, "an element of two bytes is no packed record"

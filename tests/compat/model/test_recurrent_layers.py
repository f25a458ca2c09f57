"""What a recurrent layer's spec says about its page: the sub-projections, their shards, and what is refused by name.

The specs are those that vLLM 0.32 builds for the models named, by its own shape functions.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import MambaSpec

from vllm_pd_connector.compat.model.recurrent import StateGroup, state_block_tokens, states_of
from vllm_pd_connector.errors import UnsupportedCache
from vllm_pd_connector.geometry.layouts.recurrent import Convolution, Recurrent, StatePage, state_tensors
from vllm_pd_connector.geometry.manifest import AxisName, Coordinates, Role
from vllm_pd_connector.geometry.sharding import Interval

LAYER = "model.layers.0.mixer"
DTYPES = (torch.bfloat16, torch.float32)


def place(tp_size: int, tp_rank: int) -> Coordinates:
    return Coordinates(tp_rank, tp_size, 0, 1, 0, 1, 1, 1)


def spec(kind: str, shapes: Any, **changes: Any) -> MambaSpec:
    fields = {"block_size": 128, "dtypes": DTYPES[: len(shapes)], "mamba_type": MambaAttentionBackendEnum[kind]}
    return MambaSpec(shapes=tuple(shapes), **(fields | changes))


def states(
    given: MambaSpec, tp_size: int = 1, tp_rank: int = 0, module: Any = None, device: str = "cuda"
) -> tuple[Any, Recurrent | None]:
    layers = {LAYER: module}
    config: Any = SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    return states_of(config, LAYER, given, place(tp_size, tp_rank), torch.device(device))


def shares(convolution: Convolution) -> dict[Role, tuple[Interval, int]]:
    return {part.role: (part.channels, part.total) for part in convolution.projections}


@pytest.fixture(params=[True, False], ids=["DS", "SD"])
def dim_first(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize(("tp_size", "tp_rank"), [(1, 0), (2, 1), (8, 5)])
def test_kda_has_three_equal_projections_and_a_state_per_head(dim_first, tp_size, tp_rank):
    """KimiLinear-48B: 32 heads of 128, kernel 4."""
    shapes = MambaStateShapeCalculator.kda_state_shape(tp_size, 32, 128, conv_kernel_size=4)
    convolution, recurrent = states(spec("GDN_ATTN", shapes), tp_size, tp_rank)
    held = Interval(tp_rank * 4096 // tp_size, (tp_rank + 1) * 4096 // tp_size)
    assert shares(convolution) == dict.fromkeys((Role.CONV_Q, Role.CONV_K, Role.CONV_V), (held, 4096))
    assert (convolution.taps, convolution.dim_first, convolution.dtype) == (3, dim_first, "bfloat16")
    assert recurrent is not None
    assert recurrent.heads == Interval(tp_rank * 32 // tp_size, (tp_rank + 1) * 32 // tp_size)
    assert (recurrent.total_heads, recurrent.dtype) == (32, "float32")
    assert recurrent.axes == ((AxisName.DV, 128), (AxisName.DK, 128))


@pytest.mark.parametrize(("tp_size", "tp_rank"), [(1, 0), (2, 1), (8, 3)])
def test_gdn_may_have_fewer_key_heads_than_value_heads(dim_first, tp_size, tp_rank):
    """Qwen3-Next-80B: 16 key and 32 value heads of 128, kernel 4."""
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(tp_size, 16, 32, 128, 128, 4)
    convolution, _ = states(spec("GDN_ATTN", shapes), tp_size, tp_rank)
    key = Interval(tp_rank * 2048 // tp_size, (tp_rank + 1) * 2048 // tp_size)
    value = Interval(tp_rank * 4096 // tp_size, (tp_rank + 1) * 4096 // tp_size)
    assert shares(convolution) == {
        Role.CONV_Q: (key, 2048),
        Role.CONV_K: (key, 2048),
        Role.CONV_V: (value, 4096),
    }


def test_speculative_tokens_are_rows_of_the_convolution_state(dim_first):
    shapes = MambaStateShapeCalculator.kda_state_shape(1, 4, 64, conv_kernel_size=4, num_spec=2)
    assert states(spec("GDN_ATTN", shapes))[0].taps == 5


@pytest.mark.parametrize(
    ("groups", "expected"), [(8, Interval(256, 512)), (1, Interval(0, 128)), (2, Interval(128, 256))]
)
def test_groups_of_mamba2_are_sharded_or_copied_as_the_layer_counts_them(dim_first, groups, expected):
    """Rank 1 of 4 or of 2, state size 128; with one group every rank holds a copy."""
    tp_size = 2 if groups == 2 else 4
    shapes = MambaStateShapeCalculator.mamba2_state_shape(tp_size, 2048, groups, 32, 64, 128, 4)
    module = SimpleNamespace(norm=SimpleNamespace(n_groups=groups))
    convolution, recurrent = states(spec("MAMBA2", shapes), tp_size, 1, module)
    inner = 2048 // tp_size
    assert shares(convolution) == {
        Role.CONV_X: (Interval(inner, 2 * inner), 2048),
        Role.CONV_B: (expected, groups * 128),
        Role.CONV_C: (expected, groups * 128),
    }
    assert recurrent is not None and recurrent.axes == ((AxisName.DV, 64), (AxisName.DK, 128))


def test_a_group_count_that_contradicts_the_page_is_refused(dim_first):
    shapes = MambaStateShapeCalculator.mamba2_state_shape(1, 2048, 2, 32, 64, 128, 4)
    module = SimpleNamespace(norm=SimpleNamespace(n_groups=4))
    with pytest.raises(UnsupportedCache, match="holds 256 channels of B, but 4 groups of 128 make 512"):
        states(spec("MAMBA2", shapes), module=module)


def test_mamba1_and_short_convolutions_have_one_projection(dim_first):
    convolution, recurrent = states(spec("MAMBA1", MambaStateShapeCalculator.mamba1_state_shape(2, 512, 16, 4)), 2, 1)
    assert shares(convolution) == {Role.CONV_X: (Interval(256, 512), 512)}
    assert recurrent is not None
    assert (recurrent.heads, recurrent.axes) == (Interval(256, 512), ((AxisName.DK, 16),))
    convolution, recurrent = states(spec("SHORT_CONV", MambaStateShapeCalculator.short_conv_state_shape(2, 512, 4)), 2)
    assert shares(convolution) == {Role.CONV_X: (Interval(0, 256), 512)}
    assert recurrent is None


def test_a_convolution_that_every_rank_has_whole_is_no_share_of_its_channels(dim_first):
    """Qwen4-Exp's embeddings of n-grams: a kernel of 4, dilated by 2, over 4 streams of 2048 channels. Any rank can
    give it, whatever its tensor-parallel size."""
    shapes = MambaStateShapeCalculator.short_conv_state_shape(1, 8192, conv_kernel=7)
    replicated = spec("SHORT_CONV", shapes, tp_replicated=True)
    for tp_size, tp_rank in ((1, 0), (4, 3)):
        convolution, recurrent = states(replicated, tp_size, tp_rank)
        assert shares(convolution) == {Role.CONV_X: (Interval(0, 8192), 8192)}
        assert recurrent is None and convolution.taps == 6
        page = StatePage(LAYER, 0, 0, 0, pages=3, page_stride=1 << 20, size=replicated.state_content_size_bytes)
        (tensor,) = state_tensors(page, convolution, None)
        assert (tensor.axes[0].name, tensor.axes[0].start, tensor.axes[0].size) == (AxisName.CHANNEL, 0, 8192)


def test_the_cpu_kernels_of_gdn_store_a_head_transposed(dim_first):
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(1, 2, 4, 32, 64, 4)
    module = type("QwenGatedDeltaNetAttention", (), {})()
    _, on_gpu = states(spec("GDN_ATTN", shapes), module=module, device="cuda")
    _, on_cpu = states(spec("GDN_ATTN", shapes), module=module, device="cpu")
    assert on_gpu is not None and on_gpu.axes == ((AxisName.DV, 64), (AxisName.DK, 32))
    assert on_cpu is not None and on_cpu.axes == ((AxisName.DK, 32), (AxisName.DV, 64))
    module.model_config = SimpleNamespace(dtype=torch.float16)
    _, in_half = states(spec("GDN_ATTN", shapes), module=module, device="cpu")
    assert in_half == on_gpu, "vLLM 0.33 has the GPUs' kernels for it"


def test_linear_attention_has_a_square_matrix_per_head_and_no_convolution() -> None:
    """Ring-linear: 32 heads of 128."""
    shapes = MambaStateShapeCalculator.linear_attention_state_shape(32, 4, 128)
    convolution, recurrent = states(spec("LINEAR", shapes), 4, 3)
    assert convolution is None and recurrent is not None
    assert (recurrent.heads, recurrent.total_heads) == (Interval(24, 32), 32)
    assert recurrent.axes == ((AxisName.DK, 128), (AxisName.DV, 128))
    page = StatePage(LAYER, 0, 0, 0, pages=3, page_stride=1 << 20, size=recurrent.nbytes)
    (tensor,) = state_tensors(page, None, recurrent)
    assert (tensor.role, tensor.offset) == (Role.SSM, 0)


@pytest.mark.parametrize(
    ("kind", "shapes", "changes", "named"),
    [
        ("LINEAR", [(3, 64), (4, 64, 64)], {}, "LINEAR with 2 states"),
        ("MAMBA2", [(3, 768), (4, 64, 64), (4, 8, 64)], {"dtypes": (*DTYPES, torch.float32)}, "MAMBA2 with 3 states"),
        ("GDN_ATTN", [(3, 192), (1, 64, 64)], {"tp_replicated": True}, "replicated over tensor-parallel ranks"),
        ("GDN_ATTN", [(3, 255), (2, 64, 1)], {}, "two equal parts"),
    ],
)
def test_what_is_not_understood_is_refused_by_name(kind, shapes, changes, named, monkeypatch):
    monkeypatch.setattr(mamba_utils, "is_conv_state_dim_first", lambda: False)
    with pytest.raises(UnsupportedCache, match=named) as refused:
        states(spec(kind, shapes, **changes))
    assert LAYER in str(refused.value)


def test_an_unknown_way_to_keep_states_is_refused_by_name():
    with pytest.raises(UnsupportedCache, match="mamba_cache_mode all"):
        state_block_tokens(spec("GDN_ATTN", [(3, 768), (4, 64, 64)], mamba_cache_mode="all"))


def test_checkpoints_of_a_prefill_change_nothing():
    """vLLM announces them for Mamba2 in every mode; they are states of shorter prefixes, in entries of their own."""
    shapes = [(3, 768), (4, 64, 64)]
    for mode, expected in (("none", 0), ("align", 128)):
        announced = spec("MAMBA2", shapes, mamba_cache_mode=mode, num_prefill_checkpoint_blocks=1)
        assert state_block_tokens(announced) == expected


@pytest.mark.parametrize(
    ("scratch", "block_tokens", "ids", "num_tokens", "block"),
    [
        (0, 0, [7], 1000, 7),  # none: one state
        (2, 0, [7, 8, 9], 1000, 7),  # and scratch blocks for draft tokens
        (0, 128, [0, 0, 7], 300, 7),  # align: superseded states are null
        (0, 128, [5, 7], 128, 5),  # a block that is full has its state, not the next one
        (0, 128, [5, 7], 129, 7),
        (1, 128, [0, 7, 8], 200, 7),
        (0, 128, [5], 300, 0),  # no entry
        (1, 128, [5, 8], 200, 0),  # only a scratch block
    ],
)
def test_the_block_that_holds_the_state_after_some_tokens(scratch, block_tokens, ids, num_tokens, block):
    assert StateGroup(scratch, block_tokens).state_block(ids, num_tokens) == block

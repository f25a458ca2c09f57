"""The reference attention's caches in fp8 hold what was written, to their precision and with their layer's scales."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pd_test_plugins.reference_attention import FP8, ReferenceAttention

SIZE, TOKENS = 8, 5


@pytest.mark.parametrize("name", FP8)
def test_what_is_read_is_what_was_written_to_the_precision_of_the_cache(name: str) -> None:
    torch.manual_seed(0)
    one: Any = object.__new__(ReferenceAttention)
    layer = SimpleNamespace(_k_scale_float=0.5, _v_scale_float=4.0)
    one.head_size, one.kv_cache_dtype, one._layer = SIZE, name, layer
    pages = torch.zeros(2, 1, 4, 2 * SIZE, dtype=torch.uint8)
    key, value = torch.randn(2, TOKENS, 1, SIZE)
    value[0, 0, 0] = 1e9
    one.do_kv_cache_update(layer, key, value, pages, torch.arange(TOKENS))
    found = one._numbers(pages).view(8, 2, SIZE)[:TOKENS]
    step = torch.finfo(FP8[name]).eps
    torch.testing.assert_close(found[:, 0], key[:, 0].double(), rtol=step, atol=step * 0.5)
    assert found[0, 1, 0] == 4.0 * torch.finfo(FP8[name]).max, "the largest number, and no infinity"
    torch.testing.assert_close(found[1:, 1], value[1:, 0].double(), rtol=step, atol=step * 4)
    assert not torch.equal(found[:, 0], key[:, 0].double())

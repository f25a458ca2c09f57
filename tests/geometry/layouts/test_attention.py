"""From vLLM's view of a layer to tensors: K and V, transposed K, latents, and pages that nobody understands."""

from dataclasses import replace

import pytest

from vllm_pd_connector.errors import UnsupportedCache
from vllm_pd_connector.geometry.layouts.attention import PageView, cpu_attention, in_planes, key_value, latent, opaque
from vllm_pd_connector.geometry.manifest import Axis, AxisName, Role
from vllm_pd_connector.geometry.sharding import Interval

# 10 pages of 4 tokens, heads 2 and 3 of 6, K and V of 8 two-byte channels, token-major (NHD).
NHD = PageView("layers.0", 1, 0, 1000, (10, 2, 4, 32), (256, 32, 64, 1), "bfloat16", 2, 2, Interval(2, 4), 6)
ONE = replace(NHD, shape=(10, 1, 4, 32), strides=(128, 32, 32, 1), heads=Interval(0, 1), total_heads=1)


def test_key_and_value_are_two_tensors_of_one_page() -> None:
    key, value = key_value(NHD, 8, 8)
    assert (key.role, value.role) == (Role.KEY, Role.VALUE)
    assert (key.offset, value.offset) == (1000, 1016)
    assert (
        key.axes
        == value.axes
        == (
            Axis(AxisName.TOKEN, 4, 64, 0, 4),
            Axis(AxisName.HEAD, 2, 32, 2, 6),
            Axis(AxisName.CHANNEL, 8, 2, 0, 8),
        )
    )
    assert (key.pages, key.page_stride, key.pages_per_block, key.page_tokens, key.group) == (10, 256, 2, 4, 1)


def test_head_sizes_of_key_and_value_may_differ() -> None:
    key, value = key_value(NHD, 12, 4)
    assert (key.axes[2].size, value.axes[2].size, value.offset) == (12, 4, 1024)


def test_cpu_attention_has_a_transposed_key_before_the_value() -> None:
    view = replace(NHD, strides=(256, 128, 32, 1))
    key, value = cpu_attention(view, 8)
    token, head, channel = key.axes
    assert (token.stride, head.stride, channel.stride) == (2, 128, 8)
    token, head, channel = value.axes
    assert (value.offset - key.offset, token.stride, head.stride, channel.stride) == (64, 16, 128, 2)


def test_a_latent_is_one_vector_per_token() -> None:
    (tensor,) = latent(ONE, 16)
    assert tensor.role is Role.LATENT and tensor.axes[2] == Axis(AxisName.CHANNEL, 16, 2, 0, 16)
    assert latent(ONE, 16, Role.INDEX)[0].role is Role.INDEX


def test_an_opaque_page_keeps_its_heads_as_an_interval_of_bytes() -> None:
    (tensor,) = opaque(NHD, "AMX packed")
    assert tensor.axes == (Axis(AxisName.BYTE, 256, 1, 256, 768),)
    assert (tensor.opaque, tensor.itemsize, tensor.page_tokens) == ("AMX packed", 1, 4)


def test_an_opaque_page_in_two_planes_is_two_pages_that_lie_apart() -> None:
    planes = replace(NHD, strides=(128, 1280, 32, 1))
    assert in_planes(planes)
    assert not any(in_planes(replace(NHD, strides=some)) for some in ((256, 128, 32, 1), (256, 1024, 32, 1)))
    tensors = opaque(planes, "shuffled")
    assert [(tensor.role, tensor.offset) for tensor in tensors] == [(Role.KEY, 1000), (Role.VALUE, 2280)]
    for tensor in tensors:
        assert tensor.axes == (Axis(AxisName.BYTE, 128, 1, 128, 384),), "the second of three ranks"
        assert (tensor.pages, tensor.page_stride, tensor.opaque) == (10, 128, "shuffled")


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: key_value(NHD, 8, 7), "content is 32 bytes .* expected 30"),
        (lambda: key_value(replace(NHD, strides=(256, 32, 64, 2)), 8, 8), "stride 2"),
        (lambda: key_value(replace(NHD, heads=Interval(0, 6)), 8, 8), "2 heads but the rank holds"),
        (lambda: cpu_attention(NHD, 8), "token stride is 64 bytes but a token has 32"),
        (lambda: latent(NHD, 16), "one head, this view has 2 of 6"),
        (lambda: latent(ONE, 15), "expected 30"),
        (lambda: opaque(NHD, ""), "needs a description"),
        (lambda: opaque(replace(NHD, strides=(256, 1024, 32, 1)), "x"), "must be contiguous"),
    ],
)
def test_a_view_that_a_codec_does_not_understand_is_refused(build, text: str) -> None:
    with pytest.raises(UnsupportedCache, match=text):
        build()

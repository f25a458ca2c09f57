"""Every model of the table, served in every recorded way, described, checked against every other, and planned."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.recorded import read
from tests.recorded.models import MODELS, Model
from tests.recorded.page import PAGE, page
from tests.recorded.verdicts import manifests_of, pairs


@pytest.mark.parametrize("recording", read.RECORDINGS)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_every_pair_of_a_model_is_planned_with_one_writer_per_byte_or_refused_by_field(
    model: Model, recording: str
) -> None:
    fixtures = read.of_model(model, recording)
    assert fixtures
    for fixture in fixtures:
        assert not isinstance(manifests_of(fixture), str), f"{fixture}: {manifests_of(fixture)}"
    for prefill, decode, verdict in pairs(fixtures):
        assert "invalid" not in verdict.status, (str(prefill), str(decode), verdict)
        assert verdict.allowed == bool(verdict.runs and verdict.bytes)
        if prefill == decode:
            assert verdict.status == "allow_homogeneous", (str(prefill), verdict)


def setup_pair(model: str, prefill: tuple[str, int], decode: tuple[str, int]) -> str:
    """The verdict in a word: affine, opaque or the first field by which the pair is refused."""
    found = next(one for one in MODELS if one.name == model)
    for source, destination, verdict in pairs(read.of_model(found)):
        if ((source.setup.name, source.tp), (destination.setup.name, destination.tp)) == (prefill, decode):
            if not verdict.allowed:
                return verdict.fields[0]
            manifests = manifests_of(destination)
            assert not isinstance(manifests, str)
            return "opaque" if any(tensor.opaque for tensor in manifests[0].tensors) else "affine"
    raise AssertionError("no such fixture")


HOPPER, BLACKWELL = "FlashMLA sparse fp8_ds_mla, Hopper", "FlashMLA sparse fp8_ds_mla, Blackwell"


@pytest.mark.parametrize(
    ("model", "prefill", "decode", "verdict"),
    [
        ("DeepSeek-V3.2", (HOPPER, 4), (BLACKWELL, 8), "affine"),  # blocks of 64 and 128
        ("GLM-5", (BLACKWELL, 2), (HOPPER, 8), "affine"),
        ("DeepSeek-V3.2", (HOPPER, 4), ("FlashInfer sparse fp8", 4), "dtype"),
        ("Kimi-K2", ("FlashMLA fp8", 8), ("Cutlass MLA fp8", 2), "affine"),
        ("DeepSeek-V4", ("FlashMLA fp8_ds_mla", 2), ("FlashMLA fp8_ds_mla, Blackwell", 8), "opaque"),
        ("GLM-5-Next", ("FlashMLA sparse bf16, Hopper", 4), ("FlashMLA sparse bf16, Hopper", 4), "opaque"),
        ("Gemma-4 31B", ("Triton+FA", 1), ("Triton+FA NHD", 8), "affine"),
        ("Gemma-4 26B", ("Triton", 8), ("Triton+FA", 2), "affine"),
        ("MiniMax-M3", ("M3 sparse bf16", 2), ("M3 sparse bf16", 8), "affine"),
        ("MiMo-V2 Flash", ("FA DIFFKV NHD", 8), ("FA DIFFKV HND", 2), "affine"),
        ("Llama-3 70B", ("Triton int8/head", 2), ("Triton int8/head", 4), "affine"),
        ("Llama-3 70B", ("FlashInfer NVFP4", 2), ("FlashInfer NVFP4", 2), "opaque"),
        ("Llama-3 70B", ("FlashInfer NVFP4", 2), ("FlashInfer NVFP4", 4), "page bytes"),
        # Blackwell's 10.x has the scales of V in tiles of four tokens, in pages that look the same.
        ("Llama-3 70B", ("FlashInfer NVFP4, Hopper", 2), ("FlashInfer NVFP4, Hopper", 4), "affine"),
        ("Llama-3 70B", ("FlashInfer NVFP4, Hopper", 4), ("FlashInfer NVFP4 NHD, SM120", 8), "affine"),
        ("Llama-3 70B", ("FlashInfer NVFP4, Hopper", 2), ("FlashInfer NVFP4", 2), "caches"),
        ("Bailing-linear", ("FA NHD", 2), ("FA NHD", 8), "affine"),
    ],
)
def test_what_works_with_unequal_sides_and_what_moves_whole(
    model: str, prefill: tuple[str, int], decode: tuple[str, int], verdict: str
) -> None:
    assert setup_pair(model, prefill, decode) == verdict


def test_the_page_of_models_is_what_the_recordings_say() -> None:
    assert PAGE.read_text() == page(), "renew it: python -m tests.recorded.page"


def test_no_layout_tears_a_run_that_another_order_keeps_whole() -> None:
    """TP 4 to 4, equal layouts: a page is one run; TP 4 to 8, HND keeps a head together and NHD does not."""
    model = MODELS[0]
    runs = {(p.setup.name, p.tp, d.setup.name, d.tp): v.runs for p, d, v in pairs(read.of_model(model))}
    assert runs["FA NHD", 4, "FA NHD", 8] == 32 * model.recorded  # a run per token and layer
    assert runs["FA HND", 4, "FA HND", 8] == 2 * model.recorded  # per block
    assert runs["FA NHD", 4, "FA NHD", 4] == runs["FA HND", 4, "FA HND", 4] == model.recorded


def test_the_recording_is_what_the_installed_vllm_hands_over() -> None:
    """In a process of its own: stand-ins for CUDA's libraries stay in it."""
    program = [sys.executable, "-m", "tests.recorded.record", "--check"]
    done = subprocess.run(program, cwd=PAGE.parents[1], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]

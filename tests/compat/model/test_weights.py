"""Weights that vLLM takes from elsewhere than from a model's files, or quantizes by what no flag says."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from vllm_pd_connector.compat.model.weights import quantization_of, weights_of


def weights(path: Path, form: str, **loader: object) -> str:
    model = SimpleNamespace(model=str(path), model_weights="", revision=None)
    return weights_of(model, SimpleNamespace(load_format=form, download_dir=None, model_loader_extra_config=loader))


def test_what_is_loaded_from_elsewhere_is_not_what_the_files_are(tmp_path: Path) -> None:
    """vLLM's cache of weights in a GPU keeps what it had when the files were replaced by others of their form."""
    save_file({"weight": np.full(10, 1.0)}, tmp_path / "model.safetensors")
    found = [
        weights(tmp_path, "auto"),
        weights(tmp_path, "ipc_cache"),
        weights(tmp_path, "of_a_plugin"),
        weights(tmp_path, "tensorizer", tensorizer_config={"tensorizer_uri": "s3://a/1"}),
        weights(tmp_path, "tensorizer", tensorizer_config={"tensorizer_uri": "s3://a/2"}),
    ]
    assert len(set(found)) == len(found) and weights(tmp_path, "ipc_cache") == found[1]
    assert found[1] == f"{found[0]} by --load-format ipc_cache"


def test_how_files_are_read_is_no_matter(tmp_path: Path) -> None:
    save_file({"weight": np.full(10, 1.0)}, tmp_path / "model.safetensors")
    ways = [weights(tmp_path, form, concurrency=2) for form in ("auto", "hf", "fastsafetensors", "runai_streamer")]
    assert len(set(ways)) == 1 and ways[0].startswith("content ")


def test_where_files_cannot_be_read_it_is_told_from_where_others_are(tmp_path: Path) -> None:
    """A tensorized model's directory holds its configuration alone."""
    found = [
        weights(tmp_path, "auto"),
        weights(tmp_path, "tensorizer", tensorizer_config={"tensorizer_uri": "s3://a/1"}),
        weights(tmp_path, "tensorizer", tensorizer_config={"tensorizer_uri": "s3://a/2"}),
    ]
    assert len(set(found)) == len(found) and not found[0]


def test_a_tensorized_model_is_told_by_its_uri_wherever_its_configuration_lies() -> None:
    """vLLM adds the model's own path to the options."""
    load = [
        EngineArgs(
            model=path, load_format="tensorizer", model_loader_extra_config={"tensorizer_uri": uri}
        ).create_load_config()
        for path, uri in (("/here", "s3://a/1"), ("/there", "s3://a/1"), ("/there", "s3://a/2"))
    ]
    model = SimpleNamespace(model="/none", model_weights="", revision="main")
    one, same, other = (weights_of(model, each) for each in load)
    assert one == same != other and one.startswith("revision main by --load-format tensorizer (")


def test_an_engine_that_is_added_is_told_by_the_files_of_those_from_which_it_has_its_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Elastic expert parallelism: vLLM makes it with random weights, and sends it those of the others."""
    sides = [tmp_path / name for name in "ab"]
    for value, side in enumerate(sides):
        side.mkdir()
        save_file({"weight": np.full(10, float(value))}, side / "model.safetensors")
    one, other = (weights(side, "auto") for side in sides)
    assert weights(sides[0], "dummy") == "dummy"
    monkeypatch.setenv("VLLM_ELASTIC_EP_SCALE_UP_LAUNCH", "1")
    assert [weights(side, "dummy") for side in sides] == [one, other] and one != other
    assert weights(sides[0], "ipc_cache") == f"{one} by --load-format ipc_cache"


def quantized(method: str | None) -> str:
    stored = SimpleNamespace(quantization_config=None)
    return quantization_of(SimpleNamespace(quantization=method, quantization_config=None, model_arch_config=stored))


def test_a_quantization_that_the_environment_says_is_told_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--quantization humming` quantizes as a variable has it: JSON, or a file of it."""

    def told(text: str, method: str | None = "humming") -> str:
        monkeypatch.setenv("VLLM_HUMMING_ONLINE_QUANT_CONFIG", text)
        return quantized(method)

    (tmp_path / "q.json").write_text('{"b_dtype": "int4", "group_size": 128}')
    nothing, four, eight = told(""), told('{"group_size": 128,  "b_dtype": "int4"}'), told('{"b_dtype": "int8"}')
    assert len({nothing, four, eight}) == 3 and told(str(tmp_path / "q.json")) == four
    assert told('{"b_dtype": "int4"}', method=None) == "", "nobody else reads it"


def test_weights_that_the_environment_alone_has_quantized_are_told_from_unquantized_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Muse on AMD, with vLLM 0.33; without any flag."""
    monkeypatch.setenv("VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "MXFP4")
    assert quantized(None) == "", "no AMD"
    monkeypatch.setattr(type(current_platform), "is_rocm", lambda _: True)
    told = quantized(None)
    monkeypatch.setenv("VLLM_ROCM_MUSE_MOE_ONLINE_QUANT", "mxfp4")
    assert quantized(None) == told != ""

"""What an instance says of its model, from vLLM's configuration."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file
from vllm.config.multimodal import MultiModalConfig

from vllm_pd_connector.compat.model.facts import event_endpoints, model_facts, software
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.manifest import CONFIGURATION, ModelFacts


def loaded(path: str | Path, weights: str = "", **changes: Any) -> SimpleNamespace:
    none = "revision quantization quantization_config hf_config_path multimodal_config original_max_model_len"
    fields: dict[str, Any] = dict.fromkeys(none.split()) | {"hf_overrides": {}, "architecture": "LlamaForCausalLM"}
    fields["model_arch_config"] = SimpleNamespace(quantization_config=None)
    return SimpleNamespace(model=str(path), model_weights=weights, **fields | changes)


def facts(
    path: str | Path,
    model_id: str | None,
    draft: str | Path | None = None,
    weights: str = "",
    method: str | None = "mtp",
    load_format: str = "auto",
    draft_format: str = "",
    own: Mapping[str, Any] | None = None,
    rope: Mapping[str, Any] | None = None,
    text: Mapping[str, Any] = MappingProxyType({}),
    max_model_len: int = 4096,
    **changes: Any,
) -> ModelFacts:
    """Of an instance that loads its model from `path`, and drafts by `method` unless that is None. `own` are keys of
    this connector, `text` of the language model's configuration, `changes` fields of vLLM's ModelConfig."""
    model = SimpleNamespace(
        **vars(loaded(path, weights, **changes)),
        dtype="torch.bfloat16",
        hf_text_config=SimpleNamespace(rope_parameters=rope, **text),
        max_model_len=max_model_len,
        get_total_num_hidden_layers=lambda: 2,
        get_hidden_size=lambda: 64,
        get_total_num_kv_heads=lambda: 2,
        get_head_size=lambda: 32,
    )
    drafts = SimpleNamespace(
        method=method,
        num_speculative_tokens=2,
        draft_model_config=loaded(draft or weights or path),
        draft_load_config=SimpleNamespace(load_format=draft_format, download_dir=None) if draft_format else None,
    )
    config: Any = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(cache_dtype="auto"),
        speculative_config=drafts if method else None,
        load_config=SimpleNamespace(load_format=load_format, download_dir=None),
    )
    return model_facts(config, Config(model_id=model_id, **own or {}))


@pytest.mark.parametrize("weights", ["", "/cache/weights"])
def test_a_model_that_drafts_for_itself_has_one_name_wherever_it_is_loaded_from(weights: str) -> None:
    assert facts("/here", "m", weights=weights) == facts("/there", "m")
    assert facts("/here", None) != facts("/there", None)


def architecture(overrides: object, rope: Mapping[str, Any] | None = None, **changes: Any) -> str:
    return facts("/m", None, method=None, rope=rope, hf_overrides=overrides, **changes).architecture


def test_overrides_of_the_configuration_are_told() -> None:
    """Same weights beside themselves with other numbers; who has none is as the release before says it."""
    told = [
        architecture({}),
        architecture({"rms_norm_eps": 1e-3}),
        architecture({"num_experts_per_tok": 2}),
        architecture({"num_experts_per_tok": 4}),
        architecture({"use_sliding_window": False}),
        architecture({"text_config": {"logit_scale": 0.5}}),
        architecture({"vision_config": {"rope_parameters": {"rope_theta": 5.0}}}),
    ]
    assert len(set(told)) == len(told)
    assert told[:2] == ["LlamaForCausalLM", 'LlamaForCausalLM with --hf-overrides {"rms_norm_eps": 0.001}']
    assert architecture({"a": 1, "b": 2}) == architecture({"b": 2, "a": 1})


LENGTH = {"max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "overrides",
    [
        LENGTH,
        {"architectures": ["LlamaForCausalLM"]},
        {"rope_parameters": {"rope_type": "yarn"}},
        {"quantization_config": {"quant_method": "fp8"}},
        {"num_nextn_predict_layers": 1},
        {"text_config": {**LENGTH, "rope_parameters": {}}},
    ],
)
def test_overrides_that_are_compared_by_their_effect_or_harmless_may_differ(overrides: object) -> None:
    assert architecture(overrides) == architecture({})


def test_options_that_make_other_embeddings_of_media_are_told() -> None:
    """vLLM's names of media have a request's own processor settings in them, and not an instance's."""

    def options(**given: Any) -> str:
        return architecture({}, multimodal_config=MultiModalConfig(**given))

    told = [
        options(),
        options(mm_processor_kwargs={"do_normalize": False}),
        options(mm_processor_kwargs={"do_normalize": True}),
        options(video_pruning_rate=0.5),
        options(video_pruning_rate=0.5, video_pruning_method="vidcom2"),
        options(mm_encoder_attn_dtype="fp8"),
        architecture({}, model_class_overrides={"LlamaForCausalLM": "mine:Llama"}),
    ]
    assert len(set(told)) == len(told)
    assert told[:2] == ["LlamaForCausalLM", 'LlamaForCausalLM with --mm-processor-kwargs {"do_normalize": false}']
    assert options(video_pruning_method="vidcom2", mm_processor_kwargs={"device": "cuda"}) == told[0]


def test_a_file_of_a_quantization_goes_by_its_content(tmp_path: Path) -> None:
    for name, bits in (("a", 4), ("b", 4), ("c", 8)):
        (tmp_path / name).write_text(str(bits))
    one, same, other, none = (architecture({"quantization_config_file": str(tmp_path / name)}) for name in "abcd")
    assert one == same != other != none and one != none


def test_overrides_of_a_quantization_may_differ_where_that_may() -> None:
    own, one = {"allow_mixed_quantization": True}, {"quantization_config_file": "/q.json"}
    assert architecture(one, own=own) == architecture({}, own=own)
    assert architecture(one) != architecture({})


def test_overrides_at_length_are_told_in_short() -> None:
    one, other = (architecture({"table": [0] * 50_000 + [last]}) for last in (1, 2))
    assert one != other and max(len(one), len(other)) < 5000


@pytest.mark.parametrize("kind", [{"rope_type": "dynamic"}, {"full_attention": {"rope_type": "longrope"}}])
def test_a_length_matters_where_rope_is_made_of_it(kind: Mapping[str, Any]) -> None:
    assert architecture(LENGTH, kind) != architecture({}, kind)


def test_functions_that_override_are_told_by_what_they_make() -> None:
    def made(**config: object) -> str:
        return architecture(lambda config: config, hf_config=SimpleNamespace(to_dict=lambda: config))

    one = {"rms_norm_eps": 1e-3, "text_config": {"logit_scale": 1.0}}
    assert made(**one, _name_or_path="/here", transformers_version="5.1") == made(**one, **LENGTH)
    others = [made(**one), made(**{**one, "rms_norm_eps": 1.0}), made(**one | {"text_config": {}}), architecture({})]
    assert len(set(others)) == len(others)


def served(
    path: Path, own: Mapping[str, Any] | None = None, rope: object = None, ngrams: int = 0, **changes: Any
) -> str:
    """What an instance says of the files of its model's configuration."""
    model = loaded(path, hf_text_config=SimpleNamespace(rope_parameters=rope, ngram_size=ngrams), **changes)
    return software(SimpleNamespace(model_config=model), Config(**own or {})).partition(CONFIGURATION)[2]


def configured(directory: Path, name: str = "config.json", **values: object) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps({"rms_norm_eps": 1e-5} | values))
    return directory


def test_configurations_that_lie_beside_equal_weights_are_told_apart(tmp_path: Path) -> None:
    """A hub's repository whose config.json alone was mended, and its copy from before."""
    one, copy = configured(tmp_path / "a"), configured(tmp_path / "b")
    assert served(one) == served(copy) != ""
    others = [
        configured(tmp_path / "c", rms_norm_eps=1e-6),
        configured(tmp_path / "d", num_experts_per_tok=4),
        configured(tmp_path / "e", text_config={"logit_scale": 0.5}),
        configured(tmp_path / "f", vision_config={"rope_theta": 0.5}),
    ]
    told = [served(path) for path in (one, *others)]
    assert len(set(told)) == len(told)
    assert served(one, hf_config_path=str(others[0])) == served(others[0], hf_config_path=None)
    assert served(others[0], {"weights_version": "v1"}) == "", "the name stands for it"


def test_what_a_configuration_may_say_otherwise(tmp_path: Path) -> None:
    one = configured(tmp_path / "a")
    names = {"_name_or_path": "/here", "transformers_version": "5.1", "eos_token_id": [1, 2], "torch_dtype": "float16"}
    effects = {"rope_scaling": {"type": "yarn"}, "quantization_config": {"quant_method": "fp8"}}
    assert served(configured(tmp_path / "b", **names, **effects, text_config=effects | LENGTH, **LENGTH)) == served(one)
    longer = configured(tmp_path / "c", **LENGTH)
    assert served(longer, rope={"rope_type": "dynamic"}) != served(one, rope={"rope_type": "dynamic"})
    ended = configured(tmp_path / "d", eos_token_id=1)
    assert served(ended) == served(one) and served(ended, ngrams=3) != served(one, ngrams=3), "a hash of it is embedded"


def test_what_makes_images_into_embeddings_is_part_of_the_configuration(tmp_path: Path) -> None:
    sides = [configured(tmp_path / name) for name in "ab"]
    for side, mean in zip(sides, (0.4, 0.5), strict=True):
        configured(side, "preprocessor_config.json", image_mean=mean)
    assert served(sides[0]) == served(sides[1]), "a model of text alone reads none"
    assert served(sides[0], multimodal_config=object()) != served(sides[1], multimodal_config=object())


def test_of_two_configurations_that_is_compared_which_vllm_reads(tmp_path: Path) -> None:
    """Mistral's repositories have both. Of one that vLLM downloads for itself this machine has Mistral's alone."""
    whole, alone, other = (
        configured(tmp_path / name, "params.json", norm_eps=n) for name, n in zip("abc", (1, 1, 2), strict=True)
    )
    for directory in (whole, alone, other):
        (directory / "consolidated-00001-of-00001.safetensors").touch()
    for directory in (whole, other):
        configured(directory)
    assert served(whole, config_format="auto") == served(alone, config_format="auto") != ""
    assert served(whole, config_format="auto") != served(other, config_format="auto")
    assert served(whole, config_format="hf") == served(other, config_format="hf")


def test_a_configuration_that_cannot_be_read_stops_no_engine(tmp_path: Path) -> None:
    assert served(tmp_path) == served(tmp_path / "nowhere") == ""
    (tmp_path / "config.json").write_text("[]")
    assert served(tmp_path) == ""
    (tmp_path / "config.json").write_text("{")
    assert served(tmp_path) == ""


def test_a_draft_model_of_its_own_is_told_apart() -> None:
    assert facts("/here", "m", draft="/draft-1") != facts("/here", "m", draft="/draft-2")


@pytest.mark.parametrize("method", ["ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator"])
def test_drafts_that_no_attention_makes_change_no_cache(method: str) -> None:
    """A decode instance that drafts so reads from a prefill instance that does not draft at all."""
    assert facts("/here", None, method=method) == facts("/here", None, method=None) != facts("/here", None)


def checkpoint(directory: Path, value: float) -> Path:
    directory.mkdir()
    save_file({"weight": np.full(10, value)}, directory / "model.safetensors")
    return directory


def test_weights_are_told_by_their_content_wherever_they_lie(tmp_path: Path) -> None:
    here, copy, other = (checkpoint(tmp_path / name, value) for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)))
    assert facts(here, "m", method=None) == facts(copy, "m", method=None)
    assert facts(here, "m", method=None).weights != facts(other, "m", method=None).weights
    assert facts(here, "m", draft=copy) != facts(here, "m", draft=other)
    drafted = facts(here, "m", draft=here / "..", method="eagle")
    assert drafted != facts(here, "m", method=None)


def test_of_weights_in_two_forms_those_are_told_that_vllm_loads(tmp_path: Path) -> None:
    """As Mistral's repositories have them, or who tunes one form: the other is the base's still."""
    here, other = (checkpoint(tmp_path / name, value) for name, value in (("a", 1.0), ("b", 2.0)))
    for directory in (here, other):
        save_file({"weight": np.full(10, 3.0)}, directory / "consolidated.safetensors")
        index = {"weight_map": {"weight": "model.safetensors"}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    assert facts(here, "m", method=None) == facts(other, "m", method=None)
    told = [facts(here, "m", method=None, load_format=form).weights for form in ("auto", "mistral", "hf")]
    assert told[0] == told[1] != told[2]
    assert told[2] != facts(other, "m", method=None, load_format="hf").weights
    drafted = [facts(tmp_path, "m", draft=draft, draft_format="hf").speculative for draft in (here, other)]
    assert len({json.loads(said)["weights"] for said in drafted}) == 2


def test_parts_of_a_model_that_lie_elsewhere_are_told(tmp_path: Path) -> None:
    """Ultravox has its language model in another repository, which only its configuration names."""
    here, text, tuned = (checkpoint(tmp_path / name, value) for name, value in (("a", 1.0), ("b", 1.0), ("c", 2.0)))

    def weights(**parts: object) -> str:
        return facts(here, "m", method=None, hf_config=SimpleNamespace(**parts)).weights

    assert weights() == weights(text_model_id=None) == facts(here, "m", method=None).weights
    found = [weights(), weights(text_model_id=text), weights(text_model_id=tuned), weights(audio_model_id="/nowhere")]
    assert len(set(found)) == 4


def test_weights_that_cannot_be_read_go_by_their_revision() -> None:
    one, same, other = (facts("org/model", None, method=None, revision=revision) for revision in ("v1", "v1", "v2"))
    assert one == same != other
    assert facts("org/model", None, method=None).weights == ""


def test_a_damaged_checkpoint_goes_by_its_revision_and_stops_no_engine(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"junk")
    assert facts(tmp_path, None, method=None, revision="v1").weights == "revision v1"


def test_a_version_of_both_sides_stands_for_the_weights(tmp_path: Path) -> None:
    here, other = (checkpoint(tmp_path / name, value) for name, value in (("a", 1.0), ("b", 2.0)))
    v1, v2 = {"weights_version": "1"}, {"weights_version": "2"}
    assert facts(here, "m", own=v1) == facts(other, "m", own=v1) != facts(other, "m", own=v2)
    assert facts(here, "m", draft=here, own=v1) != facts(here, "m", draft=other, own=v1), "told by its path"
    assert facts(here, "m", own=v1) != facts(here, "m")


def test_random_weights_pair_with_random_weights_alone(tmp_path: Path) -> None:
    here = checkpoint(tmp_path / "a", 1.0)
    assert facts(here, "m", load_format="dummy") == facts(tmp_path, "m", load_format="dummy") != facts(here, "m")


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def quantized(method: str | None, stored: object = None, options: object = None, **own: Any) -> str:
    stored = {"model_arch_config": SimpleNamespace(quantization_config=stored)} if stored else {}
    given = facts("/m", None, method=None, quantization=method, quantization_config=options, own=own, **stored)
    return given.quantization


def test_a_quantization_is_its_method_and_its_settings() -> None:
    kinds = [
        quantized(None),
        quantized("fp8"),
        quantized("int8_per_channel_weight_only"),
        quantized("fp8", FP8),
        quantized("fp8", {**FP8, "weight_block_size": [64, 64]}),
        quantized("fp8", None, {"linear": "fp8_per_tensor"}),
    ]
    assert len(set(kinds)) == len(kinds)
    assert kinds[0] == "" and kinds[3].startswith("fp8 (")


def test_the_kernels_of_a_quantization_are_each_sides_own() -> None:
    """vLLM calls GPTQ and AWQ by other names where a GPU has Marlin's kernels."""
    stored = {"quant_method": "awq", "bits": 4}
    assert quantized("awq", stored) == quantized("awq_marlin", stored)


def test_another_quantization_is_allowed_by_both_sides_or_not_at_all() -> None:
    assert quantized("fp8", allow_mixed_quantization=True) == quantized(None, allow_mixed_quantization=True) != ""


def test_no_other_quantization_is_allowed_where_it_orders_the_channels_of_keys() -> None:
    """K2-Horizon, where rope turns a part of each head's 32 channels: vLLM puts that part in front in weights that are
    not quantized, and K in the caches have the order of the weights."""
    allowed = {"allow_mixed_quantization": True}

    def told(method: str | None, file: str = "", name: str = "K2HorizonForCausalLM", **text: int | None) -> ModelFacts:
        overrides = {"quantization_config_file": file} if file else {}
        changes = {"architecture": name, "quantization": method, "hf_overrides": overrides}
        return facts("/m", None, method=None, own=allowed, text=text, **changes)

    part = {"rope_head_dim": 16}
    assert told("fp8", **part).quantization != told(None, **part).quantization == ""
    assert told("fp8", **part) == told("fp8", **part) != told("fp8", "/q.json", **part), "it may leave layers out"
    for whole in ({"rope_head_dim": 32}, {"rope_head_dim": None}, {}):
        assert told("fp8", "/q.json", **whole) == told(None, **whole)
    other = "LlamaForCausalLM"
    assert told("fp8", name=other, **part) == told(None, name=other, **part)


@pytest.mark.parametrize(
    ("endpoint", "replay", "index", "told"),
    [
        ("tcp://*:5557", None, 0, ("tcp://*:5557", "")),
        ("tcp://*:5557", "tcp://127.0.0.1:5558", 2, ("tcp://*:5559", "tcp://127.0.0.1:5560")),
        ("tcp://[::]:5557", None, 1, ("tcp://[::]:5558", "")),
        ("ipc:///run/events", None, 1, ("ipc:///run/events", "")),
        ("tcp://10.0.0.7:5557", "tcp://*:5558", 0, ("", "tcp://*:5558")),  # the engine connects there
        ("tcp://*:0", None, 0, ("", "")),
        ("inproc://events", None, 0, ("", "")),
    ],
)
def test_routers_are_told_the_endpoints_that_vllm_binds(
    endpoint: str, replay: str | None, index: int, told: tuple[str, str]
) -> None:
    settings = {"publisher": "zmq", "endpoint": endpoint, "replay_endpoint": replay}
    for publishes in (True, False):
        events = SimpleNamespace(enable_kv_cache_events=publishes, **settings)
        config: Any = SimpleNamespace(kv_events_config=events)
        assert event_endpoints(config, index) == (told if publishes else ("", ""))
    nothing: Any = SimpleNamespace(kv_events_config=None)
    assert event_endpoints(nothing, index) == ("", "")

"""Prompts that are more than token ids, as vLLM's own requests carry them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.config import LoRAConfig, MultiModalConfig
from vllm.lora.request import LoRARequest
from vllm.model_executor.models import ModelRegistry
from vllm.multimodal.inputs import (
    MultiModalFeatureSpec,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalSharedField,
    PlaceholderRange,
)
from vllm.sampling_params import SamplingParams
from vllm.utils import length_from_prompt_token_ids_or_embeds
from vllm.v1.request import Request

from tests.support.scheduler.halves import TOKEN, ended_halves, make_half, make_request
from tests.support.scheduler.push_halves import ASK
from vllm_pd_connector.compat.blocks import media_names, prompt_digest
from vllm_pd_connector.compat.conversations import prefix_digests
from vllm_pd_connector.compat.model.adapters import Adapters
from vllm_pd_connector.compat.model.caches import _POSITIONS_BY_RANGE, stop_short, takes_media_whole
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.geometry.blocks import BlockTable

TOKENS, HIDDEN = 6, 4


def embedded(*values: float) -> Request:
    """A chat with embeddings in the place of its last tokens, one per value."""
    ids, embeds = list(range(TOKENS)), torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16)
    for at, value in enumerate(values, TOKENS - len(values)):
        embeds[at] = value
    mask = [at < TOKENS - len(values) for at in range(TOKENS)]
    return Request("r", ids, SamplingParams(max_tokens=9), None, prompt_embeds=embeds, prompt_is_token_ids=mask)


def test_a_prompt_of_tokens_and_embeddings_is_cut_short_in_all_of_its_parts():
    """vLLM's workers refuse a request whose parts have different lengths, and end."""
    request = embedded(1.0, 2.0)
    stop_short(request, 1, False)
    assert length_from_prompt_token_ids_or_embeds(request.prompt_token_ids, request.prompt_embeds) == TOKENS - 1
    assert request.num_prompt_tokens == request.num_tokens == TOKENS - 1
    assert request.prompt_is_token_ids == [True] * 4 + [False]


def test_who_shares_a_prompt_s_list_of_tokens_keeps_the_last():
    """With the engine core in the caller's process the choices of a request have one list, and it is the caller's."""
    ids = list(range(TOKENS))
    choices = [Request(f"{choice}_r", ids, SamplingParams(max_tokens=9), None) for choice in range(2)]
    for request in choices:
        stop_short(request, 1, False)
        assert request.prompt_token_ids == list(request.all_token_ids) == ids[: TOKENS - 1]
    assert ids == list(range(TOKENS))


def with_media(*names: str, lora: str | None = None, pixels: float | None = 0.5) -> Any:
    request: Any = Request("r", list(range(TOKENS)), SamplingParams(max_tokens=9), None)
    shared = MultiModalSharedField(batch_size=1)
    fields = {"size": torch.tensor([3, 3]), "pixels": torch.full((3, 3), pixels or 0, dtype=torch.bfloat16)}
    item = MultiModalKwargsItem({name: MultiModalFieldElem(data=data, field=shared) for name, data in fields.items()})
    place, data = PlaceholderRange(offset=0, length=2), None if pixels is None else item
    request.mm_features = [MultiModalFeatureSpec(data, "image", name, place) for name in names]
    request.lora_request = LoRARequest(lora, 1, "/no/such/adapter") if lora else None
    return request


@pytest.mark.parametrize(
    ("modality", "whole", "ends", "cut"),
    [
        ("video", False, False, True),
        ("video", False, True, False),
        ("image", False, True, True),
        ("image", True, True, False),
        ("audio", True, False, True),
    ],
)
def test_a_prompt_is_not_cut_within_a_medium_that_is_computed_in_one_piece(modality, whole, ends, cut):
    """A video's last frame ends with a token of its own, which Qwen3.5 looks for in vLLM's workers; the tokens of an
    image look at each other in both directions in Gemma 3 and 4."""
    ids = [1, 9, 9, 9, 5] if ends else [1, 9, 9, 9, 5, 7]
    request: Any = Request("r", ids, SamplingParams(max_tokens=9), None)
    request.mm_features = [MultiModalFeatureSpec(None, modality, "m", PlaceholderRange(offset=0, length=5))]
    if cut:
        stop_short(request, 1, whole)
        assert request.num_prompt_tokens == (4 if ends else 5)
        return
    with pytest.raises(ProtocolError, match=rf"ends within a medium of kind {modality} \(5 tokens from 0 on, 5 in"):
        stop_short(request, 1, whole)
    assert request.num_prompt_tokens == len(request.prompt_token_ids) == 5


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_prompt_that_comes_in_parts_is_refused_and_not_cut(tokens):
    """The next part is put behind the first, which would lack its end."""
    request = Request("r", list(range(TOKENS)), SamplingParams(max_tokens=9), None, resumable=True)
    with pytest.raises(ProtocolError, match="do_remote_decode: the prompt comes in parts"):
        stop_short(request, tokens, False)
    assert request.prompt_token_ids == list(request.all_token_ids) == list(range(TOKENS)) and request.max_tokens == 9


@pytest.mark.parametrize(
    ("told", "both_ways", "positions", "model", "whole"),
    [
        (False, False, False, "Any", False),
        (True, False, False, "Any", True),
        (False, True, False, "Any", True),
        (False, False, True, "Qwen3_5ForConditionalGeneration", False),
        (False, False, True, "MiniCPMV4_7ForConditionalGeneration", True),
        (False, False, True, "TransformersMultiModalForCausalLM", True),
    ],
)
def test_vllms_configuration_says_whether_media_are_computed_in_one_piece(told, both_ways, positions, model, whole):
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_chunked_mm_input=told),
        model_config=SimpleNamespace(is_mm_prefix_lm=both_ways, uses_mrope=positions, architecture=model),
    )
    assert takes_media_whole(config) is whole


def test_models_that_make_positions_by_what_is_there_are_known_by_vllms_names():
    assert set(ModelRegistry.get_supported_archs()) >= _POSITIONS_BY_RANGE


def with_adapter(path: Path, name: str = "sql", number: int = 1, *, in_place: bool = False) -> Any:
    request = with_media()
    request.lora_request = LoRARequest(name, number, str(path), load_inplace=in_place)
    return request


def adapter(directory: Path, content: bytes) -> Path:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text('{"r": 8}')
    (directory / "adapter_model.safetensors").write_bytes(content)
    return directory


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (embedded(1.0, 2.0), embedded(1.0, 3.0)),
        (with_media("ab", "c"), with_media("a", "bc")),
        (with_media("a", lora="b"), with_media("ab")),
        (with_media("a"), with_media("b")),
        (with_media("renderer0-mm-7-image-0"), with_media("renderer0-mm-7-image-0", "renderer0-mm-7-image-1")),
        (with_media("renderer0-mm-7-image-0"), with_media("renderer0-mm-7-image-0", pixels=0.25)),
    ],
)
def test_prompts_of_the_same_tokens_and_other_contents_are_told_apart(one, other):
    assert prompt_digest(one, TOKENS) != prompt_digest(other, TOKENS)
    assert prompt_digest(one, TOKENS) == prompt_digest(one, TOKENS)


def test_only_the_embeddings_of_the_tokens_that_are_handed_over_count():
    assert prompt_digest(embedded(1.0, 2.0), TOKENS - 1) == prompt_digest(embedded(1.0, 3.0), TOKENS - 1)


def test_media_that_each_process_names_for_itself_are_compared_by_their_content():
    """vLLM hashes no image where it caches neither images nor prefixes."""
    there, here = with_media("renderer0-mm-7-image-0"), with_media("renderer1-mm-12-image-0")
    assert prompt_digest(there, TOKENS) == prompt_digest(here, TOKENS)


def hashing(cache_gb: float = 0, prefixes: bool = False, encoded: object = None) -> Any:
    return SimpleNamespace(
        model_config=SimpleNamespace(multimodal_config=MultiModalConfig(mm_processor_cache_gb=cache_gb)),
        cache_config=SimpleNamespace(enable_prefix_caching=prefixes),
        ec_transfer_config=encoded,
    )


def test_a_hash_of_a_counter_is_no_name_of_a_medium():
    """Where vLLM hashes no image, it hashes its own name for one together with a request's options."""
    there, here, other = with_media("a" * 64), with_media("b" * 64), with_media("a" * 64, pixels=0.25)
    digests = [prompt_digest(each, TOKENS, medium_of=media_names(hashing())) for each in (there, here, other)]
    assert digests[0] == digests[1] != digests[2]
    prefixes = [prefix_digests(each, [TOKENS], medium_of=media_names(hashing())) for each in (there, here, other)]
    assert prefixes[0] == prefixes[1] != prefixes[2]
    with pytest.raises(ProtocolError, match="neither a hash nor content"):
        prompt_digest(with_media("a" * 64, pixels=None), TOKENS, medium_of=media_names(hashing()))


@pytest.mark.parametrize("config", [hashing(cache_gb=4), hashing(prefixes=True), hashing(encoded=object())])
def test_a_name_is_one_where_vllm_hashes_media_or_takes_clients_names_for_them(config):
    """The content need not be there: vLLM sends it once, or an EC connector brings it."""
    one, other = (prompt_digest(with_media(name, pixels=None), TOKENS, medium_of=media_names(config)) for name in "ab")
    assert one == prompt_digest(with_media("a"), TOKENS) != other


def test_both_halves_name_media_by_what_their_engine_hashes():
    """Of one image in two instances, which have counted otherwise: a prefill, what a turn left, and who reads them."""
    media = MultiModalConfig(mm_processor_cache_gb=0)
    there, here, other = (
        make_request("r", ASK, list(range(TOKENS)), mm_features=with_media(name * 64, pixels=pixels).mm_features)
        for name, pixels in (("a", 0.5), ("b", 0.5), ("a", 0.25))
    )
    for each in (there, here, other):
        each.all_token_ids, each.cache_salt = list(range(TOKENS)), None
    with ended_halves():
        prefill, _ = make_half("kv_producer", media=media)
        decode, _ = make_half("kv_consumer", media=media, conversations=True)
        prefill.serve([b"manifest"], [TOKEN])
        prefill.on_new_request(there)
        _, params = prefill.request_finished(there, ([5],))
        here.kv_transfer_params = other.kv_transfer_params = params
        sources, tables = decode.consumer.sources, (BlockTable(0, bytes(4)),)
        sources.require_fit(here, sources.answer(here))
        with pytest.raises(ProtocolError, match="is not this request's"):
            sources.require_fit(other, sources.answer(other))
        left = [decode.producer.lending.prefixes(each, tables, TOKENS) for each in (there, here, other)]
        assert left[0] == left[1] != left[2]


def test_media_with_neither_a_name_nor_content_are_refused():
    with pytest.raises(ProtocolError, match="neither a hash nor content"):
        prompt_digest(with_media("renderer0-mm-7-image-0", pixels=None), TOKENS)
    assert prompt_digest(with_media("hash", pixels=None), TOKENS) == prompt_digest(with_media("hash"), TOKENS)


def book(**ids: str) -> Adapters:
    return Adapters(ids, None, lambda: True)


def test_adapters_of_one_name_are_told_apart_by_their_files(tmp_path: Path):
    one, copy, other = (
        with_adapter(adapter(tmp_path / name, content)) for name, content in (("a", b"1"), ("b", b"1"), ("c", b"2"))
    )
    assert prompt_digest(one, TOKENS) == prompt_digest(copy, TOKENS)
    assert len({prompt_digest(each, TOKENS) for each in (one, other, with_media())}) == 3


def test_an_id_of_both_sides_stands_for_an_adapter(tmp_path: Path):
    one, other = (with_adapter(adapter(tmp_path / content.decode(), content)) for content in (b"1", b"2"))
    digests = [prompt_digest(each, TOKENS, book(sql="v2").name_of) for each in (one, other)]
    assert digests[0] == digests[1] != prompt_digest(other, TOKENS, book(sql="v3").name_of)
    assert prompt_digest(one, TOKENS, book(other="v2").name_of) == prompt_digest(one, TOKENS)


def test_an_adapter_whose_files_cannot_be_read_goes_by_its_path():
    one, again, other = (with_adapter(Path(path)) for path in ("/nowhere/a", "/nowhere/a", "/nowhere/b"))
    assert prompt_digest(one, TOKENS) == prompt_digest(again, TOKENS) != prompt_digest(other, TOKENS)


def test_an_adapter_is_read_as_vllm_loads_it(tmp_path: Path):
    """Once by its number, and anew where it is loaded in place of its former self."""
    path, adapters = adapter(tmp_path / "a", b"1"), book()
    loaded = adapters.name_of(with_adapter(path))
    assert adapters.name_of(with_adapter(path, in_place=True)) == loaded
    adapter(path, b"22")
    assert adapters.name_of(with_adapter(path)) == loaded
    reloaded = adapters.name_of(with_adapter(path, in_place=True))
    assert loaded != reloaded == adapters.name_of(with_adapter(path, number=2))


def test_an_adapter_that_failed_to_load_is_what_its_files_are_when_it_loads(tmp_path: Path):
    """Under the same number, and not in place: an engine's own interface leaves the number to its caller."""
    request, adapters = with_adapter(adapter(tmp_path / "a", b"1")), book()
    adapters.loaded(request.lora_request, done=False)
    failed = adapters.name_of(request)
    adapter(tmp_path / "a", b"22")
    adapters.loaded(request.lora_request, done=True)
    assert failed != adapters.name_of(request) == book().name_of(with_adapter(tmp_path / "a", number=3))


def test_an_adapter_that_was_loaded_again_is_what_was_loaded_whatever_becomes_of_its_files(tmp_path: Path):
    """Given away by the workers, it is what its files are; loaded since, it is what they were then."""
    request, adapters = with_adapter(adapter(tmp_path / "a", b"1")), book()
    adapters.loaded(request.lora_request, done=True)
    adapters.removed(1)
    adapter(tmp_path / "a", b"22")
    adapters.loaded(request.lora_request, done=True)
    loaded = adapters.name_of(request)
    adapter(tmp_path / "a", b"333")
    assert adapters.name_of(request) == loaded
    adapters.removed(1)
    assert adapters.name_of(request) != loaded


def test_an_adapter_for_which_there_was_no_place_may_be_what_its_files_became(tmp_path: Path):
    """Workers with one place give it away for another's, and read it again, without a word."""
    adapters = Adapters({}, LoRAConfig(max_lora_rank=8, max_loras=1), lambda: True)
    request, other = (with_adapter(adapter(tmp_path / str(n), b"1"), number=n) for n in (1, 2))
    loaded = adapters.name_of(request)
    adapter(tmp_path / "1", b"22")
    assert adapters.name_of(request) == loaded, "it is still there"
    adapters.name_of(other)
    with pytest.raises(ProtocolError, match="have changed since they were loaded"):
        adapters.name_of(request)
    again = with_adapter(tmp_path / "1", number=1, in_place=True)
    adapters.loaded(again.lora_request, done=True)
    assert adapters.name_of(again) == book().name_of(with_adapter(tmp_path / "1", number=3)) != loaded


def test_an_adapter_that_workers_have_yet_to_download_has_not_changed_when_it_is_there(tmp_path: Path):
    adapters = Adapters({}, LoRAConfig(max_lora_rank=8, max_loras=1), lambda: True)
    request, other = (with_adapter(tmp_path / str(n), number=n) for n in (1, 2))
    adapters.age(request)
    known = adapters.name_of(request)
    adapter(tmp_path / "1", b"1")
    adapters.age(request)
    adapters.name_of(other)
    assert adapters.name_of(request) == known
    adapter(tmp_path / "1", b"22")
    with pytest.raises(ProtocolError, match="have changed since they were loaded"):
        adapters.name_of(request)


def test_an_adapter_that_was_given_away_is_read_once(tmp_path: Path):
    """When a request has it, but nobody tells when: files that change after that may be what it is, or not."""
    request, adapters = with_adapter(adapter(tmp_path / "a", b"1")), book()
    first = adapters.name_of(request)
    adapters.removed()
    adapter(tmp_path / "a", b"22")
    assert adapters.name_of(request) != first
    adapter(tmp_path / "a", b"333")
    with pytest.raises(ProtocolError, match="load it in place"):
        adapters.name_of(request)


def test_an_adapter_that_is_used_in_part_is_another(tmp_path: Path):
    request = with_adapter(adapter(tmp_path / "a", b"1"))
    parts = [None, ["q_proj"], ["v_proj", "q_proj"], ["q_proj", "v_proj"]]
    configs = [LoRAConfig(max_lora_rank=8, target_modules=part) for part in parts]
    digests = [prompt_digest(request, TOKENS, Adapters({}, one, lambda: True).name_of) for one in configs]
    assert digests[0] == prompt_digest(request, TOKENS) and digests[2] == digests[3] and len(set(digests)) == 3


def test_an_adapter_whose_files_are_replaced_after_it_was_perhaps_read_again_is_nobodys(tmp_path: Path):
    """Given away by the workers, they read it with the first request that is scheduled, and keep that."""
    request, adapters = with_adapter(adapter(tmp_path / "a", b"1")), book()
    adapters.loaded(request.lora_request, done=True)
    adapters.removed(1)
    first = adapters.age(request)
    known = adapters.name_of(request)
    adapter(tmp_path / "a", b"22")
    assert adapters.age(request) != first
    for done in (None, True):  # that they load what they have changes nothing
        if done:
            adapters.loaded(request.lora_request, done=True)
        with pytest.raises(ProtocolError, match="have changed since"):
            adapters.name_of(request)
    adapters.removed(1)
    adapters.loaded(request.lora_request, done=True)
    assert known != adapters.name_of(request) == book().name_of(with_adapter(tmp_path / "a", number=2))


def test_an_adapter_in_the_home_of_nobody_goes_by_its_path():
    """vLLM looks for the path as it stands, and a request must not end the engine."""
    assert "~nobody-is-called-so/a" in book().name_of(with_adapter(Path("~nobody-is-called-so/a")))

"""Media that vLLM has encoded outlast a change of weights, unless it is told to forget them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from tests.support.scheduler.halves import make_request
from vllm_pd_connector.compat.blocks import encoded_media
from vllm_pd_connector.scheduler.epochs import Epochs

SCHEDULER: Any = SimpleNamespace(encoder_cache_manager=None)


@pytest.fixture
def manager() -> EncoderCacheManager:
    SCHEDULER.encoder_cache_manager = EncoderCacheManager(100)
    return SCHEDULER.encoder_cache_manager


@pytest.fixture
def epochs(manager: EncoderCacheManager) -> Epochs:
    made = Epochs({}, None, lambda: False)
    made.own.begin("content")
    made.encoded = lambda: encoded_media(SCHEDULER)
    return made


def with_image(name: str, image: str) -> Any:
    """A request with one image."""
    request = make_request(name, {"do_remote_decode": True}, mm_features=[SimpleNamespace(identifier=image)])
    request.get_num_encoder_embeds = lambda _: 5
    return request


def encode(manager: EncoderCacheManager, request: Any) -> None:
    """As vLLM's scheduler does for an image that it does not find."""
    if not manager.check_and_update_cache(request, 0):
        assert manager.can_allocate(request, 0, 50, 0)
        manager.allocate(request, 0)


def prefilled(
    epochs: Epochs, manager: EncoderCacheManager, name: str, image: str, hit: int = 0, wanted: bool = True
) -> str:
    """Why a prefill that is computed now is not handed over; `wanted`: somebody wants it."""
    request = with_image(name, image)
    encode(manager, request)
    begins = SimpleNamespace(req_id=name, num_computed_tokens=hit, mm_features=request.mm_features)
    cached = SimpleNamespace(resumed_req_ids=set())
    step: Any = SimpleNamespace(
        scheduled_new_reqs=[begins], scheduled_cached_reqs=cached, num_scheduled_tokens={name: 40}
    )
    epochs.advance(step, {name: request} if wanted else {})
    why = epochs.mixed(request)
    manager.free_encoder_input(request, 0)
    epochs.forget(name)
    return why


def test_what_the_former_weights_had_encoded_is_not_handed_over(epochs: Epochs, manager: EncoderCacheManager) -> None:
    assert prefilled(epochs, manager, "a", "image") == ""
    epochs.moved()
    assert "its media had been encoded with former ones" in prefilled(epochs, manager, "b", "image")
    assert prefilled(epochs, manager, "c", "another") == ""
    manager.reset()
    assert prefilled(epochs, manager, "d", "image") == "", "it was encoded anew"
    epochs.moved()
    assert "POST /reset_encoder_cache" in prefilled(epochs, manager, "e", "image")


def test_what_was_computed_of_them_is_not_handed_over_when_it_is_found(
    epochs: Epochs, manager: EncoderCacheManager
) -> None:
    """The prefix cache was reset, and then any request has computed with them, for whomever."""
    prefilled(epochs, manager, "a", "image")
    epochs.moved()
    epochs.was_reset()
    assert prefilled(epochs, manager, "b", "another", hit=16) == ""
    prefilled(epochs, manager, "c", "image", wanted=False)
    manager.reset()
    assert "it began with a prefix" in prefilled(epochs, manager, "d", "image", hit=16)
    epochs.was_reset()
    assert prefilled(epochs, manager, "e", "image", hit=16) == "" and not epochs._encoded_before


def test_so_are_media_of_an_adapter_that_was_loaded_in_place(epochs: Epochs, manager: EncoderCacheManager) -> None:
    for image in ("vis:image", "other:image"):
        assert prefilled(epochs, manager, "a", image) == ""
    epochs.adapter_moved("vis")
    assert "its adapter's perhaps" in prefilled(epochs, manager, "b", "vis:image")
    assert prefilled(epochs, manager, "c", "other:image") == ""


def test_models_that_keep_no_encoded_media_have_none_that_are_old(epochs: Epochs) -> None:
    SCHEDULER.encoder_cache_manager = SimpleNamespace(allocated=["x"])
    epochs.moved()
    assert not encoded_media(SCHEDULER)

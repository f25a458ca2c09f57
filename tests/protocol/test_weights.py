"""Which weights an instance has while they change, against a model that keeps what was truly computed with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.protocol.weights import MAX_NAME, OwnWeights, unlike, version_name
from vllm_pd_connector.protocol.wire.fields import Weights


def begun(name: str = "content a") -> OwnWeights:
    own = OwnWeights()
    own.begin(name)
    return own


def test_what_nobody_changed_is_for_the_handshake_to_compare() -> None:
    assert begun("content a").unlike(Weights("content b")) == ""


def test_between_a_change_and_a_name_nothing_fits() -> None:
    own = begun()
    assert own.changing() and not own.changing(), "several calls make one change"
    assert "not named yet" in own.unlike(own.now) and own.now.epoch == 1
    assert not own.named("v2"), "the epoch has ended with the change"
    assert own.now == Weights("version v2", 1) and own.unlike(Weights("version v2", 7)) == ""
    assert "'content a' there, 'version v2' here" in own.unlike(Weights("content a"))


def test_another_name_ends_an_epoch_and_the_same_does_not() -> None:
    own = begun()
    assert own.named("v1") and not own.named("v1") and own.named("v2")
    assert own.now == Weights("version v2", 2)


def test_a_name_that_was_configured_is_the_one_that_is_told() -> None:
    """An instance that was replaced pairs with those that were told at run time."""
    replaced, running = begun(version_name("v7")), begun()
    running.changing()
    running.named("v7")
    assert replaced.unlike(running.now) == running.unlike(replaced.now) == ""


def test_what_was_loaded_says_nothing_once_it_was_changed() -> None:
    own = begun()
    own.changing()
    own.begin("content b")
    assert own.now.name == "content a" and own.nameless


@pytest.mark.parametrize("version", ["", "x" * MAX_NAME, "\ud800"])
def test_every_name_can_be_told(version: str) -> None:
    assert version_name(version).encode()


def test_long_names_are_told_apart() -> None:
    names = {version_name("x" * length) for length in range(MAX_NAME, MAX_NAME + 40)}
    assert len(names) == 40 and max(map(len, names)) < 2 * MAX_NAME


@given(st.lists(st.tuples(st.sampled_from("pd"), st.sampled_from(["change", "v1", "v2", "v3"])), max_size=12))
def test_nothing_fits_that_was_not_given_the_same_name(events: list[tuple[str, str]]) -> None:
    """The oracle: the latest name that each side was told, None since a change."""
    sides = {"p": begun(), "d": begun()}
    told: dict[str, str | None] = {"p": "as started", "d": "as started"}
    for side, what in events:
        if what == "change":
            sides[side].changing()
        else:
            sides[side].named(what)
        told[side] = None if what == "change" else what
    p, d = sides["p"], sides["d"]
    fits = None not in told.values() and told["p"] == told["d"]
    assert (d.unlike(p.now) == "" and not p.nameless) == fits
    assert p.nameless or d.nameless or (unlike(p.now, d.now) == "") == fits

"""Who takes a request: the least busy instance, or the one that knows the prompt."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.proxy.choice import (
    MAX_PIECES,
    PIECE_CHARACTERS,
    PIECE_TOKENS,
    Candidate,
    Chooser,
    prefix_keys,
)

LONG = {"model": "m", "prompt": list(range(3 * PIECE_TOKENS))}


def candidates(**in_flight: int) -> list[Candidate]:
    return [Candidate(url, count) for url, count in in_flight.items()]


@given(st.lists(st.integers(0, 5), max_size=400), st.lists(st.integers(0, 5), max_size=400))
def test_keys_are_equal_as_far_as_the_tokens_are(first: list[int], second: list[int]) -> None:
    same = next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )
    keys = [prefix_keys({"prompt": prompt}) for prompt in (first, second)]
    equal = [a == b for a, b in zip(*keys, strict=False)]
    assert equal == [number < same // PIECE_TOKENS for number in range(len(equal))]


def test_text_and_messages_have_keys_too() -> None:
    text = "x" * PIECE_CHARACTERS
    assert len(prefix_keys({"prompt": text})) == 1
    assert len(prefix_keys({"prompt": text[1:]})) == 0
    chats = [prefix_keys({"messages": [{"role": "user", "content": text + end}]}) for end in ("a", "b")]
    assert chats[0][0] == chats[1][0]
    assert prefix_keys({"prompt": "\ud800" * PIECE_CHARACTERS})


def test_another_model_has_other_keys() -> None:
    assert not set(prefix_keys(LONG)) & set(prefix_keys(LONG | {"model": "n"}))


def test_a_very_long_prompt_has_a_bounded_number_of_keys() -> None:
    assert len(prefix_keys({"prompt": [1] * PIECE_TOKENS * (MAX_PIECES + 9)})) == MAX_PIECES


def test_the_least_busy_is_chosen_and_the_idle_take_turns() -> None:
    chooser = Chooser(slack=2)
    assert chooser.choose(candidates(a=3, b=1, c=2), []) == ("b", False)
    order = []
    for _ in range(6):
        url, _ = chooser.choose(candidates(a=0, b=0, c=0), [])
        chooser.took(url, [])
        order.append(url)
    assert order == ["a", "b", "c", "a", "b", "c"]


def test_who_knows_the_prompt_is_preferred_up_to_the_slack() -> None:
    chooser = Chooser(slack=2)
    keys = prefix_keys(LONG)
    chooser.took("a", keys)
    assert chooser.choose(candidates(a=2, b=0), keys) == ("a", True)
    assert chooser.choose(candidates(a=3, b=0), keys) == ("b", False)
    assert chooser.choose(candidates(b=0), keys) == ("b", False)


def test_the_longer_known_beginning_wins() -> None:
    chooser = Chooser(slack=2)
    keys = prefix_keys(LONG)
    chooser.took("b", keys)
    chooser.took("a", keys[:1])
    assert chooser.choose(candidates(a=0, b=0), keys) == ("b", True)
    assert chooser.choose(candidates(a=0, b=0), keys[:1]) == ("a", True)


def test_a_forgotten_instance_has_no_prompts() -> None:
    chooser = Chooser(slack=2)
    keys = prefix_keys(LONG)
    chooser.took("b", keys)
    chooser.forget("b")
    assert chooser.choose(candidates(a=0, b=0), keys) == ("a", False)


def test_the_memory_of_prompts_is_bounded_and_keeps_the_newest() -> None:
    chooser = Chooser(slack=2, capacity=3)
    keys = [bytes([number]) for number in range(5)]
    for key in keys:
        chooser.took("b", [key])
    found = [chooser.choose(candidates(a=0, b=0), [key])[1] for key in keys]
    assert found == [False, False, True, True, True]


def test_who_holds_the_longest_beginning_goes_before_who_was_sent_it() -> None:
    chooser = Chooser(slack=2)
    keys = prefix_keys(LONG)
    chooser.took("a", keys)
    assert chooser.choose(candidates(a=0, b=0), keys, {"a": 64, "b": 128}) == ("b", True)
    assert chooser.choose(candidates(a=0, b=2), keys, {"b": 1}) == ("b", True)


def test_who_holds_the_longest_beginning_is_preferred_up_to_the_slack() -> None:
    chooser = Chooser(slack=2)
    held = {"a": 16, "b": 128}
    assert chooser.choose(candidates(a=0, b=3, c=1), [], held) == ("a", True)
    assert chooser.choose(candidates(b=3, c=0), [], held) == ("c", False)


def test_among_those_that_hold_as_much_it_is_who_was_sent_it_and_then_who_is_least_busy() -> None:
    chooser = Chooser(slack=2)
    keys = prefix_keys(LONG)
    held = {"a": 64, "b": 64, "c": 0}
    assert chooser.choose(candidates(a=2, b=1, c=0), keys, held) == ("b", True)
    chooser.took("a", keys)
    assert chooser.choose(candidates(a=2, b=1, c=0), keys, held) == ("a", True)
    chooser.took("c", keys)
    assert chooser.choose(candidates(a=2, b=1, c=0), keys, held) == ("b", True)


def test_of_a_long_chat_only_the_beginning_is_read() -> None:
    """The rest may be images of megabytes."""

    class Image(dict[str, str]):
        def items(self) -> Any:
            raise AssertionError("it was read")

    said = [{"role": "user", "content": "x" * 100 * i} for i in range(30)]
    before = prefix_keys({"messages": said})
    assert len(before) == MAX_PIECES
    assert prefix_keys({"messages": [*said, Image(type="image_url")]}) == before
    whole = json.dumps(said[:5], separators=(",", ":"))
    assert prefix_keys({"messages": said[:5]}) == prefix_keys({"prompt": whole})

"""The comparison of answers neither hides a difference behind a near-tie nor takes a near-tie for one."""

from __future__ import annotations

from tests.support.servers.agreement import MOST_DRIFT, PARTING_GAP, disagreement
from tests.support.servers.workload import Answer

CLOSE = {7: -1.0, 8: -1.0 - PARTING_GAP / 2, 9: -3.0}
CLEAR = {7: -0.1, 8: -4.0, 9: -5.0}


def answer(tokens: tuple[int, ...], *steps: dict[int, float]) -> Answer:
    return Answer(tokens, None, steps)


PLAIN = answer((7, 7, 7), CLEAR, CLOSE, CLEAR)


def test_equal_tokens_agree() -> None:
    assert not disagreement(PLAIN, PLAIN, exact=True)
    assert not disagreement(PLAIN, PLAIN, exact=False)


def test_in_float32_every_other_token_is_a_difference() -> None:
    assert disagreement(PLAIN, answer((7, 8, 7)), exact=True)
    assert disagreement(PLAIN, answer((7, 7)), exact=True)


def test_answers_may_part_at_a_near_tie_and_what_follows_is_not_compared() -> None:
    parted = answer((7, 8, 1), CLEAR, CLOSE, {1: -0.1, 2: -9.0})
    assert not disagreement(PLAIN, parted, exact=False)


def test_answers_may_part_nowhere_else() -> None:
    assert "no near-tie at step 0" in disagreement(PLAIN, answer((8, 7, 7), CLEAR, CLOSE, CLEAR), exact=False)
    assert "no near-tie at step 2" in disagreement(PLAIN, answer((7, 7, 8), CLEAR, CLOSE, CLEAR), exact=False)


def test_an_unknown_token_is_no_near_tie() -> None:
    assert "no near-tie at step 1" in disagreement(PLAIN, answer((7, 3, 7), CLEAR, CLOSE, CLEAR), exact=False)


def test_other_probabilities_are_a_difference_although_the_tokens_are_equal() -> None:
    off = {token: value - MOST_DRIFT - 0.01 for token, value in CLEAR.items()}
    assert "off by 0.51 at step 2" in disagreement(PLAIN, answer((7, 7, 7), CLEAR, CLOSE, off), exact=False)


def test_other_probabilities_at_a_near_tie_are_a_difference() -> None:
    off = {8: -0.2, 7: -1.9}
    assert "step 1" in disagreement(PLAIN, answer((7, 8, 1), CLEAR, off, CLEAR), exact=False)


def test_an_answer_of_another_length_is_a_difference() -> None:
    assert disagreement(PLAIN, answer((7, 7), CLEAR, CLOSE), exact=False)

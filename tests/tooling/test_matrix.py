"""The choice of rows covers what it says, and rows have names of their own."""

from __future__ import annotations

from itertools import combinations

from tests.support.servers.matrix import PLAIN_ROWS, ROWS, Row, pairwise


def values(row: Row) -> list[tuple[str, object]]:
    return [
        ("family", row.family),
        ("tp", (row.p_tp, row.d_tp)),
        ("blocks", (row.p_block, row.d_block)),
        ("convolution states", (row.p_conv, row.d_conv)),
        ("stages", (row.p_pp, row.d_pp)),
        ("layouts", (row.p_layout, row.d_layout)),
        ("chunked", row.chunked),
        ("prefix_caching", row.prefix_caching),
        ("mode", row.mode),
        ("transport", row.transport),
        ("kernels", row.kernels),
        ("releases", (row.p_vllm, row.d_vllm)),
    ]


def test_every_two_values_that_meet_in_some_row_meet_in_a_chosen_one() -> None:
    def met(rows: list[Row]) -> set[object]:
        return {pair for row in rows for pair in combinations(values(row), 2)}

    assert met(pairwise(ROWS)) == met(ROWS)


def test_the_choice_is_a_part_of_the_matrix_and_contains_the_plain_rows() -> None:
    chosen = pairwise(ROWS)
    assert set(PLAIN_ROWS) <= set(chosen) < set(ROWS)


def test_a_choice_among_few_rows_leaves_out_what_is_covered() -> None:
    rows = [Row("gqa", p_tp, d_tp, chunked=chunked) for p_tp in (1, 2) for d_tp in (1, 2) for chunked in (False, True)]
    assert len(pairwise(rows)) == 8
    assert pairwise(rows[:1]) == rows[:1]


def test_names_of_rows_are_unique() -> None:
    assert len({row.id for row in ROWS}) == len(ROWS) == len(set(ROWS))

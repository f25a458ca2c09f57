"""The compatibility page has a row for every pair of the end-to-end matrix, and no other but the same over Mooncake."""

from __future__ import annotations

from dataclasses import asdict, replace

from tests.support.servers.matrix import ROWS
from tools import compat_table

DESCRIBING = len(compat_table.cells(asdict(ROWS[0])))
"""Columns that say which pair a row is about; the last one counts what passed."""


def listed(page: str) -> list[tuple[str, ...]]:
    """The describing cells of each row of the page's table."""
    table = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return [tuple(cells[:DESCRIBING]) for cells in table[2:]]


def test_the_page_is_about_the_rows_of_the_matrix() -> None:
    on_page = listed(compat_table.PAGE.read_text(encoding="utf-8"))
    assert len(set(on_page)) == len(on_page), "a pair twice"
    expected = {compat_table.cells(asdict(row)): row.id for row in ROWS}
    missing = [name for cells, name in expected.items() if cells not in on_page]
    again = {compat_table.cells(asdict(replace(row, transport="mooncake"))) for row in ROWS}
    unknown = [cells for cells in on_page if cells not in expected and cells not in again]
    assert (missing, unknown) == ([], []), "make test-full makes the page anew"

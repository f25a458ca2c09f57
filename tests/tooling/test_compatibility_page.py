"""The compatibility page has a row for every pair of the end-to-end matrix on the installed vLLM, and for every pair of
two releases, and no other but the same over Mooncake and on other releases."""

from __future__ import annotations

from dataclasses import asdict, replace

from tests.support.servers.matrix import ROWS
from tools import compat_table
from tools.setup_env import VLLM_VERSION

DESCRIBING = len(compat_table.cells(asdict(ROWS[0])))
"""Columns that say which pair a row is about; the last one counts what passed."""


def listed(page: str) -> list[tuple[str, ...]]:
    """The describing cells of each row of the page's table."""
    table = [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("|")]
    return [tuple(cells[:DESCRIBING]) for cells in table[2:]]


def test_the_page_is_about_the_rows_of_the_matrix() -> None:
    sections = compat_table.sections_of(compat_table.PAGE.read_text(encoding="utf-8"))
    versions = {"vllm": VLLM_VERSION}
    rows: dict[str, dict[tuple[str, ...], str]] = {}
    for row in ROWS:
        named = rows.setdefault(compat_table.title(asdict(row), versions), {})
        named[compat_table.cells(asdict(row))] = row.id
    again = {compat_table.cells(asdict(replace(row, transport="mooncake"))) for row in ROWS}
    known = set().union(*rows.values()) | again
    for name, section in sections.items():
        on_page = listed(section)
        assert len(set(on_page)) == len(on_page), f"vLLM {name}: a pair twice"
        missing = [row for cells, row in rows.get(name, {}).items() if cells not in on_page]
        unknown = [cells for cells in on_page if cells not in known]
        assert (missing, unknown) == ([], []), f"vLLM {name}: make test-full makes the page anew"
    assert rows.keys() <= sections.keys()

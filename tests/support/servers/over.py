"""How a test names the rows that it runs on.

With PD_TEST_TRANSPORT set, every row of every test runs over that transport instead of its own: the whole matrix over
Mooncake is `PD_TEST_TRANSPORT=mooncake PD_TEST_EFFORT=full pytest -m e2e`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

from tests.support.servers.matrix import QUICK_ROWS, Row, pairwise

CHOSEN = frozenset(pairwise(QUICK_ROWS))


def over(rows: Sequence[Row], quick: Sequence[Row] | None = None) -> pytest.MarkDecorator:
    """Run the test on the pair of each row; rows outside the pairwise choice, or outside `quick` where it is given,
    run only in `make test-full`."""
    chosen = CHOSEN if quick is None else CHOSEN.intersection(quick)
    marks = {row: [pytest.mark.e2e, *([] if row in chosen else [pytest.mark.matrix])] for row in rows}
    if transport := os.environ.get("PD_TEST_TRANSPORT"):
        marks = {replace(row, transport=transport): those for row, those in marks.items()}
    params = [pytest.param(row, id=row.id, marks=those) for row, those in marks.items()]
    return pytest.mark.parametrize("pair", params, indirect=True)

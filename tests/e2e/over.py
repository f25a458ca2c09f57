"""How a test names the rows that it runs on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from e2e.matrix import QUICK_ROWS, Row, pairwise

CHOSEN = frozenset(pairwise(QUICK_ROWS))


def over(rows: Sequence[Row]) -> pytest.MarkDecorator:
    """Run the test on the pair of each row; rows outside the pairwise choice run only in `make test-full`."""
    params = [
        pytest.param(row, id=row.id, marks=[pytest.mark.e2e, *([] if row in CHOSEN else [pytest.mark.matrix])])
        for row in rows
    ]
    return pytest.mark.parametrize("pair", params, indirect=True)

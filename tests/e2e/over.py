"""How a test names the rows that it runs on."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from e2e.matrix import QUICK_ROWS, Row, pairwise

CHOSEN = frozenset(pairwise(QUICK_ROWS))


def over(rows: Sequence[Row], quick: Sequence[Row] | None = None) -> pytest.MarkDecorator:
    """Run the test on the pair of each row; rows outside the pairwise choice, or outside `quick` where it is given,
    run only in `make test-full`."""
    chosen = CHOSEN if quick is None else CHOSEN.intersection(quick)
    params = [
        pytest.param(row, id=row.id, marks=[pytest.mark.e2e, *([] if row in chosen else [pytest.mark.matrix])])
        for row in rows
    ]
    return pytest.mark.parametrize("pair", params, indirect=True)

"""How many examples the expensive property tests try: all of them in `make test-full`, a third in `make test`.

Examples are drawn anew in every run, so that many quick runs see as much as a full one.
"""

from __future__ import annotations

import os

FULL = os.environ.get("PD_TEST_EFFORT") == "full"


def examples(full: int) -> int:
    """`full`, or a third of it unless PD_TEST_EFFORT is "full"."""
    return full if FULL else full // 3

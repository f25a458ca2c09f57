"""One guarantee: what is promised, the line that does it, and the test that fails without the line."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Guarantee:
    """A row of the table.

    `code` stands exactly once in the top-level definition `holder` of the package, wherever that is; `without` takes
    its place when `test_guarantees` shows that `test`, a function of the suite, then fails (`file::test` where two
    files have one of that name). Files may move: no row names a folder.
    """

    says: str
    holder: str
    code: str
    without: str
    test: str

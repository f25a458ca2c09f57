"""Two ends over NIXL in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from tests.support.transport.agents import OPTIONS, SIZE
from tests.support.transport.ends import End


@pytest.fixture
def ends() -> Iterator[tuple[End, End]]:
    with ExitStack() as stack:
        made = End("nixl", OPTIONS, SIZE), End("nixl", OPTIONS, SIZE)
        for end in made:
            stack.callback(end.transport.close)
        yield made

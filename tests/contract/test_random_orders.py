"""Any order of what clients, a router, workers and trainers do, through vLLM's own schedulers, whose steps look at what
the caches hold."""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from tests.support.scheduler.random_orders import GROUPS, RandomOrders

OPERATIONS = 600


@pytest.mark.parametrize("groups", GROUPS)
def test_a_step_finds_what_its_own_tokens_have_made_whatever_the_order(groups: str) -> None:
    """The rules are those of `tests.support.scheduler.random_orders`; they hold as well where no load ever comes."""
    loads = []

    @settings(max_examples=examples(21), phases=[Phase.explicit, Phase.reuse, Phase.generate])  # the clock takes part
    @given(seed=st.integers(0, 2**32 - 1))
    def play(seed: int) -> None:
        orders = RandomOrders(seed, groups)
        orders.play(OPERATIONS)
        loads.append(orders.loads)

    play()
    assert sum(loads) > len(loads), "about a dozen loads come in an example, rarely but one"

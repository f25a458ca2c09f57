"""With a draft model on both sides its caches are handed over too, as its own forward left them.

The target model's tokens do not depend on them, so it is the `pair` fixture's comparison of bytes that shows it.
"""

from __future__ import annotations

from tests.support.servers.cluster import Cluster
from tests.support.servers.legs import legs
from tests.support.servers.matrix import DRAFT_ROWS
from tests.support.servers.over import over

PUSH_ROWS = [row for row in DRAFT_ROWS if row.mode == "push"]


@over(PUSH_ROWS)
def test_a_push_writes_the_drafters_pages_after_the_drafter(pair: Cluster) -> None:
    """Decode asks before the prefill begins: the pages of a step go out as soon as the step is said to be done."""
    with legs(pair) as both:
        answer = both.decode()
        both.registered()
        both.prefill()
        both.right(answer)
    check_layers(pair)


@over(DRAFT_ROWS)
def test_both_models_caches_are_handed_over(pair: Cluster) -> None:
    with legs(pair, 400) as both:
        answer = pair.decode_with(both.prompt, pair.prefill_only(both.prompt))
        assert answer.tokens == pair.baselines.tokens(pair.model, both.prompt)
    check_layers(pair)


def check_layers(pair: Cluster) -> None:
    """The drafter's layers are among those whose digests the fixture will compare."""
    pair.settle()
    layers = {key.split("|")[0] for record in pair.received() for key in record.tensors}
    assert any("draft" in layer for layer in layers) and any("draft" not in layer for layer in layers), sorted(layers)

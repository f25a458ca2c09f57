"""A pair answers with exactly the tokens of one plain instance, in every row of the matrix."""

from __future__ import annotations

import re

from tests.support.servers.cluster import Cluster
from tests.support.servers.engine import rounds_to_bfloat16
from tests.support.servers.matrix import MIXED_ROWS, PLAIN_ROWS, QUICK_MOONCAKE_ROW, ROWS
from tests.support.servers.over import over
from tests.support.servers.workload import SCENARIOS, Answer, Stream


@over(ROWS)
def test_every_answer_is_the_plain_runs(pair: Cluster) -> None:
    """And decode received every prompt but that of one token: it could be right by itself."""
    asked = SCENARIOS["serial"]
    pair.forget_prefixes()
    pair.check(asked)
    assert len({record.request for record in pair.received()}) == sum(len(prompt) > 1 for prompt in asked)
    if rounds_to_bfloat16(pair.model):
        pair.check(asked, past_ties=True)


@over(ROWS)
def test_sixteen_requests_at_once_are_answered_as_alone(pair: Cluster) -> None:
    pair.check(SCENARIOS["concurrent"], at_once=16, past_ties=True)


@over(PLAIN_ROWS)
def test_streamed_answers_are_the_plain_runs(pair: Cluster) -> None:
    for prompt in SCENARIOS["streamed"]:
        with Stream(pair.router.url, pair.body(prompt)) as stream:
            assert not pair.disagreement(prompt, Answer(stream.tokens()))


@over(PLAIN_ROWS)
def test_every_prompt_moves_bytes(pair: Cluster) -> None:
    """The router and the decode instance could both be right without any transfer; this shows that there is one."""
    prompts = SCENARIOS["moved"]
    pair.forget_prefixes()
    pair.check(prompts)
    records = pair.received()
    assert len({record.request for record in records}) == len(prompts)
    # The last prompt token may be left to the decode side, which computes it in any case.
    stops = sorted(record.stop for record in records)
    assert all(length - stop in (0, 1) for length, stop in zip(sorted(map(len, prompts)), stops, strict=True))
    assert not any(record.start for record in records)


@over(PLAIN_ROWS)
def test_a_decode_prompt_may_go_on_where_its_prefill_ended(pair: Cluster) -> None:
    """Decode computes what its prompt has more, up to many tokens, behind the caches that it received."""
    pair.forget_prefixes()
    for prompt in SCENARIOS["moved"][1:]:
        for prefilled in (len(prompt) // 2, len(prompt) - 2):
            pair.forget_prefixes()
            answer = pair.decode_with(prompt, pair.prefill_only(prompt[:prefilled]))
            assert not pair.disagreement(prompt, answer), f"{prefilled} of {len(prompt)} tokens"
    records = pair.received()
    assert len({record.request for record in records}) == 2 * len(SCENARIOS["moved"][1:]), "each moved something"
    assert any(record.stop > 900 for record in records)


@over([QUICK_MOONCAKE_ROW])
def test_the_transports_protocol_is_on_the_metrics_page_of_both(pair: Cluster) -> None:
    """ "rdma" that became TCP without a word would be seen here."""
    pair.check(SCENARIOS["moved"])
    for server in (pair.prefill, pair.decode):
        rows = re.findall(r"^vllm:pd_transport_info\{([^}]*)\} 1\.0$", pair.metrics(server), re.MULTILINE)
        told = [dict(re.findall(r'(\w+)="([^"]*)"', row)) for row in rows]
        assert {(labels["transport"], labels["protocol"]) for labels in told} == {("mooncake", "tcp")}


@over(MIXED_ROWS)
def test_each_side_runs_the_release_that_its_row_names(pair: Cluster) -> None:
    """Both could be the installed one, and every other test of the row would pass."""
    ran = [pair.release_of(server) for server in (pair.prefill, pair.decode)]
    assert ran == [pair.row.p_vllm, pair.row.d_vllm]

"""A restart excuses the failures of requests that were under way at that instance, and no others."""

from __future__ import annotations

import pytest

from tests.support.servers.excuses import Down, Sent, legs_of, unexcused

LOG = """\
2026-01-01 00:00:00,000 DEBUG vllm_pd_connector.proxy.legs: request a: prefill at http://p:1
2026-01-01 00:00:00,000 DEBUG vllm_pd_connector.proxy.legs: request a: decode at http://d:1
2026-01-01 00:00:00,000 DEBUG vllm_pd_connector.proxy.legs: request b: prefill at http://p:1
2026-01-01 00:00:00,000 WARNING vllm_pd_connector.proxy.fleet: http://p:1 is down: refused
2026-01-01 00:00:00,000 DEBUG vllm_pd_connector.proxy.legs: request b: prefill at http://p:2
"""
DOWN = Down("http://p:1", 10.0, 12.0)


def test_of_the_instances_that_were_asked_the_last_of_each_role_counts() -> None:
    assert legs_of(LOG) == {
        "a": {"prefill": "http://p:1", "decode": "http://d:1"},
        "b": {"prefill": "http://p:2"},
    }


@pytest.mark.parametrize(
    ("request_id", "started", "ended", "excused"),
    [
        ("a", 9.0, 11.0, True),
        ("a", 11.0, 30.0, True),
        ("a", 8.0, 9.0, False),
        ("a", 13.0, 14.0, False),
        ("b", 9.0, 11.0, False),
        ("never sent", 9.0, 11.0, False),
    ],
)
def test_only_what_was_under_way_at_the_instance_is_excused(
    request_id: str, started: float, ended: float, excused: bool
) -> None:
    one = Sent(request_id, started, ended, 502, False)
    assert unexcused([one], legs_of(LOG), [DOWN]) == ([] if excused else [one])

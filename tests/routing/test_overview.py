"""Pages become looks, two looks become rates; what is malformed is said, and names of others stay text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.proxy.stand_ins import exposition, info
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.routing.overview import Look, instance_cells, instance_rows, link_rows, read, speed

PREFILL = (
    exposition(info(engine_id="p"))
    + """vllm:num_requests_running{engine="0"} 2.0
vllm:num_requests_waiting{engine="0"} 1.0
vllm:pd_given_bytes_total{engine="0"} 5e6
vllm:pd_peer_given_bytes_total{engine="0",peer="d",transport="nixl"} 5e6
vllm:pd_leases{engine="0"} 3.0
vllm:pd_leased_blocks{engine="0"} 30.0
vllm:pd_leased_blocks_limit{engine="0"} 80.0
vllm:pd_failed_pushes_total{engine="0",reason="deadline"} 0.0
vllm:pd_failed_pushes_total{engine="0",reason="transfer_failed"} 2.0
vllm:pd_prefills_not_held_total{engine="0",reason="aborted"} 4.0
vllm:pd_transport_info{engine="0",transport="mooncake",protocol="rdma"} 1.0
vllm:pd_phase_seconds_bucket{engine="0",phase="transfer",le="0.1"} 9.0
vllm:pd_quarantined_blocks{engine="0"} NaN
"""
)


def later(page: str, given: str) -> str:
    return page.replace("5e6", given)


def test_a_look_has_what_a_page_says():
    look = read(PREFILL, "http://p", 1.0)
    assert (look.requests, look.values["leases"], look.values.get("quarantined_blocks")) == (3, 3, None)
    assert look.failures == {"push deadline": 0, "push transfer_failed": 2, "not held: aborted": 4}
    assert look.protocols == {"rdma"} and "prefills_not_held_total" not in look.values
    assert look.links == {("to", "d", "nixl"): 5e6}


def test_who_is_left_by_clients_alone_is_well():
    [row] = instance_rows([read(PREFILL, "http://p", 1.0)], {})
    assert row.wrong and row.failures == "4 not held: aborted, 2 push transfer_failed"
    well = PREFILL.replace('"transfer_failed"} 2.0', '"transfer_failed"} 0.0')
    for page, told in (
        (well, ""),
        (well.replace('"aborted"} 4.0', '"weights"} 4.0'), "4 not held: weights"),
        (f'{well}vllm:pd_weights_unnamed{{engine="0"}} 1.0\n', "4 not held: aborted, weights unnamed"),
    ):
        [row] = instance_rows([read(page, "http://p", 1.0)], {})
        assert row.wrong is bool(told) and row.failures == (told or "4 not held: aborted")
    assert not replace(row, failures="3 aborted").wrong and not replace(row, failures="").wrong
    assert replace(row, failures="3 aborted, 1 deadline").wrong and replace(row, failures="", problem="away").wrong


def test_two_looks_give_rates_and_one_gives_none():
    first, second = read(PREFILL, "http://p", 1.0), read(later(PREFILL, "9e6"), "http://p", 3.0)
    [row] = instance_rows([first], {})
    assert row.given_bytes is None and row.failures == "4 not held: aborted, 2 push transfer_failed"
    [row] = instance_rows([second], {"http://p": first})
    assert row.given_bytes == 2e6 and (row.leases, row.leased_blocks, row.leased_blocks_limit) == (3, 30, 80)
    assert instance_cells(row)[5:9] == ("0 B/s", "2.0 MB/s", "3", "30/80")
    [link] = link_rows([second], {"http://p": first})
    assert (link.way, link.peer, link.bytes_per_second, link.bytes) == ("to", "d", 2e6, 9e6)


def test_a_counter_that_began_anew_and_an_instance_that_was_away_have_no_rate():
    first, second = read(later(PREFILL, "9e6"), "http://p", 1.0), read(PREFILL, "http://p", 3.0)
    assert instance_rows([second], {"http://p": first})[0].given_bytes is None
    gone = Look("http://p", 1.0, problem="it does not answer")
    assert instance_rows([second], {"http://p": gone})[0].given_bytes is None
    assert instance_cells(instance_rows([gone], {})[0])[-1] == "it does not answer"


def test_a_peer_that_is_looked_at_is_named_by_its_url():
    prefill = read(PREFILL, "http://p", 1.0)
    decode = read(exposition(info(engine_id="d", role="kv_consumer")), "http://d", 1.0)
    [link] = link_rows([prefill, decode], {})
    assert link.peer == "http://d"


@pytest.mark.parametrize("page", ["", "vllm:pd_leases 1\n", "{{{", exposition(info()).replace("kv_producer", "boss")])
def test_a_page_of_something_else_is_refused(page):
    with pytest.raises(ProtocolError, match=r"/metrics|pd_instance_info"):
        read(page, "http://p", 1.0)


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, ""), (0, "0 B/s"), (999, "999 B/s"), (1500, "1.5 kB/s"), (2.5e8, "250.0 MB/s"), (3.2e10, "32.00 GB/s")],
)
def test_a_rate_is_said_in_a_unit_that_fits(rate, text):
    assert speed(rate) == text

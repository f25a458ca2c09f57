"""The lease keeper on its own: how often it renews. Its clock is the test's, its client sends nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from test_half import TOKEN, hand_over, make_half

from vllm_pd_connector.protocol.fields import MAX_LEASES
from vllm_pd_connector.protocol.messages import Renew
from vllm_pd_connector.protocol.params import parse_remote_prefill
from vllm_pd_connector.protocol.push_messages import DeclinePush, PrefillRef
from vllm_pd_connector.scheduler import keeper


@pytest.mark.parametrize(("lease_seconds", "renewals"), [(1e-9, 20), (0.3, 10), (0.6, 5)])
def test_a_lease_that_its_parameters_call_tiny_is_not_renewed_without_a_pause(monkeypatch, lease_seconds, renewals):
    producer, _ = make_half("kv_producer")
    producer.serve([b"manifest"], [TOKEN])
    params = hand_over(producer)
    producer.shutdown()
    params["pd_connector"]["lease_seconds"] = lease_seconds
    sent: list[Any] = []
    now = [0.0]
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tried = keeper.LeaseKeeper(None, 30.0)
    tried._client = SimpleNamespace(send=lambda _, request, __: sent.append(request), receive=lambda: [])
    tried._add(parse_remote_prefill(params))
    for turn in range(1, 1051):  # 1.05 s
        now[0] = turn / 1000
        tried._turn()
    assert all(isinstance(request, Renew) for request in sent)
    assert len(sent) == pytest.approx(renewals, abs=1)


def test_prefills_that_are_waited_for_are_kept_in_few_messages_to_those_who_have_them(monkeypatch):
    now, sent = [0.0], []
    monkeypatch.setattr(keeper, "time", SimpleNamespace(monotonic=lambda: now[0]))
    tried = keeper.LeaseKeeper(None, 30.0)
    tried._client = SimpleNamespace(send=lambda address, request, _: sent.append((address, request)), receive=list)
    refs = [PrefillRef(f"t-{i}", None) for i in range(MAX_LEASES + 3)]
    for i, ref in enumerate(refs):
        tried._add_prefill(f"d-{i}", lambda i=i: (None, "tcp://a", "tcp://b")[min(i, 2)], ref)
    for now[0] in (9.9, 10.0, 10.1):
        tried._turn()
    assert [(address, len(request.prefills)) for address, request in sent] == [
        ("tcp://a", 1), ("tcp://b", MAX_LEASES), ("tcp://b", 1),
    ]  # fmt: skip
    assert [ref for _, request in sent for ref in request.prefills] == refs[1:], "where the first is, nobody knows"
    tried._prefills.clear()
    now[0] = 20.0
    tried._turn()
    assert len(sent) == 3 and tried._prefills_due == float("inf")


def test_an_instance_that_ends_declines_the_prefills_that_it_kept():
    sent: list[Any] = []
    tried = keeper.LeaseKeeper(None, 30.0)
    tried._client = SimpleNamespace(send=lambda address, request, _: sent.append((address, request)))
    tried._add_prefill("d-1", lambda: "tcp://a", PrefillRef("t-1", None))
    tried._add_prefill("d-2", lambda: None, PrefillRef("t-2", None))
    tried._end()
    assert sent == [("tcp://a", DeclinePush(PrefillRef("t-1", None)))], "where the other is, nobody knows"

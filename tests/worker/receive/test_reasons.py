"""A receive that fails counts as what it failed of, also where that is the prefill side's word."""

from __future__ import annotations

import pytest

from tests.support.worker.decode_instance import Decode, Prefill
from tests.support.worker.writer import Target, Writer
from vllm_pd_connector.metadata import BadParameters, ReceiveRequest, Refusal
from vllm_pd_connector.observability.stats import FailureKind
from vllm_pd_connector.protocol.lease import End
from vllm_pd_connector.protocol.push.registrations import GIVEN_UP, NOT_HELD, OTHER_PROMPT, OTHER_READERS, TWICE
from vllm_pd_connector.protocol.weights import unlike
from vllm_pd_connector.protocol.wire.fields import Weights
from vllm_pd_connector.worker.receive.ending import kind_of


@pytest.mark.parametrize("end", [End.WEIGHTS, End.RESET, End.ASLEEP])
def test_what_an_operator_has_ended_is_told_from_a_lease_that_ran_out(
    prefill: Prefill, decode: Decode, end: End
) -> None:
    request = prefill.request("a")
    prefill.server.drop_all(end)
    assert decode.received(request) == [False]
    assert decode.failures == {"withdrawn": 1}


@pytest.mark.parametrize("kind", Refusal)
def test_refused_parameters_count_as_what_they_were_refused_for(decode: Decode, kind: Refusal) -> None:
    assert decode.received(ReceiveRequest("a", BadParameters("why", kind), (), 0, 4)) == [False]
    assert decode.failures == {kind.value: 1}


def test_a_push_that_is_refused_for_its_weights_counts_so(writer: Writer, target: Target) -> None:
    writer.whole()
    writer.server.pushes.compute_with(Weights("version v2"), "")
    assert target.received(target.request(writer)) == [False]
    assert target.failures == {"weights": 1}


LEASE, PUSH = FailureKind.LEASE_LOST, FailureKind.TRANSFER_FAILED
"""What a refusal counts as that says no more."""


@pytest.mark.parametrize(
    ("usual", "reason", "kind"),
    [
        (LEASE, unlike(Weights("version v2", 1), Weights()), FailureKind.WEIGHTS),
        (LEASE, f"prefill p-1 is not held here: {End.RESET.value}", FailureKind.WITHDRAWN),
        (LEASE, f"the lease {End.EXPIRED.value}", FailureKind.LEASE_LOST),
        (LEASE, f"the lease {End.DROPPED.value}", FailureKind.LEASE_LOST),
        (LEASE, "", FailureKind.LEASE_LOST),
        (PUSH, GIVEN_UP, FailureKind.ABORTED),
        (PUSH, f"prefill p-1 {NOT_HELD}: no lease with that nonce is known", FailureKind.LEASE_LOST),
        (PUSH, f"the lease {End.RELEASED.value}", FailureKind.LEASE_LOST),
        (PUSH, f"the lease {End.WEIGHTS.value}", FailureKind.WITHDRAWN),
        (PUSH, f"reader 0 {TWICE}", FailureKind.BAD_PARAMETERS),
        (PUSH, f"reader 3 of 2 {OTHER_READERS}", FailureKind.BAD_PARAMETERS),
        (PUSH, f"the prefilled prompt (4 tokens, digest 0) {OTHER_PROMPT}5 tokens)", FailureKind.BAD_PARAMETERS),
        (PUSH, "worker 1: connection refused", FailureKind.TRANSFER_FAILED),
    ],
)
def test_the_prefill_side_s_words_tell_the_kind(usual: FailureKind, reason: str, kind: FailureKind) -> None:
    assert kind_of(reason, usual) is kind

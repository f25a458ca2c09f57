"""The router's own series."""

from __future__ import annotations

from vllm_pd_connector.proxy import metrics
from vllm_pd_connector.proxy.options import Options


def test_a_request_that_took_as_long_as_it_may_is_not_beyond_every_bucket() -> None:
    """A quantile of those beyond the last one is that one's bound."""
    longest = Options().limits.read_timeout
    assert [bound for bound in metrics._SECONDS if bound > longest], (
        "a prefill alone may take it, and its decode follows"
    )

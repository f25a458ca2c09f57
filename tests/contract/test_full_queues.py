"""The words by which the router knows that an instance takes no more requests for now."""

from __future__ import annotations

import pytest
from vllm.exceptions import GracefulHTTPError, MaxQueuedTokensError, QueueOverflowError

from vllm_pd_connector.proxy.legs import is_full


@pytest.mark.parametrize("kind", [QueueOverflowError, MaxQueuedTokensError])
def test_vllm_says_so_of_full_queues(kind: type[GracefulHTTPError]) -> None:
    error = kind()
    assert is_full(int(error.http_status), str(error).encode())
    assert not is_full(500, str(error).encode())

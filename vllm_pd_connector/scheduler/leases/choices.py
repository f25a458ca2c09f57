"""The latest lease of each request with `n` > 1. Of its choices the router gets the parameters of the one that ended
last, and nobody else can name the others' leases.

Source: vLLM 0.32, `RequestState.make_request_output`.
"""

from __future__ import annotations

from vllm_pd_connector.protocol.params.parse import choice_of


class Choices:
    """See the module. By request id; for the scheduler's thread."""

    def __init__(self) -> None:
        self._latest: dict[str, str] = {}

    def __len__(self) -> int:
        return len(self._latest)

    def held(self, request_id: str) -> str | None:
        """A request is held from now on. Returns the one whose lease nobody can name any more, None if there is none,
        as for a request with one choice."""
        if not (choice := choice_of(request_id)):
            return None
        parent = request_id.removeprefix(choice)
        older, self._latest[parent] = self._latest.get(parent), request_id
        return older

    def ended(self, request_id: str) -> None:
        """Its lease has."""
        parent = request_id.removeprefix(choice_of(request_id))
        if self._latest.get(parent) == request_id:
            del self._latest[parent]

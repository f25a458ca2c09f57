"""The size of the short campaign of `make test`."""

from __future__ import annotations

NUMBER = 38
SECONDS = 270.0
"""In which the last fault has begun, from before the servers start; the rest of 5 minutes is for its end."""

"""The size of the short campaign of `make test`."""

from __future__ import annotations

NUMBER, SEED = 30, 20261121
"""So many have every kind."""
SECONDS = 270.0
"""In which the last fault has begun, from before the servers start; the rest of 5 minutes is for its end."""

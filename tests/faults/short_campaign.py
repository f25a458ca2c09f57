"""The size of the short campaign of `make test`."""

from __future__ import annotations

NUMBER, SEED = 30, 20261121
"""So many have every kind."""
SECONDS = 900.0
"""In which the last fault must have begun, from before the servers start: five times what that takes on two cores."""

"""For how long tests wait for what should come, in seconds."""

from __future__ import annotations

import os

PATIENCE_S = float(os.environ.get("PD_TEST_PATIENCE", "30"))
"""`tests/guarantees` sets it: most of what it runs waits for what does not come."""

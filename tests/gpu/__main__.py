"""See `kit`."""

from __future__ import annotations

import sys

from tests.gpu.kit import main

sys.exit(main())

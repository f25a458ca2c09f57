"""What this connector guarantees, by subject; see `guarantee` for a row."""

from __future__ import annotations

from tests.guarantees.table import (
    access,
    engine,
    leases,
    operations,
    operators,
    peers,
    pushes,
    references,
    transports,
    waiting,
)

SUBJECTS = (references, leases, peers, engine, access, pushes, waiting, transports, operations, operators)
GUARANTEES = [guarantee for subject in SUBJECTS for guarantee in subject.GUARANTEES]

"""What this connector guarantees, by subject; see `guarantee` for a row."""

from __future__ import annotations

from tests.guarantees.table import access, engine, leases, peers, pushes, references, waiting

SUBJECTS = (references, leases, peers, engine, access, pushes, waiting)
GUARANTEES = [guarantee for subject in SUBJECTS for guarantee in subject.GUARANTEES]

"""What a section of the kit finds: rows of a table, remarks, and what failed; written where the kit reads it.

A section that ends without having written is one that failed, so nothing passes by ending early.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.support.gpu.stand_in import VARIABLE, prepare

SMALL = VARIABLE in os.environ
"""Whether the GPUs are stand-ins, for which everything is smaller."""


@dataclass
class Findings:
    """Of one section."""

    rows: list[dict[str, Any]] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    def row(self, **values: Any) -> None:
        self.rows.append(values)
        print("  ".join(f"{key}: {value}" for key, value in values.items()), flush=True)

    def remark(self, text: str) -> None:
        self.remarks.append(text)
        print(text, flush=True)

    def fail(self, text: str) -> None:
        self.failures.append(text)
        print(f"FAILED: {text}", flush=True)

    def require(self, condition: bool, text: str) -> None:
        if not condition:
            self.fail(text)


def gpu_count() -> int:
    """GPUs that torch sees here."""
    import torch

    return int(torch.cuda.device_count()) if torch.cuda.is_available() else 0


def run(section: Callable[[Findings], None]) -> None:
    """Main of a section's program: run it, and write what it found to `--into`."""
    parser = argparse.ArgumentParser(description=section.__doc__)
    parser.add_argument("--into", type=Path, required=True, help="file for what was found, as JSON")
    into = parser.parse_args().into
    prepare()
    findings = Findings()
    try:
        section(findings)
    except Exception as error:
        traceback.print_exc()
        findings.fail(f"{type(error).__name__}: {error}")
    into.write_text(json.dumps(asdict(findings)))
    sys.exit(1 if findings.failures else 0)

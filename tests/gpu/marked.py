"""Tests that are marked `gpu`: all of them must pass, and none may be skipped.

pytest is given the files that have the mark, since others need tools of development to be imported.
"""

from __future__ import annotations

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.gpu.section import Findings, run

ROOT = Path(__file__).resolve().parents[2]
MARK = "pytest.mark." + "gpu"


def main(findings: Findings) -> None:
    with TemporaryDirectory() as directory:
        results = Path(directory) / "results.xml"
        files = [str(path) for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()]
        command = [sys.executable, "-m", "pytest", "-m", "gpu", "--junitxml", str(results), *files]
        status = subprocess.run(command, cwd=ROOT, check=False).returncode
        findings.require(status == 0, f"pytest ended with status {status}")
        for case in ET.parse(results).iter("testcase"):
            wrong = [child.tag for child in case if child.tag in ("failure", "error", "skipped")]
            name = f"{case.get('classname')}.{case.get('name')}"
            findings.row(test=name, result=", ".join(wrong) or "passed", seconds=case.get("time"))
            findings.require(not wrong, f"{name}: {', '.join(wrong)}")


if __name__ == "__main__":
    run(main)

"""The acceptance kit for GPUs, over stand-ins for them: that it runs to its end, and says what failed."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.faults.system.processes import alive
from tests.gpu import kit
from tests.gpu.kit import LIMIT_S, SECTIONS, Outcome, Section, report, run_section
from tests.gpu.section import Findings
from tests.support.gpu.stand_in import VARIABLE

pytestmark = pytest.mark.libraries
BY_NAME = {section.name: section for section in SECTIONS}
LIMIT = 300.0


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "2")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("name", ["machine", "marked", "conversion", "transports"])
def test_a_section_runs_to_its_end(name: str, tmp_path: Path) -> None:
    outcome = run_section(replace(BY_NAME[name], limit_s=LIMIT), tmp_path)
    assert outcome.passed, f"{outcome.findings.failures}\n{outcome.output}"
    assert outcome.findings.rows
    assert report([outcome], 1.0).count("| ") > len(outcome.findings.rows)


def test_every_section_has_its_time() -> None:
    assert sum(section.limit_s for section in SECTIONS) <= LIMIT_S == 15 * 60


def test_on_a_machine_without_a_gpu_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kit, "INTO", tmp_path)
    monkeypatch.delenv(VARIABLE, raising=False)
    assert kit.main(tmp_path, [BY_NAME["machine"]]) == 1
    assert "FAILED: torch sees no GPU here" in (tmp_path / "report.md").read_text()


class Program(Section):
    """A section that is a line of Python."""

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-c", self.shows]


@pytest.mark.parametrize(
    ("program", "limit", "says"),
    [
        ("raise SystemExit(0)", 60, "it ended with status 0 and has written nothing"),
        ("import os; print('as far as here', flush=True); os.abort()", 60, "it ended with status -6"),
        ("import time; time.sleep(600)", 1, "it did not end in 1 s"),
    ],
)
def test_a_section_that_does_not_say_how_it_ended_has_failed(
    tmp_path: Path, program: str, limit: float, says: str
) -> None:
    outcome = run_section(Program("one", program, limit), tmp_path)
    assert not outcome.passed and says in outcome.findings.failures[0]
    assert outcome.output in report([outcome], 1.0)


@pytest.mark.parametrize(
    ("findings", "status", "says"),
    [(Findings(), 0, "it found nothing"), (Findings(rows=[{"a": 1}]), 3, "it ended with status 3")],
)
def test_a_section_passes_by_what_it_found_alone(tmp_path: Path, findings: Findings, status: int, says: str) -> None:
    text = json.dumps({"rows": findings.rows, "remarks": [], "failures": []})
    program = f"import sys; open(sys.argv[2], 'w').write({text!r}); sys.exit({status})"
    assert run_section(Program("one", program, 60), tmp_path).findings.failures == [says]


def test_the_report_tells_everything_in_one_file() -> None:
    good = Outcome(BY_NAME["machine"], Findings(rows=[{"what": "a|b"}], remarks=["as it is"]), 1.4, "silence")
    bad = Outcome(BY_NAME["pair"], Findings(failures=["no tokens"]), 2.0, "a traceback")
    text = report([good, bad], 3.0)
    assert "(`machine`) | passed | 1 |" in text and "(`pair`) | FAILED | 2 |" in text
    assert "| a\\|b |" in text and "- as it is" in text and "- FAILED: no tokens" in text
    assert "    a traceback" in text and "silence" not in text


def test_the_processes_of_a_section_end_with_it(tmp_path: Path) -> None:
    program = (
        "import subprocess, sys; child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "print(child.pid, flush=True); child.wait()"
    )
    outcome = run_section(Program("one", program, 15), tmp_path)
    pid = int(outcome.output.split()[0])
    deadline = time.monotonic() + 30
    while alive([pid]):
        assert time.monotonic() < deadline, f"process {pid} runs"
        time.sleep(0.05)

"""Runs every section with a limit, and writes one report.

    make gpu

Without arguments, on a machine with one GPU or more, in less than LIMIT_S seconds. Exit status 1 if anything failed:
the report tells which, with the end of its output.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.section import Findings

ROOT = Path(__file__).resolve().parents[2]
INTO = ROOT / "out" / "gpu"
LIMIT_S = 900
TAIL_LINES = 60


@dataclass(frozen=True, slots=True)
class Section:
    """A program, what it shows, and for how many seconds it may run."""

    name: str
    shows: str
    limit_s: float

    @property
    def command(self) -> list[str]:
        return [sys.executable, "-m", f"tests.gpu.{self.name}"]


SECTIONS = (
    Section("machine", "What the machine is", 45),
    Section("marked", "Tests that are marked `gpu`", 210),
    Section("conversion", "Conversion on the GPU, bit by bit", 120),
    Section("transports", "Reads and writes of device memory", 150),
    Section("pair", "A prefill and two decode instances give a plain instance's tokens", 360),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a section ended; `output` is all that it printed."""

    section: Section
    findings: Findings
    seconds: float
    output: str

    @property
    def passed(self) -> bool:
        return not self.findings.failures


def run_section(section: Section, into: Path) -> Outcome:
    """Run a section's program and all that it starts, in a process group that ends with it."""
    found, log = into / f"{section.name}.json", into / f"{section.name}.log"
    found.unlink(missing_ok=True)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*section.command, "--into", str(found)],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = f"ended with status {process.wait(section.limit_s)}"
        except subprocess.TimeoutExpired:
            status = f"did not end in {section.limit_s:.0f} s"
        finally:
            _end_group(process)
    text = log.read_text(errors="replace")
    return Outcome(section, _read(found, status), time.monotonic() - began, text)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Politely first. Servers have groups of their own; the kernel ends them with the section that started them."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def _read(found: Path, status: str) -> Findings:
    try:
        findings = Findings(**json.loads(found.read_text()))
    except (OSError, ValueError, TypeError):
        return Findings(failures=[f"it {status} and has written nothing"])
    if not findings.failures and not status.endswith("status 0"):
        findings.failures.append(f"it {status}")
    if not findings.rows and not findings.failures:
        findings.failures.append("it found nothing")
    return findings


def report(outcomes: Sequence[Outcome], seconds: float) -> str:
    """The report in Markdown: a summary, what each section found, and the output of those that failed."""
    lines = ["# vllm_pd_connector on GPUs", "", f"`make gpu` at {_commit()}, {seconds:.0f} s.", ""]
    lines += ["| section | result | seconds |", "|---|---|---|"]
    for one in outcomes:
        result = "passed" if one.passed else "FAILED"
        lines.append(f"| {one.section.shows} (`{one.section.name}`) | {result} | {one.seconds:.0f} |")
    for one in outcomes:
        lines += ["", f"## {one.section.shows}", ""]
        lines += [f"- FAILED: {text}" for text in one.findings.failures]
        lines += [f"- {text}" for text in one.findings.remarks]
        lines += ["", *table(one.findings)] if one.findings.rows else []
        if not one.passed:
            lines += ["", "The end of its output:", ""]
            lines += [f"    {line}" for line in one.output.splitlines()[-TAIL_LINES:]]
    return "\n".join(lines) + "\n"


def table(findings: Findings) -> list[str]:
    names = list(dict.fromkeys(name for row in findings.rows for name in row))
    lines = [f"| {' | '.join(names)} |", "|" + "---|" * len(names)]
    for row in findings.rows:
        cells = (str(row.get(name, "")).replace("|", "\\|").replace("\n", " ") for name in names)
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _commit() -> str:
    done = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() or "an unknown commit"


def main(into: Path = INTO, sections: Sequence[Section] = SECTIONS) -> int:
    assert sum(section.limit_s for section in sections) <= LIMIT_S
    into.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    outcomes = []
    for section in sections:
        print(f"[gpu] {section.shows} ({section.name}, at most {section.limit_s:.0f} s)", flush=True)
        outcomes.append(run_section(section, into))
        last = outcomes[-1]
        print(f"[gpu] {'passed' if last.passed else 'FAILED'} after {last.seconds:.0f} s", flush=True)
        for failure in last.findings.failures:
            print(f"[gpu]   {failure}", flush=True)
    written = into / "report.md"
    written.write_text(report(outcomes, time.monotonic() - began))
    print(f"[gpu] the report to send back is {written}")
    return 0 if all(one.passed for one in outcomes) else 1

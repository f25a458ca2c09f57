"""Follow docs/quickstart.md literally in a clean clone, on a machine without a GPU, and time each step.

    python tools/quickstart.py [--python .venv/bin/python] [--into DIRECTORY]

The commands are the page's: those of "Install" and of "One prefill, one decode, one host". They run in a new clone of
what is committed here, in a new environment that sees the packages of `--python`, which has vLLM, and nothing else of
this project. What the page says of a machine without a GPU is done: `--cpu` and the path of a tiny model are put in.
The first command that fails ends it, with what it printed. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "quickstart.md"
SECTIONS = ("Install", "One prefill, one decode, one host")
MODEL = "Qwen/Qwen3-0.6B"
READY = re.compile(r"\bready\b")
START_S, STEP_S, END_S = 420.0, 300.0, 90.0


class Failed(Exception):
    """A step that did not do what the page says."""


def commands(page: str) -> list[str]:
    """The indented commands of the two sections, in order, each on one line. Of the libraries' installations the first
    is taken, and of the launcher's lines the one that is explained; what is said of other transports is left out."""
    found = []
    for title in SECTIONS:
        _, _, section = page.partition(f"## {title}\n")
        section = section.partition("\n## ")[0].partition("Without the launcher")[0]
        block = re.sub(r" \\\n +", " ", section)
        found += [line.strip() for line in block.splitlines() if line.startswith("    ")]
        found += re.findall(r"`(python -c [^`]+|vllm-pd --help)`", section)
    return [line for line in found if "mooncake" not in line]


def on_a_cpu(command: str, model: str) -> str:
    """The command as the page has it for a machine without a GPU."""
    command = command.partition("     #")[0].replace(MODEL, model)
    return f"{command} --cpu" if command.startswith("examples/launch_pd.py") else command


class Follower:
    """Runs steps in a shell, in the clone, and remembers what each took."""

    def __init__(self, directory: Path, python: str) -> None:
        self.clone, self.table = directory / "vllm_pd_connector", [("step", "seconds")]
        self._directory, self._python = directory, python
        env = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
        self._env = env | {"PATH": f"{directory / 'env' / 'bin'}{os.pathsep}{os.environ['PATH']}"}

    def environment(self) -> None:
        """One that has vLLM: a new one beside the packages of the given interpreter."""
        self.run(f"{self._python} -m venv {self._directory / 'env'}", where=self._directory, counts=False)
        where = "import sysconfig; print(sysconfig.get_path('purelib'))"
        pythons = (self._python, str(self._directory / "env" / "bin" / "python"))
        given, own = (subprocess.check_output([python, "-c", where], text=True).strip() for python in pythons)
        Path(own, "vllm-of-another.pth").write_text(f"{given}\n")
        program = Path(pythons[1]).with_name("vllm")  # the other's would run in its own environment
        # Its engines are spawned, and import it again.
        start = 'from vllm.entrypoints.cli.main import main\n\nif __name__ == "__main__":\n    main()\n'
        program.write_text(f"#!{pythons[1]}\n{start}")
        program.chmod(0o755)

    def run(self, command: str, *, where: Path | None = None, counts: bool = True) -> str:
        began = time.monotonic()
        done = subprocess.run(
            command, shell=True, cwd=where or self.clone, env=self._env, capture_output=True, text=True, timeout=STEP_S
        )
        if done.returncode:
            raise Failed(f"{command}\nended with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
        if counts:
            self._took(command, began)
        return done.stdout

    def launch(self, command: str) -> subprocess.Popen[str]:
        """Start what runs until Ctrl-C, and wait until it says that all serve."""
        began = time.monotonic()
        log = self._directory / "launch.log"
        # A job that a shell began with & ignores Ctrl-C, and so would what it starts.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with log.open("w") as output:
            process = subprocess.Popen(
                f"exec {command}", shell=True, cwd=self.clone, env=self._env, stdout=output, stderr=output, text=True
            )
        while not READY.search(log.read_text()):
            if process.poll() is not None or time.monotonic() - began > START_S:
                end(process)
                raise Failed(f"{command}\ndoes not serve:\n{log.read_text()[-4000:]}")
            time.sleep(0.1)
        self._took(f"{command}  # until all serve", began)
        return process

    def stop(self, process: subprocess.Popen[str]) -> None:
        began = time.monotonic()
        end(process)
        self._took("Ctrl-C  # until all have ended", began)

    def _took(self, what: str, began: float) -> None:
        row = (what.replace(str(self.clone), "…"), f"{time.monotonic() - began:.1f}")
        self.table.append(row)
        print(f"{row[1]:>7}  {row[0]}", flush=True)


def end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        raise Failed(f"it does not end within {END_S:g} s of Ctrl-C") from None


def follow(follower: Follower, page: str) -> None:
    """All steps.

    Raises:
        Failed: one does not do what the page says.
    """
    clone, *rest = commands(page)
    if clone != "git clone … && cd vllm_pd_connector":
        raise Failed(f"the page begins with {clone!r}, not with the clone: change tools/quickstart.py with it")
    follower.run(f"git clone -q {ROOT} {follower.clone}", where=follower.clone.parent)
    follower.environment()
    model, running = "", None
    try:
        for command in rest:
            if command.startswith("examples/"):
                told = follower.run("python examples/make_models.py gqa")
                model = next(iter(re.findall(r"\S*models/gqa\b", told)), "")
                running = follower.launch(on_a_cpu(command, model))
            else:
                answer = follower.run(on_a_cpu(command, model))
                if "curl" in command and ("error" in answer[:20] or not answer.strip()):
                    raise Failed(f"{command}\nanswered {answer[:400]!r}")
        if running is not None:
            follower.stop(running)
            running = None
    finally:
        if running is not None:
            end(running)


def table(rows: list[tuple[str, str]]) -> Iterator[str]:
    yield from (f"| {' | '.join(row)} |" for row in (rows[0], ("---", "---:"), *rows[1:]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--python", default=str(ROOT / ".venv" / "bin" / "python"), help="one that has vLLM")
    parser.add_argument("--into", type=Path, help="an empty directory to keep; else one that is removed")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what was launched is ended, too
    with tempfile.TemporaryDirectory() as temporary:
        where = (options.into or Path(temporary)).resolve()
        where.mkdir(parents=True, exist_ok=True)
        follower = Follower(where, options.python)
        try:
            follow(follower, PAGE.read_text())
        except (Failed, subprocess.TimeoutExpired) as error:
            print(f"FAILED: {error}", file=sys.stderr)
            return 1
        print("\n".join(("", *table(follower.table))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

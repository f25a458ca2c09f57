"""`vllm-pd` itself: words, failures, and a reader that has gone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from vllm_pd_connector import __version__
from vllm_pd_connector.cli import main
from vllm_pd_connector.cli.output import Exit

ROOT = Path(__file__).parents[2]
ANNOUNCE = "vllm-pd announce: Invalid value for"


def test_the_command_is_installed_under_its_name() -> None:
    assert 'vllm-pd = "vllm_pd_connector.cli:main"' in (ROOT / "pyproject.toml").read_text()


def test_it_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == Exit.OK
    assert capsys.readouterr().out == f"vllm-pd {__version__}\n"


V6 = "with an IPv6 address in brackets"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["exlain"], "vllm-pd exlain: No such command 'exlain'. Did you mean 'explain', 'plan'?"),
        ([], "vllm-pd: Missing command."),
        (["announce", "router", "http://x"], f"{ANNOUNCE} 'router': 'router' is not an address; give host:port"),
        (["announce", "router:1", "x"], f"{ANNOUNCE} 'URL...': 'x' is not a base URL; give http://host:port, {V6}"),
    ],
)  # fmt: skip
def test_wrong_words_are_one_line(words: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == Exit.USAGE
    assert capsys.readouterr().err == line + "\n"


def test_a_reader_that_has_gone_ends_it_quietly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "vllm_pd_connector.cli", "migrate", '{"kv_connector": "NixlConnector"}']
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait() == Exit.PIPE


def test_completion_is_offered() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "vllm_pd_connector.cli", "expl"], cwd=ROOT, capture_output=True, text=True, check=True,
        env={"_VLLM_PD_COMPLETE": "complete_bash", "COMP_WORDS": "vllm-pd expl", "COMP_CWORD": "1", "PATH": ""},
    )  # fmt: skip
    assert shown.stdout.split() == ["explain"]

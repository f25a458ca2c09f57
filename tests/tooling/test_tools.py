"""The small tools: links, the compatibility page, the wheel that names vLLM."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tools import check_links, compat_table, setup_env


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[a](other.md)", None),
        ("[a](other.md#the-title)", None),
        ("[a](#here)\n\n# Here", None),
        ("[a](https://example.org/x#y)", None),
        ("`[a](missing.md)`", None),
        ("```\n[a](missing.md)\n```", None),
        ("[a](missing.md)", "no such file"),
        ("[a](other.md#another-title)", "no heading"),
        ("[a](#nowhere)", "no heading"),
    ],
)
def test_links_are_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, problem: str | None) -> None:
    monkeypatch.setattr(check_links, "ROOT", tmp_path)
    (tmp_path / "other.md").write_text("# The `title`\n")
    page = tmp_path / "page.md"
    page.write_text(text)
    broken = list(check_links.broken_links(page))
    assert [problem] == [line.split(": ")[-1][: len(problem)] for line in broken] if problem else broken == []


def test_headings_that_repeat_get_numbers() -> None:
    assert check_links.anchors("# A b!\n## A b\n### A [b](c.md)\n") == {"a-b", "a-b-1", "a-b-2"}


def record(passed: bool, **row: Any) -> dict[str, Any]:
    columns = {"family": "gqa", "p_tp": 1, "d_tp": 2, "p_block": 0, "d_block": 0, "chunked": False}
    columns |= {"prefix_caching": True, "mode": "pull", "transport": "nixl"}
    columns |= {"p_pp": 2, "d_pp": 1, "p_layout": "", "d_layout": "", "p_conv": "", "d_conv": ""}
    return {"test": "t", "row": columns | row, "passed": passed}


def test_the_page_counts_what_passed_per_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    records = [record(True), record(False), record(True, family="mla", p_block=16, d_block=64, p_layout="NHD")]
    results = {"versions": {"vllm": "1.2.0+cpu", "torch": "3"}, "records": records}
    source, page = tmp_path / "results.json", tmp_path / "page.md"
    source.write_text(json.dumps(results))
    monkeypatch.setattr(sys, "argv", ["compat_table", str(source), "--page", str(page)])
    compat_table.main()
    text = page.read_text()
    assert "## vLLM 1.2\n\nRun with vllm 1.2.0+cpu, torch 3." in text
    assert "| gqa | nixl, pull | 1 → 2 | 2 → 1 | equal | equal | default | no | yes | 1 of 2 |" in text
    assert "| mla | nixl, pull | 1 → 2 | 2 → 1 | 16 → 64 | NHD → CPU | default | no | yes | 1 of 1 |" in text


def test_a_run_renews_the_section_of_its_vllm_and_no_other() -> None:
    def run(vllm: str, *records: dict[str, Any]) -> dict[str, Any]:
        return {"versions": {"vllm": vllm, "torch": "3"}, "records": records}

    first = compat_table.render([run("1.10.0", record(True), record(True, p_vllm="1.9", d_vllm="1.10"))])
    both = compat_table.render([run("1.9.0+cpu", record(False), record(True))], first)
    assert list(compat_table.sections_of(both)) == ["1.9", "1.10", "1.9 → 1.10"]
    texts = compat_table.sections_of(both)
    assert [texts[name].splitlines()[-1][-9:-2] for name in texts] == [" 1 of 2", " 1 of 1", " 1 of 1"]
    assert texts["1.9 → 1.10"].startswith("Run with torch 3."), "the tests' own vLLM says nothing of such a pair"
    again = compat_table.render([run("1.9.0+cpu", record(True))], both)
    assert compat_table.sections_of(again) == texts | {"1.9": texts["1.9"].replace("1 of 2", "1 of 1")}


def test_a_run_of_a_part_of_the_matrix_adds_to_its_section() -> None:
    def run(torch: str, *records: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"versions": {"vllm": "1.9.0", "torch": torch}, "records": records}]

    whole = compat_table.render(run("3", record(False), record(True, family="mla")))
    added = compat_table.render(run("3", record(True), record(True, by_layer=True, mode="push")), whole, add=True)
    lines = [line.strip("| ").split(" | ") for line in added.splitlines() if line.startswith("|")][2:]
    assert [(cells[0], cells[1], cells[-1]) for cells in lines] == [
        ("gqa", "nixl, pull", "1 of 1"), ("mla", "nixl, pull", "1 of 1"), ("gqa", "nixl, push by layer", "1 of 1")
    ]  # fmt: skip
    with pytest.raises(AssertionError, match=r"lines of other versions stand in sections \['1.9'\]"):
        compat_table.render(run("4", record(True)), whole, add=True)


def test_the_wheel_that_names_vllm_installs_and_holds_no_modules(tmp_path: Path) -> None:
    wheel = setup_env.write_vllm_wheel(tmp_path)
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", target, wheel]
    subprocess.run(pip, check=True)
    assert [path.name for path in target.iterdir()] == [f"vllm-{setup_env.VLLM_VERSION}+cpu.dist-info"]
    with zipfile.ZipFile(wheel) as archive:
        assert all(".dist-info/" in name for name in archive.namelist())


def test_the_environment_for_gpus_stands_on_the_interpreter_that_has_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup_env, "GPU", tmp_path / ".venv-gpu")
    monkeypatch.setattr(setup_env, "run", lambda *command, **_: ran.append(tuple(map(str, command))))
    without, having = tmp_path / "without", tmp_path / "python3"
    for path, status in ((without, 1), (having, 0)):
        path.write_text(f"#!/bin/sh\ncase $2 in *ensurepip*) exit 0;; esac\nexit {status}\n")
        path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    monkeypatch.setenv("PYTHON", str(without))
    setup_env.setup_gpu()
    made, installed = ran
    assert made == (str(having), "-m", "venv", "--system-site-packages", str(tmp_path / ".venv-gpu"))
    assert installed[0] == str(tmp_path / ".venv-gpu/bin/python") and installed[-1].endswith("[vllm,nixl,light]")


def test_a_browser_is_installed_where_one_is_root_and_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(setup_env, "install_debian_packages", asked.append)
    monkeypatch.setattr(setup_env.shutil, "which", lambda name: "/usr/bin/x" if name == "google-chrome" else None)
    setup_env.require_browser()
    assert asked == []
    monkeypatch.setattr(setup_env.shutil, "which", lambda _: None)
    setup_env.require_browser()
    assert asked == [["chromium"]]


def test_without_root_it_is_said_what_to_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(setup_env.shutil, "which", lambda _: None)
    assert setup_env.make([("browser", setup_env.require_browser, "")], None) == 1
    assert "as root run: apt-get update && apt-get install -y" in capsys.readouterr().err

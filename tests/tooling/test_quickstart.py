"""The tool that follows the quickstart: it finds the page's commands, and says which one fails."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tools import quickstart
from tools.quickstart import PAGE, Failed, Follower, commands, follow, on_a_cpu

FOUND = commands(PAGE.read_text())


@pytest.fixture
def follower(tmp_path: Path) -> Follower:
    made = Follower(tmp_path, sys.executable)
    made.clone.mkdir()
    return made


def test_the_pages_commands_are_found_in_order() -> None:
    assert [one.split()[0] for one in FOUND] == [
        "git", "pip", "python", "vllm-pd", "examples/launch_pd.py", "curl", "curl",
    ]  # fmt: skip
    assert FOUND[1] == "pip install '.[nixl,proxy]'" and FOUND[5].count("{") == FOUND[5].count("}") == 1


def test_a_machine_without_a_gpu_gets_what_the_page_says() -> None:
    told = [on_a_cpu(one, "/m/gqa") for one in FOUND]
    assert told[4] == "examples/launch_pd.py --model /m/gqa --cpu"
    assert '"model": "/m/gqa"' in told[5] and not any("Qwen" in one or "#" in one for one in told)


def test_what_fails_is_named_with_what_it_said(follower: Follower) -> None:
    with pytest.raises(Failed, match=r"(?s)echo no; false\nended with 1:\nno"):
        follower.run("echo no; false")
    with pytest.raises(Failed, match=r"(?s)does not serve:\nit fell"):
        follower.launch("sh -c 'echo it fell; exit 3'")
    assert follower.table == [("step", "seconds")]


def test_another_page_is_not_followed(follower: Follower) -> None:
    with pytest.raises(Failed, match=r"not with the clone: change tools/quickstart\.py"):
        follow(follower, PAGE.read_text().replace("git clone …", "git clone somewhere"))


def test_what_was_launched_is_ended_by_ctrl_c(follower: Follower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quickstart, "START_S", 30.0)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a job that a shell began with &
    try:
        code = "import time; print('ready', flush=True); time.sleep(60)"
        running = follower.launch(f'{sys.executable} -c "{code}"')
        follower.stop(running)
    finally:
        signal.signal(signal.SIGINT, before)
    assert running.returncode in (-signal.SIGINT, 128 + signal.SIGINT, 1)
    assert [row[0].partition("  # ")[2] for row in follower.table[1:]] == ["until all serve", "until all have ended"]

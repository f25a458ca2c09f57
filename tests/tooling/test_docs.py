"""What the documentation quotes is what the program says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TROUBLESHOOTING = (ROOT / "docs" / "troubleshooting.md").read_text()


def sources() -> str:
    """All of the package's text, with the joints of strings and the places of values in them removed."""
    text = "\n".join(path.read_text() for path in sorted((ROOT / "vllm_pd_connector").rglob("*.py")))
    text = re.sub(r"\{[^{}]*(\{[^{}]*\}[^{}]*)*\}", "", text)
    return re.sub(r'"\s*\n\s*f?"', "", text)


SOURCES = sources()


def messages() -> list[str]:
    """The quoted pieces of messages in the first column of the tables about messages."""
    about = TROUBLESHOOTING.partition("## It works, but")[0]
    rows = [
        line.split(" | ")[0] for line in about.splitlines() if line.startswith("| ") and "`" in line.split(" | ")[0]
    ]
    return [piece for row in rows if "(vLLM's)" not in row for piece in re.findall(r"`([^`]+)`", row)]


@pytest.mark.parametrize("message", messages())
def test_a_message_in_troubleshooting_is_one_of_the_programs(message: str) -> None:
    assert message.strip() in SOURCES


def test_the_changelog_tells_nothing_twice_and_nothing_at_length() -> None:
    """A merge of two branches may keep a line in both of its groups."""
    text = (ROOT / "CHANGELOG.md").read_text()
    told = [match[0].strip() for match in re.finditer(r"^- .*\n(?:  .*\n)*", text, re.MULTILINE)]
    assert sorted(told) == sorted(set(told))
    assert [one for one in told if one.count("\n") > 2] == []

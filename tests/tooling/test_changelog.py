"""The list of changes says each once."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

CHANGELOG = (Path(__file__).resolve().parents[2] / "CHANGELOG.md").read_text()


def test_no_entry_stands_twice() -> None:
    for release in CHANGELOG.split("\n## ")[1:]:
        entries = re.findall(r"^- (.*(?:\n  .*)*)", release, re.MULTILINE)
        assert entries or release.startswith("[Unreleased]\n")
        said = Counter(" ".join(entry.split()) for entry in entries)
        assert [entry for entry, times in said.items() if times > 1] == []
        begun = Counter(" ".join(entry.split())[:60] for entry in entries)
        assert [entry for entry, times in begun.items() if times > 1] == [], "nearly the same"
        assert [entry for entry in entries if entry.count("\n") > 2] == [], "at length"

"""Renew the tables of docs/performance.md and docs/scale.md from the documents under benchmarks/results/.

    python tools/performance_page.py [--take out/bench] [--check]

A table of a page stands between `<!-- NAME.json TABLE -->` and `<!-- end -->`, and is what that document has there;
what stands around it is written by hand. The goals between `<!-- goals -->` and `<!-- end -->` are made from several
documents (`goals.py`). `--take` first copies a run's documents over those that are kept, with the
commit and the machine, and its pictures over those of their names in docs/images; documents that no page shows get a
section at the end of the first. `--check` writes nothing, and says whether the page is as the documents are. `make
bench` runs it.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from benchmarks.report import as_json, commit, machine, markdown, tables  # noqa: E402
from tools.goals import goals  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
IMAGES = ROOT / "docs" / "images"
PAGE = ROOT / "docs" / "performance.md"
PAGES = (PAGE, ROOT / "docs" / "scale.md")
BLOCK = re.compile(r"<!-- (?P<file>[\w-]+)\.json (?P<table>[^>]+) -->\n.*?<!-- end -->", re.DOTALL)


GOALS = re.compile(r"<!-- goals -->\n.*?<!-- end -->", re.DOTALL)


class PageError(Exception):
    """A table that cannot be made; the text says why."""


def block(file: str, table: str, results: Path) -> str:
    """One table of the page, with its marks.

    Raises:
        PageError: the document, or its table, is not there.
    """
    path = results / f"{file}.json"
    if not path.is_file():
        raise PageError(f"{path} is not there: run benchmarks/{file}.py, or take its table out of the page")
    document = json.loads(path.read_text())
    found = dict(tables(document))
    if table not in found:
        raise PageError(f"{path} has the tables {', '.join(found) or 'none'}, and no {table}")
    facts = document if isinstance(document, dict) else {}
    machine = facts.get("machine", {})
    ran = ", ".join(f"{key} {machine[key]}" for key in ("cores", "processor", "load", "loop_ns") if key in machine)
    note = "; ".join(filter(None, (f"commit {facts['commit']}" if facts.get("commit") else "", ran)))
    text = markdown(found[table]) + (f"\n\n*{note}*" if note else "")
    return f"<!-- {file}.json {table} -->\n{text}\n<!-- end -->"


def render(page: str, results: Path = RESULTS) -> str:
    """The page with its tables as the documents have them.

    Raises:
        PageError: see `block`.
    """

    def document(name: str) -> Any:
        return json.loads((results / f"{name}.json").read_text())

    def table(_: re.Match[str]) -> str:
        return f"<!-- goals -->\n{markdown(goals(document))}\n<!-- end -->"

    return GOALS.sub(table, BLOCK.sub(lambda found: block(found["file"], found["table"], results), page))


def take(run: Path, results: Path, images: Path) -> None:
    """Keep the documents of a run that was made here, now, and the pictures that stand in `images` already."""
    results.mkdir(parents=True, exist_ok=True)
    for path in sorted(run.glob("*.json")):
        content = json.loads(path.read_text())
        document = content if isinstance(content, dict) else {"rows": content}
        document = {"machine": machine(), "commit": commit(), **document}
        (results / path.name).write_text(as_json(document))
    for path in sorted(run.glob("*.png")):
        if (images / path.name).is_file():
            shutil.copyfile(path, images / path.name)


def with_sections(page: str, results: Path, *others: str) -> str:
    """The page with a section for each document that neither it nor one of the others shows."""
    shown = {found["file"] for text in (page, *others) for found in BLOCK.finditer(text)}
    for path in sorted(results.glob("*.json")):
        if path.stem not in shown:
            names = [name for name, _ in tables(json.loads(path.read_text()))]
            marks = "\n\n".join(f"<!-- {path.name} {name} -->\n<!-- end -->" for name in names)
            page = f"{page.rstrip()}\n\n## benchmarks/{path.stem}.py\n\n{marks}\n"
    return page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--take", type=Path, help="a folder of documents to keep from now on")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    if options.take:
        take(options.take, RESULTS, IMAGES)
    first, *others = (page.read_text() for page in PAGES)
    try:
        made = [render(text) for text in (with_sections(first, RESULTS, *others), *others)]
    except PageError as error:
        sys.exit(str(error))
    for page, text in zip(PAGES, made, strict=True):
        if options.check and text != page.read_text():
            sys.exit(f"{page} is not what benchmarks/results/ has: run python tools/performance_page.py")
        if not options.check:
            page.write_text(text)


if __name__ == "__main__":
    main()

"""Check that every relative link in the Markdown files leads to a file, and every anchor to a heading.

Links to other hosts are not followed. Prints one line per broken link and exits with 1 if there is any.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

ROOT = Path(__file__).resolve().parent.parent

FENCE = re.compile(r"^(```|~~~).*?^\1\s*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*\s*$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]*\]\(\s*<?([^)\s>]+)>?[^)]*\)")
EXTERNAL = re.compile(r"^[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def anchors(text: str) -> set[str]:
    """Anchors of a page's headings, by the rule of the forges: lower case, punctuation dropped, spaces to hyphens."""
    found: set[str] = set()
    for title in HEADING.findall(FENCE.sub("", text)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        repeats = sum(1 for known in found if known == slug or re.fullmatch(rf"{re.escape(slug)}-\d+", known))
        found.add(f"{slug}-{repeats}" if repeats else slug)
    return found


def broken_links(page: Path) -> Iterator[str]:
    """What is wrong with a page's links, one sentence each."""
    text = CODE.sub("", FENCE.sub("", page.read_text(encoding="utf-8")))
    for target in LINK.findall(text):
        if EXTERNAL.match(target):
            continue
        path, _, anchor = unquote(target).partition("#")
        file = (page.parent / path).resolve() if path else page
        name = page.relative_to(ROOT)
        if not file.exists():
            yield f"{name}: {target}: no such file"
        elif anchor and file.suffix == ".md" and anchor not in anchors(file.read_text(encoding="utf-8")):
            yield f"{name}: {target}: no heading with this anchor"


def pages() -> list[Path]:
    """The project's Markdown files: all but those in hidden directories and build outputs."""
    own = [
        page for page in ROOT.rglob("*.md") if not any(part.startswith(".") for part in page.relative_to(ROOT).parts)
    ]
    return sorted(page for page in own if page.relative_to(ROOT).parts[0] not in {"build", "dist", "out"})


def main() -> int:
    broken = [line for page in pages() for line in broken_links(page)]
    print("\n".join(broken) if broken else "links in the documentation: all lead somewhere")
    return 1 if broken else 0


if __name__ == "__main__":
    raise SystemExit(main())

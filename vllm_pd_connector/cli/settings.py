"""`vllm-pd check-config` and `migrate`: a configuration before an instance is started with it."""

from __future__ import annotations

import json as json_
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from vllm_pd_connector.checks import document_notes, document_problems
from vllm_pd_connector.cli.options import Json
from vllm_pd_connector.cli.output import CommandError, Exit, NotReadable, emit, emit_json
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.in_tree import migrate as migrated

MAX_BYTES = 1 << 20

Document = Annotated[
    str, typer.Argument(metavar="JSON", help="what --kv-transfer-config is given; a file's name, or - to read it")
]  # fmt: skip


def check_config(document: Document, json: Json = False) -> Exit:
    """Check a configuration, as an instance does before it loads its model."""
    read = _read(document)
    problems = document_problems(read)
    notes = [] if problems else [*_of_environment(), *document_notes(read)]
    if json:
        emit_json("check-config", {"good": not problems, "problems": problems, "notes": notes})
    else:
        emit("\n".join(problems) or "good: an instance starts with it on this machine")
        for note in notes:
            emit(f"note: {note}")
    return Exit.REFUSED if problems else Exit.OK


def _of_environment() -> list[str]:
    if find_spec("vllm") is not None:
        return []
    here = f"vLLM is not installed in {sys.prefix}, where this command is"
    return [f"{here}: an instance needs vllm_pd_connector in vLLM's own environment; ask there"]


def migrate(document: Document, json: Json = False) -> Exit:
    """Say a configuration of vLLM's own connectors in ours, and what has no counterpart."""
    given = _read(document)
    if not isinstance(given, dict):
        raise NotReadable("the configuration is no JSON object")
    try:
        found = migrated(given)
    except InvalidConfig as error:
        raise CommandError(str(error)) from error
    if json:
        dropped = [{"key": key, "why": why} for key, why in found.dropped]
        emit_json("migrate", {"config": found.config, "dropped": dropped, "notes": found.notes})
        return Exit.OK
    lines = [f"--kv-transfer-config '{json_.dumps(found.config)}'"]
    for title, some in (
        ("without counterpart:", [f"{key}: {why}" for key, why in found.dropped]),
        ("to be known:", found.notes),
    ):
        if some:
            lines += ["", title, *(f"  {one}" for one in some)]
    emit("\n".join(lines))
    return Exit.OK


def _read(document: str) -> Any:
    """A JSON text, given as it is, by a file's name, or on stdin.

    Raises:
        NotReadable: none of them.
    """
    text = document
    if document == "-":
        text = sys.stdin.read(MAX_BYTES)
    elif not document.lstrip().startswith(("{", "[")):
        try:
            text = Path(document).read_text()[:MAX_BYTES]
        except (OSError, ValueError) as error:
            raise NotReadable(f"{document!r:.80} is neither JSON nor a file that can be read") from error
    try:
        return json_.loads(text)
    except (ValueError, RecursionError) as error:
        raise NotReadable(f"the configuration is not JSON: {error}") from error

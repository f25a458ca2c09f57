"""What all commands print alike: one line per failure, JSON with a number for its form, exit codes that tell causes
apart."""

from __future__ import annotations

import json
import os
import sys
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Final

import typer

from vllm_pd_connector.errors import PDConnectorError

if TYPE_CHECKING:
    from collections.abc import Mapping

SCHEMA: Final = 1
"""Of every JSON object that a command prints. It grows when a key goes or means something else, not when one comes."""


class Exit(IntEnum):
    """What a script learns. `PIPE` and `INTERRUPTED` are a shell's numbers for signals 13 and 2."""

    OK = 0
    REFUSED = 1
    USAGE = 2
    UNREACHABLE = 3
    UNREADABLE = 4
    LATE = 5
    INTERRUPTED = 130
    PIPE = 141


class CommandError(PDConnectorError):
    """A command that cannot do what it was asked; `code` says whose matter it is."""

    code = Exit.REFUSED


class NotReached(CommandError):
    """Nobody answered, or not the one that was asked for."""

    code = Exit.UNREACHABLE


class NotReadable(CommandError):
    """An input that is not there or makes no sense, or a file that cannot be written."""

    code = Exit.UNREADABLE


class Late(CommandError):
    """What was waited for did not come in time."""

    code = Exit.LATE


def emit(text: str) -> None:
    """Print an answer. Whoever reads may have gone: then there is nobody to tell, and the command ends."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what is left in the buffer goes there at the end
        raise typer.Exit(Exit.PIPE) from None


def emit_json(command: str, answer: Mapping[str, Any]) -> None:
    emit(json.dumps({"schema": SCHEMA, "command": command, **answer}, indent=1))


def say_failure(command: str, code: Exit, message: str, *, as_json: bool) -> Exit:
    """One line to stderr, or JSON to stdout; returns the exit code."""
    line = " ".join(message.split())
    if as_json:
        emit_json(command, {"error": {"kind": code.name.lower(), "message": line}})
    else:
        print(f"vllm-pd{f' {command}' if command else ''}: {line}", file=sys.stderr)
    return code


def printable(line: str) -> str:
    """Without what a terminal would obey: names are other processes' words."""
    return "".join(letter if letter.isprintable() else "?" for letter in line)


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines with columns below each other, as wide as they must be: what is cut off or folded cannot be searched."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]

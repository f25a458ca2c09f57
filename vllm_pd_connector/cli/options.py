"""Words that several commands take."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from vllm_pd_connector.arguments import base_url, host_and_port, seconds

Value = TypeVar("Value")


def taken(parse: Callable[[str], Value]) -> Callable[[str], Value]:
    """A parser of `arguments` whose refusal is the command line's."""

    @functools.wraps(parse)
    def parsed(text: str) -> Value:
        try:
            return parse(text)
        except argparse.ArgumentTypeError as error:
            raise typer.BadParameter(str(error)) from error

    return parsed


Json = Annotated[bool, typer.Option("--json", help="print JSON, errors too")]
Timeout = Annotated[
    float, typer.Option(parser=taken(seconds), metavar="SECONDS", help="how long to wait for a side channel")
]
KeysDirectory = Annotated[Path | None, typer.Option("--keys", metavar="DIRECTORY", help="as side_channel_keys")]
ServerKey = Annotated[Path | None, typer.Option(metavar="FILE", help="the instance's public key")]
Address = Annotated[str, typer.Argument(parser=taken(host_and_port))]
Urls = Annotated[
    list[str], typer.Argument(parser=taken(base_url), metavar="URL...", help="base URL of an instance")
]  # fmt: skip
INSTANCE = "file of manifests, or tcp://host:port[/engine_id]"

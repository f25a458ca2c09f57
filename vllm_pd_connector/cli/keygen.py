"""`vllm-pd keygen`: keys with which instances authenticate each other, and a secret for parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vllm_pd_connector.cli.options import Json
from vllm_pd_connector.cli.output import CommandError, Exit, emit, emit_json
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.sidechannel.net.keys import create_secret, new_keys


def keygen(
    directory: Annotated[Path, typer.Argument(help="where NAME.key and NAME.key_secret are written")],
    name: Annotated[str, typer.Option(help="name of the files")] = "instance",
    params_secret: Annotated[
        Path | None, typer.Option(metavar="FILE", help="also write a new secret for params_secret")
    ] = None,
    json: Json = False,
) -> Exit:
    """Make keys for the side channel, and a secret for parameters."""
    try:
        with new_keys(directory, name) as (public, secret):
            if params_secret is not None:
                create_secret(params_secret)
    except InvalidConfig as error:
        raise CommandError(str(error)) from error
    if json:
        told = str(params_secret) if params_secret is not None else None
        emit_json("keygen", {"public": str(public), "secret": str(secret), "params_secret": told})
        return Exit.OK
    lines = [
        f"{secret}: keep it on the instance, in the directory of side_channel_keys",
        f"{public}: copy it into the directory of side_channel_keys of every instance that talks to this one",
    ]
    if params_secret is not None:
        lines.append(f"{params_secret}: copy it to all instances, params_secret")
    emit("\n".join(lines))
    return Exit.OK

"""`vllm-pd keygen`: keys with which instances authenticate each other, and a secret for parameters."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from vllm_pd_connector.cli.options import Json
from vllm_pd_connector.cli.output import CommandError, Exit, emit, emit_json
from vllm_pd_connector.errors import InvalidConfig
from vllm_pd_connector.sidechannel.net.keys import create_secret, new_keys


def keygen(
    directory: Annotated[
        Path | None, typer.Argument(help="where NAME.key and NAME.key_secret are written; none: no keys")
    ] = None,
    name: Annotated[str, typer.Option(help="name of the files")] = "instance",
    params_secret: Annotated[
        Path | None, typer.Option(metavar="FILE", help="write a new secret for params_secret")
    ] = None,
    json: Json = False,
) -> Exit:
    """Make keys for the side channel, and a secret for parameters."""
    if directory is None and params_secret is None:
        raise CommandError("nothing to make: give a directory for keys, or --params-secret FILE, or both")
    try:
        with new_keys(directory, name) if directory is not None else nullcontext() as keys:
            if params_secret is not None:
                create_secret(params_secret)
    except InvalidConfig as error:
        raise CommandError(str(error)) from error
    if json:
        public, secret, told = (
            str(one) if one is not None else None for one in (*(keys or (None, None)), params_secret)
        )
        emit_json("keygen", {"public": public, "secret": secret, "params_secret": told})
        return Exit.OK
    lines = []
    if keys is not None:
        lines += [
            f"{keys[1]}: keep it on the instance, in the directory of side_channel_keys",
            f"{keys[0]}: copy it into the directory of side_channel_keys of every instance that talks to this one",
        ]
    if params_secret is not None:
        lines.append(f"{params_secret}: copy it to all instances, params_secret")
    emit("\n".join(lines))
    return Exit.OK

"""`vllm-pd proxy`, also as `python -m vllm_pd_connector.proxy`."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from vllm_pd_connector.arguments import OneLineParser

if TYPE_CHECKING:
    from collections.abc import Sequence

USAGE_ERROR = 2


def main(words: Sequence[str]) -> int:
    """Run the router with these options; returns the exit code."""
    try:
        from vllm_pd_connector.proxy import serve
    except ModuleNotFoundError as error:
        if error.name != "aiohttp":
            raise
        print("vllm-pd proxy: aiohttp is missing; pip install vllm-pd-connector[proxy]", file=sys.stderr)
        return USAGE_ERROR
    parser = OneLineParser(prog="vllm-pd proxy", description="A P/D router; see its README.md.")
    serve.add_arguments(parser)
    return serve.run(parser.parse_args(words))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

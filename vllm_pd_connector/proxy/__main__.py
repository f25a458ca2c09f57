"""Command line of the router."""

from __future__ import annotations

import argparse
import logging

from aiohttp import web

from vllm_pd_connector.proxy.router import Options, Router


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vllm_pd_connector.proxy", description="A small P/D router.")
    for kind in ("prefill", "decode"):
        parser.add_argument(
            f"--{kind}",
            action="append",
            required=True,
            metavar="URL",
            type=lambda text: text.rstrip("/"),
            help=f"base URL of a {kind} instance; repeat for several",
        )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--connect-timeout", type=float, default=5.0, help="seconds")
    parser.add_argument("--read-timeout", type=float, default=600.0, help="seconds of silence")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    options = Options(arguments.prefill, arguments.decode, arguments.connect_timeout, arguments.read_timeout)
    # Without handler_cancellation aiohttp runs a handler to its end after the client has gone.
    web.run_app(
        Router(options).application(),
        host=arguments.host,
        port=arguments.port,
        handler_cancellation=True,
        print=None,
        access_log=None,
    )


if __name__ == "__main__":
    main()

"""`python -m vllm_pd_connector.proxy` is `vllm-pd proxy`."""

from __future__ import annotations

import sys

from vllm_pd_connector.cli import main

if __name__ == "__main__":
    sys.exit(main(["proxy", *sys.argv[1:]]))

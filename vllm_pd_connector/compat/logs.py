"""This package's log lines in vLLM's form: same handlers, same level, so that a user sees one log."""

from __future__ import annotations

import logging


def adopt_vllm_logging() -> None:
    """Give this package's logger the handlers of vLLM's; calling it again changes nothing.

    vLLM configures only its own logger (`vllm.logger`), and does not when VLLM_CONFIGURE_LOGGING is 0.
    """
    import vllm.logger  # noqa: F401  # configures the logger `vllm`

    theirs = logging.getLogger("vllm")
    ours = logging.getLogger("vllm_pd_connector")
    if theirs.handlers and not ours.handlers:
        ours.handlers = list(theirs.handlers)
        ours.setLevel(theirs.level)
        ours.propagate = False

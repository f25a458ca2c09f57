"""What a dial takes the loop that owns it."""

from __future__ import annotations

import subprocess
import sys

FIRST_DIALS = """
import contextlib, select, socket, sys
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.dial import Dial

before = set(sys.modules)
with socket.create_server(("127.0.0.1", 0)) as server, select.epoll() as ready:
    for host in ("127.0.0.1", "localhost"):
        with contextlib.closing(Dial(host, server.getsockname()[1], ready)) as dial:
            while dial.result() is None:
                ready.poll()
print(sorted(set(sys.modules) - before))
"""


def test_the_first_dial_of_a_process_loads_no_module() -> None:
    # Python encodes each host's name with a codec that it loads when it is first asked for one.
    done = subprocess.run([sys.executable, "-c", FIRST_DIALS], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")

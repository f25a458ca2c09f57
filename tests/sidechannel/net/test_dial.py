"""What a dial takes the loop that owns it, and whose fault it is that it finds nothing."""

from __future__ import annotations

import contextlib
import errno
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.descriptors import no_descriptor_left
from tests.support.ports import free_port
from vllm_pd_connector.errors import Busy, ProtocolError, Unreachable
from vllm_pd_connector.sidechannel.net import dial as module
from vllm_pd_connector.sidechannel.net.dial import Dial

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


def outcome(host: str, port: int) -> ProtocolError:
    """What a dial in vain raises."""
    with select.epoll() as ready, contextlib.closing(Dial(host, port, ready)) as dial:
        try:
            while dial.result() is None:
                ready.poll()
        except ProtocolError as error:
            return error
    raise AssertionError("it was not in vain")


@pytest.mark.parametrize("host", ["127.0.0.1", "prefill.example"])
def test_that_no_file_is_left_here_does_not_say_that_nobody_is_there(host: str) -> None:
    with (
        select.epoll() as ready,
        no_descriptor_left(),
        contextlib.closing(Dial(host, 9, ready)) as dial,
        pytest.raises(Busy, match="Too many open files"),
    ):
        dial.result()


def no_thread(*_: object) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("lacking", "value", "says"),
    [
        ("_lookups", threading.BoundedSemaphore(0), "64 other names are being looked up"),
        ("threading.Thread.start", no_thread, "cannot be looked up: can't start new thread"),
    ],
)
def test_nor_does_a_name_that_cannot_be_looked_up_now(
    monkeypatch: pytest.MonkeyPatch, lacking: str, value: Callable[..., None], says: str
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(f"{module.__name__}.{lacking}", value)
        found = outcome("prefill.example", 9)
    assert isinstance(found, Busy) and says in str(found)


@pytest.mark.parametrize(("elsewhere", "kind"), [(errno.ENOBUFS, Busy), (errno.ECONNREFUSED, Unreachable)])
def test_one_address_that_refuses_is_enough_to_say_so(
    monkeypatch: pytest.MonkeyPatch, elsewhere: int, kind: type[ProtocolError]
) -> None:
    codes = [errno.ENOMEM, elsewhere]

    class Socket(socket.socket):
        def connect_ex(self, _address: Any) -> int:
            return codes.pop()

    addresses = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", (f"127.0.0.{last}", 9)) for last in (2, 3)]
    monkeypatch.setattr(module, "_addresses", lambda *_: addresses)
    monkeypatch.setattr(module.socket, "socket", Socket)
    assert type(outcome("prefill.example", free_port())) is kind

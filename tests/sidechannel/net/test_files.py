"""How many files a process allows itself, and that it says when they run out."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.support.descriptors import no_descriptor_left
from vllm_pd_connector.errors import Busy
from vllm_pd_connector.protocol.wire.messages import Release
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net import files
from vllm_pd_connector.sidechannel.net.files import FILES, FilesLeft, allow_files
from vllm_pd_connector.sidechannel.net.sockets import endpoint

LIMIT = resource.RLIMIT_NOFILE


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = resource.getrlimit(LIMIT)
    yield
    resource.setrlimit(LIMIT, before)


def test_the_limit_is_raised_as_far_as_the_hard_one_allows_and_never_lowered() -> None:
    _, hard = resource.getrlimit(LIMIT)
    most = FILES if hard == resource.RLIM_INFINITY else min(FILES, hard)
    resource.setrlimit(LIMIT, (512, hard))
    allow_files()
    assert resource.getrlimit(LIMIT) == (most, hard)
    if hard > most:
        resource.setrlimit(LIMIT, (most + 1, hard))
        allow_files()
        assert resource.getrlimit(LIMIT) == (most + 1, hard)


def test_a_low_hard_limit_is_kept() -> None:
    code = (
        "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (256, 700));"
        "from vllm_pd_connector.sidechannel.net.files import allow_files; allow_files();"
        "print(r.getrlimit(r.RLIMIT_NOFILE))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "(700, 700)\n"


def test_where_it_cannot_be_raised_the_engine_starts_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not here")

    resource.setrlimit(LIMIT, (512, resource.getrlimit(LIMIT)[1]))
    with monkeypatch.context() as patch:
        patch.setattr(files.resource, "setrlimit", refuse)
        allow_files()
    assert "cannot be raised" in caplog.text


def test_a_server_for_which_no_socket_is_left_can_be_asked_later() -> None:
    with contextlib.closing(SideChannelClient()) as client:
        where = endpoint("127.0.0.1", 9)
        with no_descriptor_left(), pytest.raises(Busy, match="no socket is left"):
            client.send(where, Release(()), 1.0)
        client.send(where, Release(()), 1.0)


def test_few_left_is_said_once_a_minute(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    now = [1000.0]
    monkeypatch.setattr(files.time, "monotonic", lambda: now[0])
    left = FilesLeft()
    left.look()
    assert "files open" not in caplog.text
    resource.setrlimit(LIMIT, (len(os.listdir("/proc/self/fd")) + 1, resource.getrlimit(LIMIT)[1]))
    left.look()
    assert "files open" not in caplog.text, "it was looked at in this minute"
    now[0] += files.LOOK_S
    left.look()
    left.look()
    assert caplog.text.count("files open") == 1
    monkeypatch.setattr(files.os, "listdir", lambda _path: (_ for _ in ()).throw(OSError(24, "Too many open files")))
    now[0] += files.LOOK_S
    left.look()
    assert caplog.text.count("files open") == 2

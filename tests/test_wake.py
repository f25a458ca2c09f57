"""The event that ends a thread's sleep."""

from __future__ import annotations

import os
import select

import pytest

from vllm_pd_connector.wake import Wake


def is_readable(wake: Wake) -> bool:
    poller = select.poll()
    poller.register(wake.fileno(), select.POLLIN)
    return bool(poller.poll(0))


def test_it_is_set_once_however_often_and_taken_back_once():
    wake = Wake()
    assert not wake.clear()
    wake.set()
    wake.set()
    assert wake.clear() and not wake.clear()
    wake.close()


def test_it_is_written_once_until_it_is_taken_back(monkeypatch):
    """A write gives other threads their turn of the interpreter, and whoever was told needs no other."""
    wake, writes, write = Wake(), [], os.eventfd_write
    monkeypatch.setattr(os, "eventfd_write", lambda *number: (writes.append(number), write(*number)))
    for _ in range(2):
        wake.set()
        wake.set()
        wake.clear()
    assert len(writes) == 2
    wake.close()


def test_who_sets_it_while_it_is_taken_back_is_heard_then_and_later(monkeypatch):
    wake, read, write = Wake(), os.eventfd_read, os.eventfd_write
    wake.set()
    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_read", lambda number: (read(number), wake.set())[0])
        assert wake.clear(), "what it is set for in the midst of this is looked at after it"
    wake.set()
    assert is_readable(wake) and wake.clear()
    with monkeypatch.context() as patch:
        patch.setattr(os, "eventfd_write", lambda *number: (wake.clear(), write(*number)))
        wake.set()
    assert is_readable(wake), "it was taken back before it was written"
    assert wake.clear() and not is_readable(wake)
    wake.set()
    assert is_readable(wake)
    wake.close()


def test_who_sets_it_after_its_end_writes_to_no_descriptor_of_others():
    wake = Wake()
    number = wake.fileno()
    wake.close()
    wake.close()
    descriptor = os.eventfd(0, os.EFD_NONBLOCK)
    os.dup2(descriptor, number)
    try:
        wake.set()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(number)
    finally:
        os.close(number)
        if descriptor != number:
            os.close(descriptor)

"""The event that ends a thread's sleep."""

from __future__ import annotations

import os

import pytest

from vllm_pd_connector.wake import Wake


def test_it_is_set_once_however_often_and_taken_back_once():
    wake = Wake()
    assert not wake.clear()
    wake.set()
    wake.set()
    assert wake.clear() and not wake.clear()
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

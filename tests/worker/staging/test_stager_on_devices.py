"""Staged transfers whose chunks a device copies: what waits for it, and what ends with it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from tests.support.worker.decode_instance import Decode, in_its_thread, until
from tests.support.worker.writer import CONFIG, TINY
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.staging.strided_copy import Copy
from vllm_pd_connector.worker.staging.stager import POLL_DEVICE_S
from vllm_pd_connector.worker.transfer_loop import TransferLoop


class Device:
    """Copies when it is released, or when someone waits for it; `broken` says that it fails then."""

    def __init__(self, begin: Any) -> None:
        self._begin = begin
        self.released = self.broken = False
        self.begun = self.waited = 0

    def begin(self, base: int, copies: Iterable[Copy], *, gather: bool = False) -> Any:
        self.begun += 1
        return _Copying(self, self._begin(base, copies, gather=gather))


class _Copying:
    launched = True

    def __init__(self, device: Device, copying: Any) -> None:
        self._device, self._copying = device, copying

    def advance(self, until: float) -> bool:
        return bool(self._device.released and self._copying.advance(until))

    def stop(self) -> None:
        self._device.waited += 1
        if self._device.broken:
            raise RuntimeError("an illegal memory access")


@pytest.fixture
def decode() -> Iterator[Decode]:
    made = Decode(Config(transport="loopback", staging_bytes=TINY))
    yield made
    made.loop.close()


@pytest.fixture
def config() -> Config:
    return replace(CONFIG, staging_bytes=TINY)


def device_of(loop: TransferLoop, monkeypatch: pytest.MonkeyPatch) -> Device:
    copier = loop._stager.copier
    made = Device(copier.begin)
    monkeypatch.setattr(copier, "begin", made.begin)
    return made


@pytest.fixture
def device(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> Device:
    return device_of(decode.loop, monkeypatch)


def free(decode: Decode) -> int:
    return decode.loop._stager.staging.free


def copied_on(decode: Decode, device: Device) -> None:
    """Wait until chunks are with the device and nothing else is left to do."""
    until(lambda: device.begun >= 4, "four chunks under way")
    until(lambda: not decode.loop._stager.converting, "all of them read")


def test_a_receive_ends_when_the_device_says_so(prefill, decode, device):
    decode.loop.submit([prefill.request("a")], [])
    copied_on(decode, device)
    pauses: list[float | None] = []
    in_its_thread(decode.loop, lambda _: pauses.append(decode.loop._stager.pause()))
    assert pauses == [POLL_DEVICE_S], "the thread sleeps between looks"
    assert (decode.worker.memory == decode.before).all()
    device.released = True
    decode.loop._wake.set()
    assert decode.wait_for("a") == [True]
    assert (decode.worker.memory == decode.expected()).all() and free(decode) == TINY
    assert not device.waited


def test_what_is_given_up_waits_for_the_device_before_its_blocks_are_free(prefill, decode, device):
    decode.loop.submit([prefill.request("a")], [])
    copied_on(decode, device)
    decode.loop.submit([], ["a"])
    assert decode.wait_for("a") == [False]
    assert device.waited >= 1 and not decode.quarantined
    until(lambda: free(decode) == TINY, "the slots to come back")


def test_slots_of_a_device_that_fails_stay_out(prefill, decode, device):
    decode.loop.submit([prefill.request("a")], [])
    copied_on(decode, device)
    device.broken = True
    decode.loop.submit([], ["a"])
    assert decode.wait_for("a") == [False]
    assert free(decode) < TINY


def test_a_loop_that_is_closed_waits_for_the_copies_of_its_pushes(writer, target, monkeypatch):
    """What they copy out of the caches may be unmapped next."""
    devices = {loop: device_of(loop, monkeypatch) for loop in writer.loops}
    writer.whole()
    target.loop.submit([target.request(writer)], [])
    until(lambda: any(device.begun for device in devices.values()), "a copy to begin")
    # Of one alone: the others' fail with it, and are then waited for anyhow.
    loop, device = next((loop, device) for loop, device in devices.items() if device.begun)
    loop.close()
    assert device.waited

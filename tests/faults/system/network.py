"""Two hosts on one machine, and a bad network between them.

Prefill and decode each get a network namespace with two interfaces: `ctl`, over which the campaign speaks HTTP, and
`net`, a TUN device over which the two speak to each other. The campaign itself carries the packets between the two
TUN devices, so it can lose, delay or stop them in either direction: `tc netem` does the same, but not every kernel
has it. Needs root, `ip` of iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import contextlib
import fcntl
import heapq
import itertools
import os
import random
import re
import selectors
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
MTU = 1400
NETWORK = {4: ("10.77.0.{}", 24), 6: ("fd77::{}", 64)}
CONTROL = "10.78"
LISTED = {"link": ("-brief", "link"), "netns": ("netns", "list")}


class NotPossible(Exception):
    """This machine cannot have network namespaces; the text says why."""


@dataclass(slots=True)
class Way:
    """What happens to packets in one direction: lost with a probability, late by some seconds, those longer than some
    bytes lost, or all.

    `touched` counts those to which something happened.
    """

    loss: float = 0.0
    delay_s: float = 0.0
    open: bool = True
    longest: int | None = None
    touched: int = 0


@dataclass(frozen=True, slots=True)
class Host:
    """A namespace. `address` is where its peer reaches it, `control` where the campaign does."""

    name: str
    address: str
    control: str

    def command(self, *words: str) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.name, *words)


@dataclass(eq=False)
class Network:
    """Two hosts, "prefill" and "decode", and the packets between them, of this version of IP; a context."""

    seed: int
    version: int = 4
    hosts: dict[str, Host] = field(default_factory=dict)
    ways: Mapping[str, Way] = field(default_factory=lambda: {"to decode": Way(), "to prefill": Way()})

    def __enter__(self) -> Network:
        self._random = random.Random(self.seed)
        self._stop_out, self._stop_in = os.pipe()
        self._devices: dict[str, int] = {}
        self._down: set[str] = set()
        try:
            for kind, words in LISTED.items():
                listed = subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
                for name in left_behind(listed, lambda pid: Path(f"/proc/{pid}").exists()):
                    _ip(kind, "del", name)
            for number, side in enumerate(("prefill", "decode"), start=1):
                self._make(side, number)
        except (OSError, subprocess.CalledProcessError) as error:
            self._remove()
            raise NotPossible(f"network namespaces: {error}; run as root, with iproute2 and /dev/net/tun") from error
        self._thread = threading.Thread(target=self._carry, name="network", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.write(self._stop_in, b"\0")
        self._thread.join()
        self._remove()

    def mend(self) -> None:
        """Carry every packet again, at once."""
        for way in self.ways.values():
            way.loss, way.delay_s, way.open, way.longest = 0.0, 0.0, True, None
        for side in sorted(self._down):
            self.link(side, True)

    def link(self, side: str, up: bool) -> None:
        """Set the interface of a host down, which its kernel tells every socket, or up again. It loses its IPv6 address
        meanwhile."""
        host, (_, prefix) = self.hosts[side], NETWORK[self.version]
        _ip("-n", host.name, "link", "set", "net", "up" if up else "down")
        if up:
            _ip("-n", host.name, "addr", "replace", f"{host.address}/{prefix}", "dev", "net")
        (self._down.discard if up else self._down.add)(side)

    @property
    def touched(self) -> int:
        """Packets that were lost or late so far."""
        return sum(way.touched for way in self.ways.values())

    def _make(self, side: str, number: int) -> None:
        name, ctl = f"pd-{os.getpid()}-{side[0]}", _control(side)
        form, prefix = NETWORK[self.version]
        host = Host(name, form.format(number), f"{CONTROL}.{number}.2")
        _ip("netns", "add", name)
        self.hosts[side] = host
        _ip("link", "add", ctl, "type", "veth", "peer", "name", "ctl", "netns", name)
        _ip("addr", "add", f"{CONTROL}.{number}.1/24", "dev", ctl)
        _ip("link", "set", ctl, "up")
        self._devices[side] = _tun(f"{ctl}t")
        _ip("link", "set", f"{ctl}t", "netns", name, "name", "net")
        for words in (
            ("link", "set", "lo", "up"),
            ("addr", "add", f"{host.control}/24", "dev", "ctl"),
            ("link", "set", "ctl", "up"),
            ("addr", "add", f"{host.address}/{prefix}", "dev", "net"),
            ("link", "set", "net", "mtu", str(MTU), "up"),
        ):
            _ip("-n", name, *words)

    def _remove(self) -> None:
        for device in self._devices.values():
            os.close(device)
        for side, host in self.hosts.items():
            # A namespace lives on while sockets in it linger, and its end of the link with it.
            for words in (("link", "del", _control(side)), ("netns", "del", host.name)):
                subprocess.run(["ip", *words], check=False, capture_output=True)
        os.close(self._stop_in)
        os.close(self._stop_out)

    def _carry(self) -> None:
        ends = {self._devices["prefill"]: ("to decode", self._devices["decode"]),
                self._devices["decode"]: ("to prefill", self._devices["prefill"])}  # fmt: skip
        later: list[tuple[float, int, int, bytes]] = []
        order = itertools.count()
        with selectors.DefaultSelector() as selector:
            for device in (*ends, self._stop_out):
                selector.register(device, selectors.EVENT_READ)
            while True:
                timeout = max(0.0, later[0][0] - time.monotonic()) if later else None
                for key, _ in selector.select(timeout):
                    if key.fd == self._stop_out:
                        return
                    packet = os.read(key.fd, 1 << 16)
                    name, target = ends[key.fd]
                    way = self.ways[name]
                    lost = not way.open or self._random.random() < way.loss
                    lost |= way.longest is not None and len(packet) > way.longest
                    way.touched += lost or way.delay_s > 0
                    if lost:
                        continue
                    heapq.heappush(later, (time.monotonic() + way.delay_s, next(order), target, packet))
                while later and later[0][0] <= time.monotonic():
                    _, _, target, packet = heapq.heappop(later)
                    with contextlib.suppress(OSError):  # the interface is down
                        os.write(target, packet)


OF_A_NETWORK = re.compile(r"pd\d+[a-z]")
"""The names of `_control`'s links, of any process."""


def _control(side: str) -> str:
    """The link to a host, at this end."""
    return f"pd{os.getpid()}{side[0]}"


def left_behind(listed: str, lives: Callable[[int], bool]) -> list[str]:
    """Namespaces and links of campaigns that were killed, in what `ip` lists: their addresses are ours, too.

    Raises:
        NotPossible: one of a campaign that runs.
    """
    found = {match[1]: int(match[2]) for match in re.finditer(r"^(pd-?(\d+)-?[pd])\b", listed, re.MULTILINE)}
    for pid in filter(lives, found.values()):
        raise NotPossible(f"network namespaces: process {pid} has the same addresses; wait for its end")
    return list(found)


def _tun(name: str) -> int:
    device = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return device


def _ip(*words: str) -> None:
    try:
        subprocess.run(["ip", *words], check=True, capture_output=True, text=True)
    except subprocess.CalledProcessError as error:
        raise OSError(f"ip {' '.join(words)}: {error.stderr.strip()}") from error

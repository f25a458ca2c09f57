"""The transports between two hosts on one: namespaces with addresses of their own, over IPv4 and IPv6.

    python tests/faults/two_hosts.py

Without servers, in under a minute: a read, a write, both through an outage that heals and past a link that loses large
packets, and a peer that is killed and comes back. Prints a table of seconds; exit code 0 if every byte was right. Needs
root (`system.network`).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2]))

from tests.faults.instances import UCX_OVER_NETWORK
from tests.faults.strikes.strikes import LONGEST
from tests.faults.system.network import Host, Network, NotPossible
from tests.support.transport.ends import End, ProcessPeer

SIZE = 8 << 20
OUTAGE_S = 2.0
_CLONE_NEWNET, _CLONE_NEWNS = 0x40000000, 0x00020000
_MS_REC, _MS_SLAVE, _MNT_DETACH = 0x4000, 0x80000, 2


def enter(name: str) -> None:
    """What `ip netns exec` does: the namespace, and a /sys that shows its devices, which UCX looks at."""
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as namespace:
        failed = libc.setns(namespace.fileno(), _CLONE_NEWNET)
    failed = failed or libc.unshare(_CLONE_NEWNS) or libc.mount(None, b"/", None, _MS_REC | _MS_SLAVE, None)
    failed = failed or libc.umount2(b"/sys", _MNT_DETACH) or libc.mount(b"sysfs", b"/sys", b"sysfs", 0, None)
    if failed:
        raise OSError(ctypes.get_errno(), f"cannot enter network namespace {name}")


class HostEnd(End):
    """An `End` in a network namespace, which the options name."""

    def __init__(self, transport: str, options: dict[str, Any], length: int) -> None:
        own = dict(options)
        enter(own.pop("namespace"))
        super().__init__(transport, own, length)


def peer_on(host: Host, transport: str) -> ProcessPeer:
    options: dict[str, Any] = {"ucx": UCX_OVER_NETWORK}
    if transport == "mooncake":
        options = {"protocol": "tcp", "address": host.address, "allow_unauthenticated_peers": True}
    return ProcessPeer(transport, {**options, "namespace": host.name}, SIZE, HostEnd)


@contextlib.contextmanager
def outage(network: Network, **changes: Any) -> Iterator[None]:
    """Both directions are bad for some seconds, then as before."""
    for way in network.ways.values():
        for name, value in changes.items():
            setattr(way, name, value)
    healing = threading.Timer(OUTAGE_S, network.mend)
    healing.start()
    yield
    healing.join()


def moved(here: ProcessPeer, there: ProcessPeer, method: str, seed: int) -> str:
    """Seconds of one transfer of everything; "wrong bytes" if they are."""
    (there if method == "read_all" else here).call("fill", seed)
    began = time.monotonic()
    here.call(method, there.endpoint, there.segments, there.address)
    seconds = time.monotonic() - began
    return f"{seconds:.2f}" if here.call("digest") == there.call("digest") else "wrong bytes"


def rehearse(transport: str, version: int) -> dict[str, str]:
    found: dict[str, str] = {}
    with Network(1, version) as network:
        there, here = peer_on(network.hosts["prefill"], transport), peer_on(network.hosts["decode"], transport)
        found["read"] = moved(here, there, "read_all", 1)
        found["write"] = moved(here, there, "write_all", 2)
        with outage(network, longest=LONGEST):
            found["large lost, read"] = moved(here, there, "read_all", 3)
        with outage(network, open=False):
            found["cut, write"] = moved(here, there, "write_all", 4)
        there.kill()
        there.stop()
        again = peer_on(network.hosts["prefill"], transport)
        found["restarted, read"] = moved(here, again, "read_all", 5)
        for peer in (here, again):
            peer.kill()
            peer.stop()
    return found


def main() -> int:
    rows = {(t, v): rehearse(t, v) for v in (4, 6) for t in ("nixl", "mooncake")}
    columns = list(next(iter(rows.values())))
    print("", "transport", "IP", *columns, "", sep=" | ")
    for (transport, version), found in rows.items():
        print("", transport, str(version), *(found[column] for column in columns), "", sep=" | ")
    return int(any("wrong bytes" in found.values() for found in rows.values()))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotPossible as error:
        sys.exit(str(error))

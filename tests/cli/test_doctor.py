"""`vllm-pd doctor`: this machine, and an instance from here."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.support.ports import free_port
from tests.support.worker.prefill_instance import PrefillInstance
from tests.support.worker.writer import CONFIG, Writer
from vllm_pd_connector.cli import main
from vllm_pd_connector.cli.instances import load
from vllm_pd_connector.cli.machine import findings
from vllm_pd_connector.cli.output import Exit
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.registry import create

ROOT = Path(__file__).parents[2]


def examined(capsys: pytest.CaptureFixture[str], code: Exit, *words: str) -> dict[str, dict[str, Any]]:
    assert main(["doctor", *words, "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["good"] == (code is Exit.OK) and answer["schema"] == 1
    return {one["topic"]: one for one in answer["findings"]}


def test_this_machine_is_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    found = examined(capsys, Exit.OK)
    assert "transport loopback" not in found and "pyzmq " in found["software"]["says"]
    assert {"network", "RDMA", "UCX", "/dev/shm", "capabilities", "locked memory", "GPU", "ports", "clock"} <= set(
        found
    )
    assert main(["doctor"]) == Exit.OK
    assert len(capsys.readouterr().out.splitlines()) == len(found)


def test_what_the_kernel_says_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {
        "sys/class/net/lo/operstate": "unknown",
        "sys/class/net/eth0/operstate": "up",
        "sys/class/net/eth0/speed": "100000",
        "sys/class/net/eth0/mtu": "9000",
        "sys/class/net/eth1/operstate": "down",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE",
        "sys/class/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN",
        "proc/self/status": "Name: x\nCapEff:\t0000000000000000\n",
        "proc/sys/kernel/yama/ptrace_scope": "1",
        "proc/driver/nvidia/gpus/0000:01:00.0/information": "",
        "proc/modules": "nvidia 1 2 -\n",
        "dev/infiniband/uverbs0": "",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    for key in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(key, raising=False)
    monkeypatch.setattr("vllm_pd_connector.cli.machine.resource.getrlimit", lambda _: (64 << 10, 64 << 10))
    found = {one.topic: one for one in findings(tmp_path)}
    assert found["network"].says == "eth0 (mtu 9000, 100000 Mb/s)"
    assert found["RDMA"].state == "good" and found["RDMA"].says == "mlx5_0:1 (400 Gb/sec (4X NDR))"
    assert "RDMA, for mlx5_0:1" in found["UCX"].says
    assert "for root alone the capability IPC_LOCK" in found["locked memory"].says
    assert found["/dev/shm"].state == "bad" and found["locked memory"].state == "bad"
    assert found["capabilities"].state == "note" and "CMA" in found["capabilities"].says
    assert found["GPU"].state == "note" and "nvidia_peermem is not loaded" in found["GPU"].says
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0/information").unlink()
    (tmp_path / "proc/driver/nvidia/gpus/0000:01:00.0").rmdir()
    [without] = [one for one in findings(tmp_path) if one.topic == "GPU"]
    assert "other makers' are not looked at" in without.says, "they may well be there"
    monkeypatch.setenv("UCX_TLS", "tcp")
    assert [one.says for one in findings(tmp_path) if one.topic == "UCX"] == [
        "chooses among what UCX_TLS=tcp leaves it"
    ]


@pytest.mark.parametrize("device", ["none", "closed"])
def test_rdma_that_this_process_cannot_open_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """A container lists the host's devices without them."""
    port = tmp_path / "sys/class/infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE")
    if device == "closed":
        (tmp_path / "dev/infiniband").mkdir(parents=True)
        (tmp_path / "dev/infiniband/uverbs0").write_text("")
        monkeypatch.setattr("vllm_pd_connector.cli.machine.os.access", lambda *_: False)  # root may open all files
    for key in ("UCX_TLS", "UCX_NET_DEVICES"):
        monkeypatch.delenv(key, raising=False)
    found = {one.topic: one for one in findings(tmp_path)}
    assert found["RDMA"].state == "bad" and "/dev/infiniband" in found["RDMA"].says
    assert "TCP, for mlx5_0:1" in found["UCX"].says
    monkeypatch.setenv("UCX_TLS", "tcp")  # who leaves it out misses nothing
    assert [one.state for one in findings(tmp_path) if one.topic == "RDMA"] == ["note"]


def device(root: Path, name: str, text: str, bridge: bool = False) -> None:
    file = root / "sys/class" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    if bridge:
        (file.parent / "bridge").mkdir()


@pytest.mark.libraries
def test_a_bridge_that_ucx_may_choose_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Docker gives it the same address on every host."""

    def network() -> tuple[str, str]:
        [found] = [one for one in findings(tmp_path) if one.topic == "network"]
        return found.state, found.says

    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    device(tmp_path, "net/eth0/operstate", "up")
    device(tmp_path, "net/virbr0/operstate", "down", bridge=True)
    assert network() == ("good", "eth0 (mtu )"), "nothing is reached by one that is down"
    device(tmp_path, "net/docker0/operstate", "up", bridge=True)
    state, says = network()
    assert state == "note" and "; docker0 is a bridge, " in says and "virbr0" not in says
    assert says.endswith("UCX may choose it; set UCX_NET_DEVICES=<interface of side_channel_host>")
    device(tmp_path, "net/cni0/operstate", "up", bridge=True)
    monkeypatch.setenv("UCX_NET_DEVICES", "all")
    assert "; cni0 and docker0 are bridges, " in network()[1]
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    assert network()[0] == "good"


@pytest.mark.libraries
@pytest.mark.parametrize(
    ("told", "missing"),
    [
        ("mlx5_0:1", ""),
        ("mlx5_0:1,eth0", ""),
        ("lo", ""),
        ("all", ""),
        ("^mlx5_9:1,eth9", ""),
        ("mlx5_[0-1]:1", ""),
        ("mlx5_7:1", "'mlx5_7:1' is not here"),
        ("mlx5_1:1", "'mlx5_1:1' is not here or not active"),
        ("mlx5_0", "'mlx5_0' is not here"),
        ("mlx5_0:1, eth0", "' eth0' is not here"),
        ("eth1,mlx5_7:1", "'eth1' and 'mlx5_7:1' are not here"),
        ("", "UCX_NET_DEVICES is set and empty: UCX takes no device then, and NIXL does not start; unset it"),
    ],
)
def test_a_device_that_ucx_is_told_and_does_not_find_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: str, missing: str
) -> None:
    """One name for all pods, which is another node's: NIXL then says NIXL_ERR_BACKEND."""
    device(tmp_path, "net/lo/operstate", "unknown")
    device(tmp_path, "net/eth0/operstate", "up")
    device(tmp_path, "net/eth1/operstate", "down")
    device(tmp_path, "infiniband/mlx5_0/ports/1/state", "4: ACTIVE")
    device(tmp_path, "infiniband/mlx5_1/ports/1/state", "1: DOWN")
    monkeypatch.setenv("UCX_NET_DEVICES", told)
    [found] = [one for one in findings(tmp_path) if one.topic == "UCX"]
    assert (found.state == "bad") == bool(missing) and missing in found.says
    assert not missing or found.says.endswith("There are eth0, lo, mlx5_0:1")


def nixl() -> Transport:
    return create("nixl", {"ucx": {"TLS": "tcp"}})


@pytest.mark.parametrize("make", [None, pytest.param(nixl, marks=pytest.mark.libraries)])
def test_an_instance_is_measured(capsys: pytest.CaptureFixture[str], make: Callable[[], Transport] | None) -> None:
    options = [] if make is None else ["--transport-options", '{"ucx": {"TLS": "tcp"}}']
    name = "nixl" if make else "loopback"
    with contextlib.closing(Writer(CONFIG, make=make)) as writer:
        place = f"tcp://127.0.0.1:{writer.server.port}"
        told = [msgspec.structs.replace(manifest, transport=name) for manifest in load(place, 5.0)]
        writer.server.set_manifests([msgspec.msgpack.encode(manifest) for manifest in told], writer.tokens)
        found = examined(capsys, Exit.OK, place, *options)
    assert "p-0 answered in" in found["side channel"]["says"]
    assert found["transport"]["says"].startswith(f"{name}, since p-0 has it; from here {name}")
    measured = [one for topic, one in found.items() if topic.startswith(f"{name}, pp")]
    assert len(measured) == len(writer.workers)
    assert all("GB/s, writes " in one["says"] and one["state"] == "good" for one in measured)


def test_one_without_memory_for_that_is_only_read_from(capsys: pytest.CaptureFixture[str]) -> None:
    with contextlib.closing(PrefillInstance()) as prefill:
        found = examined(capsys, Exit.OK, f"tcp://127.0.0.1:{prefill.server.port}/p-0")
    assert (
        found["loopback, pp0 tp0"]["state"] == "note"
        and "read from, not measured" in found["loopback, pp0 tp0"]["says"]
    )


def test_one_that_does_not_answer_a_read_is_bad(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_pd_connector.cli.doctor.SETTLE_S", 0.05)
    with contextlib.closing(PrefillInstance()) as prefill:
        prefill.transports[0].faults.frozen = True
        found = examined(capsys, Exit.REFUSED, f"tcp://127.0.0.1:{prefill.server.port}")
    assert found["peer"]["state"] == "bad" and "does not come in 0.05 s" in found["peer"]["says"]


def test_one_whose_measurement_does_not_end_is_bad(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A firewall that drops what moves, and lets the side channel through: what one calls the doctor for."""
    monkeypatch.setattr("vllm_pd_connector.cli.doctor.MEASURED_S", 0.2)
    with contextlib.closing(Writer(CONFIG)) as writer:
        for transport in writer.transports:
            transport.faults.frozen = True
        found = examined(capsys, Exit.REFUSED, f"tcp://127.0.0.1:{writer.server.port}")
    assert found["peer"]["state"] == "bad" and "do not end in 0.2 s" in found["peer"]["says"]


def test_what_cannot_be_asked_is_told_with_its_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    nobody = f"tcp://127.0.0.1:{free_port()}"
    for code, words in (
        (Exit.UNREACHABLE, [nobody, "--timeout", "0.5"]),
        (Exit.UNREADABLE, ["a-file"]),
        (Exit.UNREADABLE, [nobody, "--transport-options", "[]"]),
    ):
        assert examined(capsys, code, *words)["peer"]["state"] == "bad"
    with contextlib.closing(PrefillInstance()) as prefill:
        place = f"tcp://127.0.0.1:{prefill.server.port}"
        prefill.transports[0].close()
        assert "is gone" in examined(capsys, Exit.REFUSED, place)["peer"]["says"]


@pytest.mark.libraries
def test_it_says_which_way_ucx_took_to_the_instance_and_of_what(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a process of its own, as operators start it: UCX reads what it is to say when it is loaded."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    with contextlib.closing(PrefillInstance(make=lambda: create("nixl", {}), transport="nixl")) as prefill:
        command = [sys.executable, "-m", "vllm_pd_connector.cli", "doctor", f"tcp://127.0.0.1:{prefill.server.port}"]
        done = subprocess.run([*command, "--json"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    found = {one["topic"]: one["says"] for one in json.loads(done.stdout)["findings"]}
    assert (done.returncode, done.stderr) == (Exit.OK, "")
    assert "from here nixl UCX UCX_TLS=tcp" in found["transport"]
    assert found["nixl, ways"].startswith("UCX took ") and "tcp/lo" in found["nixl, ways"]
    assert found["nixl, ways"].endswith(" for a peer on this host")

"""The launcher, with a stand-in for `vllm` and the real router: what they start, wait for, report and end.

That they start real servers is shown by the end-to-end tests of two prefill and two decode instances.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from examples import launch_pd
from examples.launch import PortError, Server, Spec
from examples.roles import CPU_ENVIRONMENT
from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "examples" / "launch_pd.py"
LIMIT = 90.0

STAND_IN = '''\
"""Serves /health and /metrics as an instance does; ends at once if FAIL names its role, is never ready if SLOW does,
and goes on when it is told to end if STAYS is set."""
import http.server, json, os, signal, socket, subprocess, sys, time

words = sys.argv[1:]
def value(flag): return words[words.index(flag) + 1]
port, transfer = int(value("--port")), json.loads(value("--kv-transfer-config"))
extra = transfer["kv_connector_extra_config"]
print("loading", flush=True)
print("(EngineCore) Starting to load model m...", flush=True)
if os.environ.get("FAIL") == transfer["kv_role"]:
    sys.exit("no memory for the cache")
def told(*_):
    with socket.socket() as router:
        when = "before" if router.connect_ex(("127.0.0.1", int(os.environ["ROUTER"]))) == 0 else "after"
    print("told to end", when, "the router", flush=True)
    if "STAYS" not in os.environ:
        os._exit(0)
signal.signal(signal.SIGTERM, told)
# A worker: part of the process group, and not ended by the end of its parent.
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with open(os.environ["PIDS"], "a") as file:
    file.write(f"{worker.pid}\\n")
labels = {"engine": 0, "role": transfer["kv_role"], "mode": extra["mode"], "handoff": "serial",
          "transport": extra["transport"], "engine_id": f"e{port}", "side_channel_host": extra["side_channel_host"],
          "side_channel_port": extra["side_channel_port"], "tp_size": value("--tensor-parallel-size"),
          "pp_size": value("--pipeline-parallel-size"), "dcp_size": 1, "dp_size": 1}
text = "vllm:pd_instance_info{" + ",".join(f'{k}="{v}"' for k, v in labels.items()) + "} 1\\n"
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/end": os._exit(3)
        self.send_response(503 if transfer["kv_role"] in os.environ.get("SLOW", "") else 200)
        self.end_headers()
        self.wfile.write(text.encode() if self.path == "/metrics" else b"")
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''


def specs(*words: str) -> dict[str, Spec]:
    """What would be started, by name."""
    instances, router = launch_pd.specs_of(launch_pd.options_of(words))
    return {spec.name: spec for spec in (*instances, *router)}


def config(spec: Spec) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(after(spec, "--kv-transfer-config"))
    return found


def extra(spec: Spec) -> dict[str, Any]:
    found: dict[str, Any] = config(spec)["kv_connector_extra_config"]
    return found


def after(spec: Spec, flag: str) -> str:
    return spec.command[spec.command.index(flag) + 1]


def instances_of(router: Spec) -> list[str]:
    return [word.removeprefix("--instance=") for word in router.command if word.startswith("--instance=")]


def test_gpus_are_shared_out_and_ports_differ() -> None:
    found = specs("--prefills", "2", "--decodes", "2", "--prefill-tp", "2", "--decode-pp", "3", "--gpus",
                  ",".join(map(str, range(10))))  # fmt: skip
    engines = [found[name] for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
    assert list(found) == ["prefill-0", "prefill-1", "decode-0", "decode-1", "router"]
    assert [e.environment["CUDA_VISIBLE_DEVICES"] for e in engines] == ["0,1", "2,3", "4,5,6", "7,8,9"]
    ports = [after(e, "--port") for e in engines]
    assert ports == ["8100", "8101", "8200", "8201"] == [str(e.port) for e in engines]
    assert [extra(e)["side_channel_port"] for e in engines] == [5600, 5620, 5640, 5660]
    assert instances_of(found["router"]) == [f"http://127.0.0.1:{port}" for port in ports]


def test_each_side_has_its_own_sizes_layout_and_flags() -> None:
    found = specs("--gpus", "0,1", "--prefill-block-size", "64", "--decode-layout", "HND", "--mode", "push",
                  "--transport", "mooncake", "--extra", '"kv_lease_duration": 60', "--flags", "--max-model-len 2048",
                  "--decode-flags", "--no-enable-prefix-caching")  # fmt: skip
    prefill, decode = found["prefill-0"], found["decode-0"]
    assert after(prefill, "--block-size") == "64" and "--block-size" not in decode.command
    assert decode.environment["VLLM_KV_CACHE_LAYOUT"] == "HND" and "VLLM_KV_CACHE_LAYOUT" not in prefill.environment
    assert prefill.command[-2:] == ("--max-model-len", "2048")
    assert decode.command[-3:] == ("--max-model-len", "2048", "--no-enable-prefix-caching")
    expected = {"transport": "mooncake", "mode": "push", "side_channel_host": "127.0.0.1", "kv_lease_duration": 60}
    assert config(prefill)["kv_role"] == "kv_producer" and config(decode)["kv_role"] == "kv_consumer"
    for spec in (prefill, decode):
        assert expected.items() <= extra(spec).items()


def test_gpus_that_the_environment_leaves_are_shared_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,GPU-ab12,6")
    given = [spec.environment.get("CUDA_VISIBLE_DEVICES") for spec in specs("--decode-tp", "2").values()]
    assert given == ["4", "GPU-ab12,6", None]
    assert specs("--gpus", "0,1")["decode-0"].environment["CUDA_VISIBLE_DEVICES"] == "1"
    with pytest.raises(launch_pd.UsageError, match="CUDA_VISIBLE_DEVICES=4,GPU-ab12,6: 2 left for decode-0"):
        specs("--decode-tp", "3")


def test_each_engine_of_an_instance_has_gpus_and_a_side_channel() -> None:
    found = specs("--gpus", "0,1,2,3,4,5", "--decode-dp", "2", "--decode-tp", "2", "--prefill-dp", "2")
    prefill, decode = found["prefill-0"], found["decode-0"]
    assert [spec.environment["CUDA_VISIBLE_DEVICES"] for spec in (prefill, decode)] == ["0,1", "2,3,4,5"]
    assert [after(spec, "--data-parallel-size") for spec in (prefill, decode)] == ["2", "2"]
    assert prefill.also_listens == (5600, 5601)
    assert "--data-parallel-size" not in specs("--gpus", "0,1")["prefill-0"].command
    many = specs("--cpu", "--prefills", "2", "--prefill-dp", "21")
    ports = [many[name].also_listens for name in ("prefill-0", "prefill-1")]
    assert ports == [tuple(range(5600, 5621)), tuple(range(5621, 5642))]


@pytest.mark.parametrize(
    ("flags", "servers"),
    [("--shutdown-timeout 90", ["1"]), ("--shutdown-timeout=0", []), ("", []),
     ("--api-server-count 4 --shutdown_timeout 9", ["4"])],
)  # fmt: skip
def test_engines_that_let_requests_end_have_one_api_server(flags: str, servers: list[str]) -> None:
    words = specs("--cpu", "--decode-dp", "2", "--flags", flags)["decode-0"].command
    assert [words[at + 1] for at, word in enumerate(words) if word == "--api-server-count"] == servers


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        (("--decode-flags", "--data-parallel-size 8"), "--decode-flags has --data-parallel-size 8, .*--decode-dp 8 in"),
        (("--prefill-flags", "-dp=2"), "--prefill-flags has --data-parallel-size 2, .*give --prefill-dp 2"),
        (("--flags", "--tensor_parallel_size 4"), "give --prefill-tp 4 and --decode-tp 4"),
        (("--flags", "'"), "are no words of a command: No closing quotation"),
    ],
)
def test_a_size_is_not_hidden_in_flags(words: tuple[str, str], advice: str) -> None:
    with pytest.raises(launch_pd.UsageError, match=advice):
        specs("--gpus", "0,1", *words)


def test_the_router_waits_as_long_as_its_instances() -> None:
    flags = ("--prefill-flags", "--shutdown-timeout 125", "--decode-flags", "--shutdown-timeout 90")
    assert after(specs("--cpu", *flags)["router"], "--shutdown-timeout") == "125"
    assert "--shutdown-timeout" not in specs("--cpu")["router"].command


def test_instances_without_gpus_share_the_machine() -> None:
    spec = specs("--cpu")["prefill-0"]
    assert spec.environment == CPU_ENVIRONMENT
    assert {"--enforce-eager", "--dtype", "--kv-cache-memory-bytes"} <= set(spec.command)


def test_a_host_starts_its_part_only() -> None:
    decodes = specs("--only", "decode", "--gpus", "0,1", "--decodes", "2", "--host", "10.0.0.8")
    assert list(decodes) == ["decode-0", "decode-1"]
    assert [extra(spec)["side_channel_port"] for spec in decodes.values()] == [5600, 5620]
    urls = ["http://10.0.0.7:8100", "http://10.0.0.8:8200"]
    [router] = specs("--only", "router", *(word for url in urls for word in ("--instance", url))).values()
    assert instances_of(router) == urls


def test_an_address_of_ipv6_is_in_brackets() -> None:
    found = specs("--cpu", "--host", "fd00::7")
    assert instances_of(found["router"]) == ["http://[fd00::7]:8100", "http://[fd00::7]:8200"]
    assert extra(found["prefill-0"])["side_channel_host"] == "fd00::7"


@pytest.mark.parametrize(("mode", "channels"), [("pull", [1, 0]), ("push", [1, 1]), ("auto", [1, 1])])
def test_the_side_channels_that_are_listened_on_are_looked_at(mode: str, channels: list[int]) -> None:
    found = specs("--cpu", "--mode", mode)
    assert [len(found[name].also_listens) for name in ("prefill-0", "decode-0")] == channels


@pytest.mark.parametrize(
    "words",
    [
        *("--gpus 0", "--prefills 0 --cpu", "--nope 1", "--model", "--only both", "--only router", "--cpu --pre 1"),
        *("--cpu --instance http://h", "--cpu --extra [1]", "--cpu --port x"),
    ],
)
def test_wrong_usage_is_told_and_starts_nothing(words: str) -> None:
    done = subprocess.run([LAUNCHER, "--dry-run", *words.split()], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("launch: ") and not done.stdout


def test_a_port_is_not_given_out_twice() -> None:
    with pytest.raises(PortError, match="port 8200 is to be used twice, by prefill-1 and by decode-0"):
        specs("--cpu", "--prefills", "2", "--prefill-port", "8199", "--decode-port", "8200")
    with pytest.raises(PortError, match="port 8200 is to be used twice, by decode-0 and by router"):
        specs("--cpu", "--port", "8200")


def test_its_help_begins_with_how_it_is_used() -> None:
    done = subprocess.run([LAUNCHER, "--help"], capture_output=True, text=True, check=True)
    assert done.stdout.count("examples/launch_pd.py") >= 4


def test_nothing_starts_where_a_program_is_missing(tmp_path: Path) -> None:
    only = {"PATH": os.pathsep.join(["/usr/bin", "/bin"])}
    words = [sys.executable, LAUNCHER, "--cpu", "--only", "prefill", "--logs", tmp_path]
    done = subprocess.run(words, capture_output=True, text=True, env=only)
    assert done.returncode == 2 and "vllm is not on PATH" in done.stderr and not list(tmp_path.iterdir())


class Run:
    """The script with the stand-in, on free ports."""

    def __init__(self, directory: Path, *words: str, **environment: str):
        (directory / "vllm").write_text(f"#!{sys.executable}\n{STAND_IN}")
        (directory / "vllm").chmod(0o755)
        self.pids = directory / "pids"
        self.logs = directory / "logs"
        self.base = free_ports((0, 1, 10, 11, 20, 30, 50, 70, 90))
        path = os.pathsep.join([str(directory), str(Path(sys.executable).parent), os.environ["PATH"]])
        ports = {"--prefill-port": 0, "--decode-port": 10, "--port": 20, "--side-channel-port": 30}
        options = [word for name, at in ports.items() for word in (name, str(self.base + at))]
        self.process = subprocess.Popen(
            [LAUNCHER, "--cpu", "--model", "m", *options, "--logs", self.logs, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PATH": path, "PIDS": str(self.pids), "ROUTER": str(self.base + 20)} | environment,
        )

    def lines_until(self, text: str) -> str:
        """Output up to and with the first line that contains `text`."""
        assert self.process.stdout is not None
        seen = ""
        for line in self.process.stdout:
            seen += line
            if text in line:
                return seen
        raise AssertionError(f"{text!r} did not come:\n{seen}")

    def workers_that_live(self) -> list[int]:
        pids = [int(line) for line in self.pids.read_text().split()] if self.pids.exists() else []
        return [pid for pid in pids if is_alive(pid)]

    def expect_no_workers(self) -> None:
        """They were killed when the launcher ended; the kernel takes them down a moment later."""
        deadline = time.monotonic() + LIMIT
        while self.workers_that_live():
            assert time.monotonic() < deadline
            time.sleep(0.05)


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def runs() -> Iterator[list[Run]]:
    started: list[Run] = []
    yield started
    for run in started:
        run.process.send_signal(signal.SIGTERM)
        run.process.communicate(timeout=LIMIT)


def test_all_are_waited_for_and_ctrl_c_ends_them_and_their_workers(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "--prefills", "2", "--decodes", "2")
    runs.append(run)
    output = run.lines_until("ready")
    assert "(1 of 6; no estimate before its first start)" in output or "(3 of 6; no estimate" in output
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "router"):
        assert f"{name} serves at" in output
        assert (run.logs / f"{name}.log").exists()
    assert len(run.workers_that_live()) == 4
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(LIMIT) == 130
    run.expect_no_workers()


@pytest.mark.parametrize(("program", "status"), [("import time; time.sleep(600)", -signal.SIGKILL), ("exit(3)", 3)])
def test_servers_end_also_where_a_signal_has_come_while_their_state_was_asked_for(
    tmp_path: Path, program: str, status: int
) -> None:
    """Its handler raises, and Python keeps the lock that `Popen.poll` had taken just before."""
    process = subprocess.Popen([sys.executable, "-c", program], start_new_session=True)
    server = Server(Spec("one", (), 1), process, tmp_path / "log")
    process._waitpid_lock.acquire()  # type: ignore[attr-defined]
    try:
        if status > 0:
            until = time.monotonic() + LIMIT
            while server.status() is None and time.monotonic() < until:
                time.sleep(0.01)
        else:
            assert server.status() is None
        server.kill()
        assert server.status() == status
    finally:
        process._waitpid_lock.release()  # type: ignore[attr-defined]
    assert process.wait(LIMIT) == status


def test_the_router_ends_first_and_a_second_ctrl_c_waits_for_nobody(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "--flags", "--shutdown-timeout 600", STAYS="1")
    runs.append(run)
    run.lines_until("ready")
    run.process.send_signal(signal.SIGINT)
    run.process.send_signal(signal.SIGINT)  # the same keystroke
    run.lines_until("what has begun has 600 s to end")
    until = time.monotonic() + LIMIT
    while not all("told to end" in (run.logs / f"{name}.log").read_text() for name in ("prefill-0", "decode-0")):
        assert time.monotonic() < until
        time.sleep(0.05)
    assert all("told to end after the router" in log.read_text() for log in run.logs.glob("*-0.log"))
    time.sleep(1.1)
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(LIMIT) == 130
    run.expect_no_workers()


def test_a_process_that_ends_while_loading_is_reported_with_its_log(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "--decodes", "2", FAIL="kv_consumer")
    runs.append(run)
    output, _ = run.process.communicate(timeout=LIMIT)
    assert run.process.returncode == 1
    assert re.search(r"decode-[01] ended with status 1; its log", output) and "no memory for the cache" in output
    run.expect_no_workers()


def test_a_process_that_is_only_slow_is_not_said_to_have_ended(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "--timeout", "5", SLOW="kv_producer, kv_consumer")
    runs.append(run)
    output, _ = run.process.communicate(timeout=LIMIT)
    assert run.process.returncode == 1
    assert "prefill-0 did not answer /health in 5 s; its log" in output and "loading" in output
    assert "ended" not in output
    run.expect_no_workers()


def test_a_process_that_dies_later_ends_the_others(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path)
    runs.append(run)
    run.lines_until("ready")
    assert len(run.workers_that_live()) == 2
    with pytest.raises(ConnectionError):
        urllib.request.urlopen(f"http://127.0.0.1:{run.base}/end", timeout=LIMIT)
    output, _ = run.process.communicate(timeout=LIMIT)
    assert run.process.returncode == 1
    assert "prefill-0 ended with status 3; its log" in output and "loading" in output
    run.expect_no_workers()


@pytest.mark.parametrize("which", ["--port", "--prefill-port", "--decode-port", "--side-channel-port"])
def test_a_port_that_somebody_listens_on_is_refused_before_anything_starts(
    which: str, tmp_path: Path, runs: list[Run]
) -> None:
    """Servers of vLLM share a port without a word, so each would get some of the requests."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        run = Run(tmp_path, which, str(port))
        runs.append(run)
        output, _ = run.process.communicate(timeout=LIMIT)
    assert run.process.returncode == 2
    assert f"somebody listens on 127.0.0.1:{port} already" in output and "starting" not in output

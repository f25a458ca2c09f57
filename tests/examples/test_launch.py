"""The launch scripts, with a stand-in for `vllm` and the real router: what they start, wait for, report and end.

That they start real servers is shown by the end-to-end tests of two prefill and two decode instances.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted((ROOT / "examples").glob("*.sh"))
XPYD = ROOT / "examples" / "launch_xpyd.sh"
LIMIT = 90.0

STAND_IN = '''\
"""Serves /health and /metrics as an instance does; ends at once if FAIL names its role, is never ready if SLOW does."""
import http.server, json, os, subprocess, sys, time

words = sys.argv[1:]
def value(flag): return words[words.index(flag) + 1]
port, transfer = int(value("--port")), json.loads(value("--kv-transfer-config"))
extra = transfer["kv_connector_extra_config"]
print("loading", flush=True)
if os.environ.get("FAIL") == transfer["kv_role"]:
    sys.exit("no memory for the cache")
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
        self.send_response(503 if os.environ.get("SLOW") == transfer["kv_role"] else 200)
        self.end_headers()
        self.wfile.write(text.encode() if self.path == "/metrics" else b"")
    def log_message(self, *_): pass
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
'''


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    shellcheck = shutil.which("shellcheck") or str(Path(sys.executable).with_name("shellcheck"))
    found = subprocess.run([shellcheck, script], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_the_first_lines_say_how_a_script_is_used(script: Path) -> None:
    first, *comment = script.read_text().splitlines()[:8]
    assert first == "#!/usr/bin/env bash"
    assert sum(f"examples/{script.name}" in line for line in comment) >= 2


def commands(*words: str) -> dict[str, list[str]]:
    """The words of each command that would be started, by name."""
    done = subprocess.run([XPYD, "--dry-run", *words], capture_output=True, text=True, check=True)
    return {line.partition(":")[0]: shlex.split(line.partition(":")[2]) for line in done.stdout.splitlines()}


def config(command: list[str]) -> dict[str, object]:
    return json.loads(command[command.index("--kv-transfer-config") + 1])


def test_gpus_are_shared_out_and_ports_differ() -> None:
    found = commands("--prefills", "2", "--decodes", "2", "--prefill-tp", "2", "--decode-pp", "3", "--gpus",
                     ",".join(map(str, range(10))))  # fmt: skip
    engines = [found[name] for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
    assert list(found) == ["prefill-0", "prefill-1", "decode-0", "decode-1", "router"]
    assert [next(w for w in e if w.startswith("CUDA")) for e in engines] == [
        "CUDA_VISIBLE_DEVICES=" + gpus for gpus in ("0,1", "2,3", "4,5,6", "7,8,9")
    ]
    ports = [e[e.index("--port") + 1] for e in engines]
    assert ports == ["8100", "8101", "8200", "8201"]
    assert len({config(e)["kv_connector_extra_config"]["side_channel_port"] for e in engines}) == 4  # type: ignore[index]
    assert [word for word in found["router"] if word.startswith("http")] == [f"http://127.0.0.1:{p}" for p in ports]


def test_each_side_has_its_own_sizes_layout_and_flags() -> None:
    found = commands("--gpus", "0,1", "--prefill-block-size", "64", "--decode-layout", "HND", "--mode", "push",
                     "--transport", "mooncake", "--extra", '"kv_lease_duration": 60', "--flags", "--max-model-len 2048",
                     "--decode-flags", "--seed 1")  # fmt: skip
    prefill, decode = found["prefill-0"], found["decode-0"]
    assert prefill[prefill.index("--block-size") + 1] == "64" and "--block-size" not in decode
    assert "VLLM_KV_CACHE_LAYOUT=HND" in decode and "VLLM_KV_CACHE_LAYOUT=HND" not in prefill
    assert prefill[-2:] == ["--max-model-len", "2048"] and decode[-4:] == ["--max-model-len", "2048", "--seed", "1"]
    expected = {"transport": "mooncake", "mode": "push", "side_channel_host": "127.0.0.1", "kv_lease_duration": 60}
    assert config(prefill)["kv_role"] == "kv_producer" and config(decode)["kv_role"] == "kv_consumer"
    for command in (prefill, decode):
        extra = config(command)["kv_connector_extra_config"]
        assert {key: extra[key] for key in expected} == expected  # type: ignore[index]


def test_a_host_starts_its_part_only() -> None:
    assert list(commands("--only", "decode", "--gpus", "0,1", "--decodes", "2", "--host", "10.0.0.8")) == [
        "decode-0",
        "decode-1",
    ]
    urls = ["http://10.0.0.7:8100", "http://10.0.0.8:8200"]
    router = commands("--only", "router", *(word for url in urls for word in ("--instance", url)))
    assert [word for word in router["router"] if word.startswith("http")] == urls


@pytest.mark.parametrize(
    "words",
    ["--gpus 0", "--prefills 0 --cpu", "--nope 1", "--model", "--only both", "--only router", "--instance http://h"],
)
def test_wrong_usage_is_told_and_starts_nothing(words: str) -> None:
    done = subprocess.run([XPYD, "--dry-run", *words.split()], capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("launch: ") and not done.stdout


def _hear_ctrl_c() -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)


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
            [XPYD, "--cpu", "--model", "m", *options, "--logs", self.logs, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PATH": path, "PIDS": str(self.pids)} | environment,
            # A background job of a shell without job control ignores Ctrl-C, and bash cannot trap what it inherits so.
            preexec_fn=_hear_ctrl_c,
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
    for name in ("prefill-0", "prefill-1", "decode-0", "decode-1", "router"):
        assert f"{name} serves at" in output
        assert (run.logs / f"{name}.log").exists()
    assert len(run.workers_that_live()) == 4
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(LIMIT) == 130
    assert run.workers_that_live() == []


def test_a_process_that_ends_while_loading_is_reported_with_its_log(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "--decodes", "2", FAIL="kv_consumer")
    runs.append(run)
    output, _ = run.process.communicate(timeout=LIMIT)
    assert run.process.returncode == 1
    assert "ended; the last lines of" in output and "no memory for the cache" in output
    assert run.workers_that_live() == []


def test_a_process_that_is_only_slow_is_not_said_to_have_ended(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path, "--timeout", "1", SLOW="kv_consumer")
    runs.append(run)
    output, _ = run.process.communicate(timeout=LIMIT)
    assert run.process.returncode == 1
    assert "decode-0 is not ready after 1 s; the last lines of" in output and "loading" in output
    assert "ended" not in output
    assert run.workers_that_live() == []


def test_a_process_that_dies_later_ends_the_others(tmp_path: Path, runs: list[Run]) -> None:
    run = Run(tmp_path)
    runs.append(run)
    run.lines_until("ready")
    [first, _] = run.workers_that_live()
    os.killpg(os.getpgid(first), signal.SIGKILL)
    output, _ = run.process.communicate(timeout=LIMIT)
    assert run.process.returncode == 1
    assert "ended; the last lines of" in output and "loading" in output
    deadline = time.monotonic() + LIMIT
    while run.workers_that_live():
        assert time.monotonic() < deadline
        time.sleep(0.05)


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


def test_a_port_is_not_given_out_twice() -> None:
    words = ["--dry-run", "--gpus", "0,1,2", "--prefills", "2", "--prefill-port", "8199", "--decode-port", "8200"]
    done = subprocess.run([XPYD, *words], capture_output=True, text=True)
    assert done.returncode == 2 and "port 8200 is to be used twice" in done.stderr

"""`vllm-pd bench`: the words that vLLM's command gets, a table of whole measurements, one line for anything else."""

from __future__ import annotations

import contextlib
import http.server
import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.request import proxy_bypass_environment

import pytest

from examples.make_models import MODELS, make
from tests.support.ports import free_port
from tests.support.worker.decode_instance import until
from vllm_pd_connector.cli import main
from vllm_pd_connector.cli.load.bench import Measured
from vllm_pd_connector.cli.output import Exit

STAND_IN = """#!{python}
import json, os, sys, time
words = sys.argv[1:]
given = dict(zip(words, words[1:]))
with open({seen!r}, "a") as file:
    print(json.dumps(words), file=file)
if {act!r} == "ends":
    sys.exit("Traceback\\n\\nValueError: no tokenizer \\x1b[2J\\n")
if {act!r} == "hangs":
    time.sleep(60)
if {act!r} == "goes on":
    with open({seen!r}[:-4] + "pid", "w") as file:
        file.write(str(os.getpid()))
    time.sleep(600)
if {act!r} == "tells its proxies":
    with open({seen!r}[:-4] + "proxies", "w") as file:
        json.dump({{name: os.environ.get(name) for name in ("http_proxy", "no_proxy", "NO_PROXY")}}, file)
if {act!r} == "tells its key":
    with open({seen!r}[:-4] + "key", "w") as file:
        file.write(os.environ["OPENAI_API_KEY"])
slow = 2 if given["--base-url"].endswith("slow") else 1
figures = {{key: 8.0 * slow for key in {keys!r}}}
answered = int(given["--num-prompts"]) - {lost}
figures |= {{"completed": answered, "failed": {lost}, "latencies": [1.0]}}
figures["total_output_tokens"] = answered * int(given["--random-output-len"]) - ({act!r} == "breaks off")
if {act!r} == "forgets":
    del figures["p90_ttft_ms"]
if {act!r} != "keeps nothing":
    with open(given["--result-dir"] + "/" + given["--result-filename"], "w") as file:
        json.dump(figures, file)
"""


class Stand:
    """An executable that takes `vllm bench serve`'s words."""

    def __init__(self, directory: Path):
        self.path, self.seen = directory / "vllm-stand-in", directory / "seen"

    def does(self, act: str = "", lost: int = 0) -> str:
        keys = [key for key in Measured.__struct_fields__ if key.endswith(("_ms", "_throughput", "duration"))]
        self.path.write_text(STAND_IN.format(python=sys.executable, seen=str(self.seen), act=act, lost=lost, keys=keys))
        self.path.chmod(0o755)
        return str(self.path)

    def words(self) -> list[list[str]]:
        return [json.loads(line) for line in self.seen.read_text().splitlines()]


@pytest.fixture
def stand(tmp_path: Path) -> Stand:
    return Stand(tmp_path)


class Naming(http.server.BaseHTTPRequestHandler):
    """Names a model, below any path but /odd."""

    def do_GET(self) -> None:
        self.send_response(200 if self.path.endswith("/v1/models") and "odd" not in self.path else 404)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        model = {"id": "gqa", "root": str(make(MODELS["gqa"]))}
        self.wfile.write(json.dumps({"data": [model]}).encode())

    def log_message(self, format: str, *args: object) -> None:
        pass


class Serving(Naming):
    """Answers completions, too, in four events."""

    ends: tuple[dict[str, object], ...] = ({"choices": [], "usage": {"completion_tokens": 4}},)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        asked = self.path == "/v1/completions"
        self.send_response(200 if asked else 404)
        self.end_headers()
        if asked:
            events = [*[{"choices": [{"text": "a"}]}] * 4, *self.ends]
            self.wfile.write("".join(f"data: {json.dumps(event)}\n\n" for event in events).encode())
            self.wfile.write(b"data: [DONE]\n\n")


@pytest.fixture(scope="module", autouse=True)
def model() -> None:
    """It may have to be built, for longer than the command waits for an answer."""
    make(MODELS["gqa"])


@contextlib.contextmanager
def serving(handler: type[http.server.BaseHTTPRequestHandler]) -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(Naming) as where:
        yield where


def test_two_set_ups_get_the_same_load_and_are_compared(
    stand: Stand, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--command", stand.does(), "--requests", "7", "--rate", "2", "--at-once", "3"]
    assert main(["bench", f"plain={url}", f"pd={url}/slow", *words]) == Exit.OK
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split() == ["plain", "pd", "pd", "/", "plain"]
    assert all(row.split()[-3:] == ["8", "16", "2.00"] for row in rows) and len(rows) == 14
    first, second = stand.words()
    assert first[:2] == ["bench", "serve"] and first[first.index("--base-url") + 1] == url
    given = dict(itertools.pairwise(first))
    assert (given["--num-prompts"], given["--request-rate"], given["--max-concurrency"]) == ("7", "2.0", "3")
    where = {first.index("--base-url") + 1, first.index("--result-dir") + 1}
    assert [one for i, one in enumerate(first) if i not in where] == [
        one for i, one in enumerate(second) if i not in where
    ], "prompts, seed and pace alike"


class Keyed(Naming):
    """Names its model to who has the key."""

    def do_GET(self) -> None:
        if self.headers["Authorization"] == "Bearer sesame":
            super().do_GET()
        else:
            self.send_error(401)


def test_servers_with_a_key_get_it(
    stand: Stand, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(Keyed) as where:
        assert main(["bench", where, "--command", stand.does()]) == Exit.UNREACHABLE
        assert "HTTP 401; set VLLM_API_KEY" in capsys.readouterr().err
        monkeypatch.setenv("VLLM_API_KEY", "sesame")
        assert main(["bench", where, "--command", stand.does("tells its key")]) == Exit.OK
    [words] = stand.words()
    given = dict(itertools.pairwise(words))
    assert given["--served-model-name"] == "gqa" and Path(given["--model"]).is_dir()
    assert (stand.path.parent / "key").read_text() == "sesame" and "sesame" not in words


DIRECT = "example.org,127.0.0.1"


def test_a_load_goes_straight_to_the_set_up(stand: Stand, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's command asks the environment for a proxy, of which the figures would be."""
    monkeypatch.setenv("http_proxy", "http://203.0.113.9:3128")  # by way of which a tokenizer may come
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "example.org")
    assert main(["bench", url, "--command", stand.does("tells its proxies")]) == Exit.OK
    seen = json.loads((stand.path.parent / "proxies").read_text())
    assert seen == {"http_proxy": "http://203.0.113.9:3128", **dict.fromkeys(("no_proxy", "NO_PROXY"), DIRECT)}
    assert proxy_bypass_environment("127.0.0.1", {"no": DIRECT}), "as the command's HTTP client asks"


def test_what_sends_the_load_ends_with_the_command(stand: Stand, url: str) -> None:
    words = ["-m", "vllm_pd_connector.cli", "bench", url, "--command", stand.does("goes on")]
    command = subprocess.Popen([sys.executable, *words], cwd=Path(__file__).parents[3])
    pid = stand.path.parent / "pid"
    until(lambda: pid.exists() and bool(pid.read_text()), "the load")
    sends = int(pid.read_text())
    command.terminate()
    assert command.wait(60) == 128 + signal.SIGTERM
    until(lambda: not Path(f"/proc/{sends}").exists(), "its end")


def test_a_server_without_a_model_is_told(stand: Stand, capsys: pytest.CaptureFixture[str]) -> None:
    class Empty(Naming):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": []}')

    with serving(Empty) as where:
        assert main(["bench", where, "--command", stand.does()]) == Exit.UNREACHABLE
    assert "no model is named there" in capsys.readouterr().err


def test_each_run_has_other_prompts_unless_a_seed_is_given(
    stand: Stand, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for words in ([], [], ["--seed", "5"]):
        assert main(["bench", url, "--json", "--command", stand.does(), *words]) == Exit.OK
    first, second, third = (words[words.index("--seed") + 1] for words in stand.words())
    assert first != second and third == "5"
    text = capsys.readouterr().out
    answer = json.loads(text[text.rindex('{\n "schema"') :])
    assert (answer["schema"], answer["command"], answer["load"]["seed"]) == (1, "bench", 5)
    [row] = answer["setups"]
    assert row["url"] == url and row["completed"] == 100 and row["p99_ttft_ms"] == 8.0


@pytest.mark.parametrize(
    ("act", "lost", "code", "says"),
    [
        ("ends", 0, Exit.REFUSED, "vllm bench serve ended with status 1: ValueError: no tokenizer ?[2J"),
        ("", 2, Exit.REFUSED, "98 of 100 requests were answered, so nothing is compared"),
        ("breaks off", 0, Exit.REFUSED, "9999 of 10000 tokens were answered: answers broke off"),
        ("forgets", 0, Exit.UNREADABLE, "left a result without what is measured: Object missing required field"),
        ("keeps nothing", 0, Exit.UNREADABLE, "left no result: No such file or directory"),
        ("hangs", 0, Exit.LATE, "is not measured after 0.5 s"),
    ],
)
def test_what_is_no_whole_measurement_is_one_line(
    stand: Stand, url: str, capsys: pytest.CaptureFixture[str], act: str, lost: int, code: Exit, says: str
) -> None:
    assert (
        main(["bench", url, "--command", stand.does(act, lost), "--timeout", "0.5" if act == "hangs" else "60"]) == code
    )
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1
    assert err.startswith(f"vllm-pd bench: {url}: " if code != Exit.LATE else "vllm-pd bench: ") and says in err


def test_nothing_is_sent_where_a_set_up_does_not_answer(
    stand: Stand, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    for other, says in ((nobody, "Connection refused"), (f"{url}/odd", "HTTP 404")):
        assert main(["bench", url, other, "--json", "--command", stand.does()]) == Exit.UNREACHABLE
        error = json.loads(capsys.readouterr().out)["error"]
        assert error["kind"] == "unreachable" and error["message"].startswith(other) and says in error["message"]
    assert not stand.seen.exists()


def test_a_machine_without_vllm_is_told(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", url, "--command", "no-such-vllm"]) == Exit.UNREADABLE
    assert "no-such-vllm is not installed here" in capsys.readouterr().err


def test_wrong_words_are_refused_before_anything_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["a=http://x", "a=http://y"], ["a=x"], ["http://x", "--requests", "0"]):
        assert main(["bench", *words]) == Exit.USAGE
        assert len(capsys.readouterr().err.splitlines()) == 1


@pytest.mark.libraries
def test_vllms_own_command_takes_the_words_and_leaves_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Serving) as url:
        words = ["--requests", "3", "--prompt-tokens", "20", "--answer-tokens", "4", "--at-once", "2", "--rate", "50"]
        assert main(["bench", url, *words, "--json"]) == Exit.OK, capsys.readouterr()
        [row] = json.loads(capsys.readouterr().out)["setups"]
    assert (row["completed"], row["failed"]) == (3, 0)
    assert 0 < row["p50_ttft_ms"] <= row["p99_ttft_ms"] <= row["p99_e2el_ms"] and row["output_throughput"] > 0


class BreakingOff(Serving):
    """As a router does whose decode instance ends within an answer."""

    ends = ({"error": {"message": "the decode instance has gone", "code": 502}},)


@pytest.mark.libraries
def test_answers_that_break_off_are_no_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(BreakingOff) as url:
        words = ["--requests", "3", "--prompt-tokens", "20", "--answer-tokens", "40", "--at-once", "2"]
        assert main(["bench", url, *words]) == Exit.REFUSED
    out, err = capsys.readouterr()
    assert out == "" and "of 120 tokens were answered: answers broke off" in err

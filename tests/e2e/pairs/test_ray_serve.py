"""Ray Serve LLM's own P/D application with the backend: streams, and the loss of a replica.

A real Ray on this machine, which books a tenth of a CPU for each replica.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import urllib.error
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from examples.launch import Server, Spec
from examples.make_models import MODELS, make
from tests.support.ports import free_port
from tests.support.servers import digests
from tests.support.servers.cluster import until
from tests.support.servers.engine import Request, generate
from tests.support.servers.pairs import ROOT, Pairs
from tests.support.servers.workload import OUTPUT_TOKENS, Prompt, Refused, Stream, completion, prompts
from vllm_pd_connector.sidechannel.net.keys import create_keys

FAMILY = "gqa"
LENGTHS = (2, 33, 200, 700, 1500)
ROUNDS = {name: prompts(f"ray {name}", LENGTHS) for name in ("at first", "replaced")}
START_S = 330.0
"""Each replica is an API server, an engine and a worker, and all of them import at once."""

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]


@pytest.fixture(scope="module")
def plain() -> dict[Prompt, tuple[int, ...]]:
    """What one engine without P/D answers, one prompt at a time."""
    asked = [prompt for prompts_of_round in ROUNDS.values() for prompt in prompts_of_round]
    answers = generate(FAMILY, [[Request(prompt, OUTPUT_TOKENS)] for prompt in asked])
    return {prompt: answer.tokens for prompt, [answer] in zip(asked, answers, strict=True)}


@dataclass(frozen=True, slots=True)
class Application:
    server: Server
    digest_dir: Path
    plain: dict[Prompt, tuple[int, ...]]

    def replicas(self, side: str) -> set[int]:
        """Processes of "Prefill" or "Decode" replicas; Ray names them after their deployment."""
        return {pid for pid, words in _descendants(self.server.process.pid) if f"ServeReplica:default:{side}:" in words}

    def stream(self, prompt: Prompt) -> tuple[int, ...]:
        with Stream(self.server.url, completion(FAMILY, prompt)) as stream:
            return stream.tokens()

    def check(self, name: str) -> None:
        """Every prompt of a round but its first is answered as without P/D, and the cache of each was handed over."""
        for prompt in ROUNDS[name][1:]:
            assert self.stream(prompt) == self.plain[prompt], f"{name}: prompt of {len(prompt)} tokens"
        until(lambda: len(digests.received(digests.load(self.digest_dir))) >= len(LENGTHS) - 1, "all were handed over")
        assert not digests.differences(digests.load(self.digest_dir), MODELS[FAMILY].window_of)
        self.forget_digests()

    def forget_digests(self) -> None:
        for record in digests.load(self.digest_dir):
            record.path.unlink()

    def answers(self, prompt: Prompt) -> bool:
        """Whether a request succeeds; one that does has the right tokens."""
        try:
            tokens = self.stream(prompt)
        except (Refused, urllib.error.URLError, OSError, KeyError):  # KeyError: an event that tells of an error
            return False
        assert tokens == self.plain[prompt][: len(tokens)]
        return len(tokens) == OUTPUT_TOKENS


def _descendants(root: int) -> Iterator[tuple[int, str]]:
    """Process ids and command lines."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    for pid in parents:
        above: int | None = pid
        while above and above != root:
            above = parents.get(above)
        if above:
            try:
                yield pid, Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
            except OSError:
                continue


@pytest.fixture
def application(
    request: pytest.FixtureRequest, pairs: Pairs, plain: dict[Prompt, tuple[int, ...]], tmp_path: Path
) -> Iterator[Application]:
    """The application in a mode: pull with keys, push without, which is where both legs run at once."""
    extra: dict[str, object] = {"digest_dir": str(tmp_path / "digests")}
    (tmp_path / "digests").mkdir()
    words = ["--cpu", "--mode", request.param]
    # Ray's node has an address that other hosts reach.
    if request.param == "pull":
        create_keys(tmp_path / "keys", "pd")
        words += ["--keys", str(tmp_path / "keys")]
    else:
        extra["allow_unauthenticated_peers"] = True
    # The paths of Ray's sockets must be short.
    scratch = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    port = free_port()
    words += ["--model", str(make(MODELS[FAMILY])), "--port", str(port), "--extra", json.dumps(extra)]
    spec = Spec(
        f"ray-{request.param}",
        (sys.executable, str(ROOT / "examples" / "ray_serve.py"), *words),
        port,
        {"RAY_TMPDIR": str(scratch), "RAY_memory_monitor_refresh_ms": "0", "PD_TEST_POLITE": "1"},
        health="/v1/models",
    )
    try:
        # The ingress answers before the replicas have loaded.
        [server] = pairs.servers.start(spec, timeout=START_S)
        until(lambda: "ready at" in server.log.read_text(), "all replicas serve", START_S)
        yield Application(server, tmp_path / "digests", plain)
        pairs.servers.stop(server)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


@pytest.mark.parametrize("application", ["push"], indirect=True)
def test_both_legs_at_once_give_the_answers_of_one_engine(application: Application) -> None:
    application.check("at first")


@pytest.mark.parametrize("application", ["pull"], indirect=True)
def test_a_replica_that_is_lost_is_replaced_and_answers_stay_right(application: Application) -> None:
    application.check("at first")
    [lost] = application.replicas("Prefill")
    os.kill(lost, signal.SIGKILL)
    until(lambda: application.answers(ROUNDS["replaced"][0]), "another prefill replica takes requests", START_S)
    [replica] = application.replicas("Prefill")
    assert replica != lost
    application.forget_digests()
    application.check("replaced")

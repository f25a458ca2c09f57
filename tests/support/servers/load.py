"""Clients of a router that ask all the time, and what became of each of their requests; and vLLM's own router."""

from __future__ import annotations

import sys
import threading
import time
import urllib.error
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from examples.launch import Server, Spec
from tests.support.ports import free_port
from tests.support.servers.cluster import Baselines
from tests.support.servers.excuses import Sent
from tests.support.servers.workload import Prompt, Refused, ask, completion


@dataclass(slots=True)
class Load:
    """Clients that send prompts in turn, `at_once` at a time.

    Each waits `pause` seconds between two requests: on few processors a load without one leaves little to an instance
    that starts meanwhile.
    """

    url: str
    family: str
    baselines: Baselines
    prompts: Sequence[Prompt]
    at_once: int = 8
    pause: float = 0.0
    sent: list[Sent] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def run(self, enough: Callable[[], bool]) -> None:
        """Send until `enough` says so."""
        with ThreadPoolExecutor(self.at_once) as pool:
            for client in [pool.submit(self._client, number, enough) for number in range(self.at_once)]:
                client.result()

    def _client(self, number: int, enough: Callable[[], bool]) -> None:
        turn = number
        while not enough():
            prompt = self.prompts[turn % len(self.prompts)]
            turn += self.at_once - 1  # so that clients do not all send the same prompts again
            outcome = self._send(prompt)
            with self._lock:
                self.sent.append(outcome)
            time.sleep(self.pause)

    def _send(self, prompt: Prompt) -> Sent:
        request_id, started, status, right = uuid.uuid4().hex, time.monotonic(), 200, False
        try:
            answer = ask(self.url, completion(self.family, prompt), request_id=request_id)
            right = answer.tokens == self.baselines.tokens(self.family, prompt)
        except Refused as error:
            status = error.status
        except (urllib.error.URLError, ConnectionError):
            status = 0
        return Sent(request_id, started, time.monotonic(), status, right)

    @property
    def answered(self) -> list[Sent]:
        return [one for one in self.sent if one.status == 200]


def vllm_router_spec(name: str, prefills: Sequence[Server], decodes: Sequence[Server]) -> Spec:
    """vLLM's router over instances that run already."""
    port = free_port()
    command = [str(Path(sys.executable).with_name("vllm-router")), "--vllm-pd-disaggregation", "--kv-connector", "nixl"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    command += ["--policy", "round_robin", "--worker-startup-check-interval", "1"]
    for kind, servers in (("--prefill", prefills), ("--decode", decodes)):
        command += [word for server in servers for word in (kind, server.url)]
    return Spec(name, tuple(command), port)

"""Prompts, requests and answers: what the end-to-end tests send and what they compare.

Prompts are lists of token ids drawn from a generator seeded by the scenario's name, so scenarios never share a prefix
by accident and a prompt's right answer can be computed once. Answers are compared as token ids.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from examples.launch import Server, post

Prompt = tuple[int, ...]

OUTPUT_TOKENS = 16
AT_ONCE_S = 4.0
"""What "at once" may take on two cores that several processes share: less than any time-out, and than the 5 s after
which a prefill instance says how far a push is."""
LOGPROBS = {"logprobs": 5, "return_tokens_as_token_ids": True}
"""Fields with which a completion tells the log-probabilities of the five best tokens of each step."""
LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 48, 63, 64, 65, 100, 127, 128, 129, 255, 300, 511, 640, 1000, 1500, 1900)
"""Around the block sizes and the window of the models, and up to what the context holds."""
REPEATED = (1, 2, 15, 33, 64, 100, 127, 128, 129, 130, 200, 255, 256, 257, 258, 300, 384, 400, 513, 600)
"""Asked again and again, so that every block of a small cache is used many times."""


def prompts(scenario: str, lengths: Iterable[int]) -> list[Prompt]:
    """One prompt per length, the same on every call and different for every scenario."""
    generator = random.Random(scenario)
    return [tuple(generator.randrange(256) for _ in range(length)) for length in lengths]


SCENARIOS: dict[str, list[Prompt]] = {
    scenario: prompts(scenario, lengths)
    for scenario, lengths in {
        "serial": LENGTHS,
        "concurrent": (1, 20, 40, 64, 90, 128, 160, 200, 256, 300, 400, 513, 700, 900, 1200, 1900),
        "streamed": (40, 700),
        "moved": (2, 33, 200, 1900),
        "cold": (100, 700),
        "partly on the decode side": (130, 700, 1900),
        "all on the decode side": (64, 130, 1500),
        "partly on the prefill side": (130, 700, 1900),
        # Lengths far enough apart to tell the requests by them, and no part that is asked for before ends where a block
        # does: with a window, vLLM finds one block less then (seen with one engine, 832 tokens of 864).
        "hits of every length": range(153, 953, 40),
        # Good requests beside or after bad ones: the servers must still answer them right.
        "beside abandoned": (33, 500, 1100, 1900),
        "after abandoned": (60, 350),
        "bad input": (150, 350),
        "again and again": REPEATED,
        "orders": (400, 1900),
        "idle": (700,),
    }.items()
}

SCENARIOS["received in part"] = prompts("received in part", range(150, 450, 30))
SCENARIOS["beginning alike"] = [
    (*one[: len(one) // 32 * 32], *other)
    for one, other in zip(SCENARIOS["received in part"], prompts("beginning alike", [40] * 10), strict=True)
]


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished completion; `logprobs` has the best tokens' log-probabilities per step, if they were asked for."""

    tokens: tuple[int, ...]
    kv_transfer_params: dict[str, Any] | None = None
    logprobs: tuple[Mapping[int, float], ...] = ()


class Refused(Exception):
    """A request answered with an HTTP error."""

    def __init__(self, status: int, body: str):
        super().__init__(f"HTTP {status}: {body[:2000]}")
        self.status = status
        self.body = body


def by_length(scenario: str, length: int) -> Prompt:
    """The one prompt of this length in a scenario."""
    [prompt] = [prompt for prompt in SCENARIOS[scenario] if len(prompt) == length]
    return prompt


def completion(model: str, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
    """The body of a greedy completion that runs to its full length."""
    return {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
        **fields,
    }


def ask(url: str, body: Mapping[str, Any], *, request_id: str | None = None, timeout: float = 120.0) -> Answer:
    """Send a completion and wait for its answer.

    Raises:
        Refused: any other status than 200.
    """
    [answer] = ask_for_choices(url, body, request_id=request_id, timeout=timeout)
    return answer


def ask_for_choices(
    url: str, body: Mapping[str, Any], *, request_id: str | None = None, timeout: float = 120.0
) -> list[Answer]:
    """The same for one with `n` > 1."""
    headers = {"X-Request-Id": request_id} if request_id else {}
    try:
        answer = post(f"{url}/v1/completions", body, headers=headers, timeout=timeout)
    except urllib.error.HTTPError as error:
        with error:
            raise Refused(error.code, error.read().decode(errors="replace")) from None
    return [_answer(choice, answer.get("kv_transfer_params")) for choice in answer["choices"]]


def _answer(choice: Mapping[str, Any], params: dict[str, Any] | None) -> Answer:
    steps = (choice.get("logprobs") or {}).get("top_logprobs") or ()
    return Answer(
        tuple(choice["token_ids"]),
        params,
        tuple({int(name.removeprefix("token_id:")): value for name, value in step.items()} for step in steps),
    )


def ask_many(url: str, bodies: Sequence[Mapping[str, Any]], at_once: int) -> list[Answer]:
    """Answers in the order of the bodies, `at_once` requests in flight."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda body: ask(url, body), bodies))


def forgets(server: Server) -> bool:
    """Empty an instance's prefix cache; whether it did: vLLM refuses while blocks are held."""
    return bool(post(f"{server.url}/reset_prefix_cache", {}, timeout=30)["success"])


VERIFIED = "pd_verified_receives_total"
"""See `series`: receives whose sums equalled the prefill side's, over ranks."""


def series(server: Server, name: str, labels: str = "") -> float:
    """What an instance's metrics page says of `vllm:name`, over all rows that have such labels."""
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
        page = answer.read().decode()
    rows = re.findall(rf"^vllm:{name}\{{[^}}]*{labels}[^}}]*\}} (\S+)$", page, re.MULTILINE)
    return sum(map(float, rows))


class Stream:
    """A streamed completion that the client can leave at any point; leaving the context closes the connection."""

    def __init__(self, url: str, body: Mapping[str, Any], timeout: float = 120.0):
        address = urllib.parse.urlsplit(url)
        self._connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=timeout)
        headers = {"Content-Type": "application/json"}
        self._connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
        self._response: http.client.HTTPResponse | None = None

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        if self._response is not None:
            self._response.close()
        self._connection.close()

    def events(self) -> Iterator[dict[str, Any]]:
        """Decoded events as they come, without the closing mark.

        Raises:
            Refused: any other status than 200.
        """
        if self._response is None:
            self._response = self._connection.getresponse()
            if self._response.status != 200:
                raise Refused(self._response.status, self._response.read().decode(errors="replace"))
        for line in self._response:
            text = line.decode().strip()
            if text == "data: [DONE]":
                return
            if text.startswith("data: "):
                yield json.loads(text.removeprefix("data: "))

    def tokens(self) -> tuple[int, ...]:
        """All token ids up to the end of the stream."""
        return tuple(
            token for event in self.events() for choice in event["choices"] for token in choice.get("token_ids") or ()
        )

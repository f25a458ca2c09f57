"""How much of a slow transfer a push hides behind the prefill.

A prompt of at least eight prefill steps goes twice through the same prefill instance, which keeps no prefixes, to two
decode instances: one reads when the prefill has finished, one is written into while it computes. The link is slowed to
where moving the whole prompt takes about as long as computing it beside that took the latest prompts before it: a
machine that others share computes twice as fast from one minute to the next. The time is from the end of the prefill
(its answer) to the decode instance's first token. Both must give the same tokens, or the benchmark fails: bytes that
arrived wrong, or too late, are no gain. After what is timed, one prompt is pushed again and verified: the two sides
compare sums of all that was written, and the benchmark fails unless they did.

With `--one-step` the prompt takes a single step, and pushes are written layer by layer (`push_when`), of two models: 16
layers of attention, and 40 layers of which ten are attention and the others have states. What is exposed is the time
from the end of the prefill to the first token, less that of a prompt of one token, for which the decode instance
computes one, as it does behind a push; as a part of the same time of a pull, which exposes the whole transfer. What the
decode leg needs to come there (its own server, its engine, the question) is exposed, too: the transfer takes as long as
the step and cannot begin before.

Everything runs in a network namespace of its own (`unshare --net`), whose only link is slowed by `tc` (a token bucket);
NIXL is confined to TCP, so no bytes pass beside it. Needs root or the right to make namespaces.

    python benchmarks/overlap.py [--one-step] [--requests N] [--into out/bench/overlap.json]
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
import uuid
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT))

from pull import OUTPUT_TOKENS, body, event_times, events  # noqa: E402

from benchmarks.report import write  # noqa: E402
from examples.launch import Server, Servers, post, vllm_spec  # noqa: E402
from examples.make_models import DEEP, DEEP_HYBRID, MODELS, make  # noqa: E402
from vllm_pd_connector.worker.checksums import ONE_IN  # noqa: E402

PROMPT_TOKENS = 1920
STEP_TOKENS = 192
GOAL = 0.4
EXPOSED_GOAL = 0.15
INSIDE = "PD_OVERLAP_INSIDE"
SENT_AHEAD = Path("/proc/sys/net/ipv4/tcp_limit_output_bytes")
"""Of a network namespace: bytes that a connection may have in the link's queue. With the kernel's 4 MB the answer of a
prefill waits there behind what is written, and the end of the prefill is seen as much too late."""
AHEAD_S, AHEAD_BYTES = 0.01, 131072
"""That many seconds of the link, but two of its packets at least: with less the link idles between them."""
KNOWN = {**MODELS, DEEP.name: DEEP, DEEP_HYBRID.name: DEEP_HYBRID}
LATEST = 3
"""Of so many prefills before it the link of a prompt takes the median."""
COUNTED_S = 10.0
"""Within which a server has counted what its last request moved."""


@dataclass(frozen=True, slots=True)
class Result:
    """Medians and worst values in milliseconds over `requests`; `ratio` is of the medians of push and pull. `prefill`
    is that beside a push, `transfer` what the bytes take over the link at its rate. `local` is the first token's of a
    prompt of one token, `exposed` what a push adds to it, as a part of what the pull of the same prompt adds: of the
    whole transfer, as it is measured. `unmatched` is by how much that took longer than the prefill, as the same part:
    it counts as `exposed`, too, though it had nothing to hide behind. `compared` is what was found equal: the tokens
    of every request, the bytes of one push."""

    model: str
    compared: str
    requests: int
    prefill: float
    transfer: float
    link_mbit: float
    prompt_bytes: int
    pull: float
    pull_worst: float
    push: float
    push_worst: float
    ratio: float
    local: float
    exposed: float
    unmatched: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a decode instance: seconds from the end of the prefill to the first token, all tokens, and the seconds of a
    prefill beside which the caches were written."""

    seconds: float
    tokens: tuple[int, ...]
    prefill: float = 0.0


def enter_namespace() -> None:
    """Start this program again in a network namespace, whose loopback is its only link."""
    command = ["unshare", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "bash", sys.executable, *sys.argv]
    sys.exit(subprocess.run(command, env={**os.environ, INSIDE: "1"}, check=False).returncode)


def slow_down(mbit: float | None) -> None:
    """Limit the namespace's link, or lift the limit."""
    subprocess.run(["tc", "qdisc", "del", "dev", "lo", "root"], check=False, capture_output=True)
    if mbit is not None:
        # The bucket holds a few packets of loopback's size, the queue what TCP sends ahead.
        limits = ["rate", f"{mbit:.3f}mbit", "burst", "192kb", "limit", "4mb"]
        subprocess.run(["tc", "qdisc", "add", "dev", "lo", "root", "tbf", *limits], check=True)


def specs(model: str, step_tokens: int, push_when: str) -> list[Any]:
    """One prefill instance, which serves both ways, and a decode instance of each."""

    def spec(name: str, role: str, mode: str, *flags: str) -> Any:
        extra = {
            "mode": mode,
            "transport_options": {"ucx": {"TLS": "tcp", "NET_DEVICES": "lo"}},
            "push_when": push_when,
            "verify": "off" if mode == "pull" else "sample",
        }
        transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
        known = KNOWN[model]
        flags = (*known.flags, "--no-enable-prefix-caching", *flags)
        return vllm_spec(name, make(known), flags=flags, transfer=transfer, environment=known.environment)

    return [
        spec("overlap-prefill", "kv_producer", "push", "--max-num-batched-tokens", str(step_tokens)),
        spec("overlap-pull", "kv_consumer", "pull"),
        spec("overlap-push", "kv_consumer", "push"),
    ]


def counted(server: Server, name: str) -> int:
    """What a server has counted under this name, once it counted anything; 0 if it has not in COUNTED_S."""
    until = time.monotonic() + COUNTED_S
    while True:
        with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        found = sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{name}{{"))
        if found or time.monotonic() > until:
            return int(found)
        time.sleep(0.1)


def named(verified: bool = False) -> str:
    """A new name for a push that is written while its prefill runs, of which the decode instance compares sums or not:
    with `verify` "sample" it goes by the name (`is_chosen`)."""
    while True:
        name = uuid.uuid4().hex
        if (zlib.crc32(name.encode()) % ONE_IN == 0) == verified:
            return name


def prompts(count: int, seed: int) -> list[list[int]]:
    generator = random.Random(seed)
    return [[generator.randrange(256) for _ in range(PROMPT_TOKENS)] for _ in range(count)]


def tokens_of(stream: Iterable[bytes]) -> tuple[int, ...]:
    """The tokens of an answer that was asked to tell them, from its events."""
    choices = [choice for event in stream for choice in json.loads(event)["choices"]]
    return tuple(token for choice in choices for token in choice.get("token_ids") or ())


def difference(pulled: Answer, pushed: Answer) -> str:
    """What is wrong with the two answers to one prompt; empty if nothing is."""
    if pulled.tokens != pushed.tokens:
        return f"pull gave the tokens {pulled.tokens}, push {pushed.tokens}: one of them moved a wrong cache"
    if len(pulled.tokens) != OUTPUT_TOKENS:
        return f"{len(pulled.tokens)} tokens instead of {OUTPUT_TOKENS} in both answers"
    return ""


class Pair:
    """The prefill instance and the address at which decode instances find it."""

    def __init__(self, model: str, prefill: Server, side_port: int, engine_id: str):
        self._model = model
        self._prefill = prefill
        self._address = {"remote_host": "127.0.0.1", "remote_port": side_port, "remote_engine_id": engine_id}

    def prefill(self, prompt: Sequence[int], name: str) -> dict[str, Any]:
        params = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": name}
        request = body(self._model, prompt, max_tokens=1, kv_transfer_params=params)
        return dict(post(f"{self._prefill.url}/v1/completions", request)["kv_transfer_params"])

    def _decode(self, decode: Server, prompt: Sequence[int], params: dict[str, Any]) -> Answer:
        """The decode leg's answer; its seconds are from its sending."""
        request = body(self._model, prompt, kv_transfer_params=params, return_token_ids=True)
        times, stream = zip(*events(decode.url, request), strict=True)
        return Answer(times[0], tokens_of(stream))

    def pull(self, decode: Server, prompt: Sequence[int]) -> Answer:
        return self._decode(decode, prompt, self.prefill(prompt, uuid.uuid4().hex))

    def push(self, decode: Server, prompt: Sequence[int], verified: bool = False) -> Answer:
        """Both legs are sent at the same time."""
        name = named(verified)
        params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name, **self._address}
        begun = time.perf_counter()
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(self._decode(decode, prompt, params)))
        thread.start()
        self.prefill(prompt, name)
        ended = time.perf_counter()
        thread.join()
        return replace(answers[0], seconds=begun + answers[0].seconds - ended, prefill=ended - begun)


def side_port(server: Server) -> int:
    return int(server.spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])


def both_ways(pair: Pair, pull: Server, push: Server, prompt: Sequence[int]) -> tuple[Answer, Answer]:
    """A prompt's answers, pulled and pushed.

    Raises:
        SystemExit: they differ.
    """
    pulled, pushed = pair.pull(pull, prompt), pair.push(push, prompt)
    if wrong := difference(pulled, pushed):
        sys.exit(wrong)
    return pulled, pushed


def compare_bytes(pair: Pair, push: Server, prompt: Sequence[int], pulled: Answer) -> None:
    """Push a prompt once more, and have both sides compare sums.

    Raises:
        SystemExit: they did not, or did so of other pushes, too; or the answer is another than the one pulled.
    """
    if wrong := difference(pulled, pair.push(push, prompt, verified=True)):
        sys.exit(wrong)
    if (verified := counted(push, "vllm:pd_verified_receives_total")) != 1:
        sys.exit(f"sums of {verified} pushes were compared, and not of the last one alone: see the servers' logs")


def slow_down_to_prefill(pair: Pair, push: Server, size: int, prompts: Sequence[Sequence[int]]) -> list[float]:
    """Slow the link to where `size` bytes take as long as the prefill beside their push, and return these seconds. On
    shared cores that prefill takes longer than others, the more so on a slow link, so a first guess is corrected."""
    seconds: list[float] = []
    for some in (prompts[:1], prompts[1:]):
        seconds = [pair.push(push, prompt).prefill for prompt in some]
        fit_link(size, seconds)
    return seconds


def fit_link(size: int, seconds: Sequence[float]) -> float:
    """Have the link take the median of these seconds for `size` bytes, and return it."""
    middle = float(np.median(seconds))
    slow_down(8e-6 * size / middle)
    SENT_AHEAD.write_text(str(max(AHEAD_BYTES, round(AHEAD_S * size / middle))))
    return middle


def measure(model: str, requests: int, logs: Path, step_tokens: int = STEP_TOKENS, push_when: str = "steps") -> Result:
    with Servers(logs) as servers:
        prefill, puller, pusher = servers.start(*specs(model, step_tokens, push_when))
        for server in (prefill, puller, pusher):
            event_times(server.url, body(model, [0] * 40))  # the first forward of a process is slow
        [warm, *others] = prompts(requests + 5, seed=1)
        answer = Pair(model, prefill, side_port(prefill), "").prefill(warm, "warm")
        pair = Pair(model, prefill, side_port(prefill), answer["remote_engine_id"])
        both_ways(pair, puller, pusher, warm)  # the handshakes
        size = counted(puller, "vllm:pd_received_bytes_total")
        prefills = slow_down_to_prefill(pair, pusher, size, others[:4])
        rows = []
        for prompt in others[4:]:  # in turns, so that whatever else happens on the machine meets both
            transfer = fit_link(size, prefills[-LATEST:])
            pulled, pushed = both_ways(pair, puller, pusher, prompt)
            prefills.append(pushed.prefill)
            alone = event_times(pusher.url, body(model, [0]))[0]
            rows.append(1e3 * np.array([pulled.seconds, pushed.seconds, alone, pushed.prefill, transfer]))
            print(
                f"  {model}: {size} bytes, "
                "pull {:.0f} ms, push {:.0f}, alone {:.0f}, prefill {:.0f}, the link {:.0f}".format(*rows[-1]),
                flush=True,
            )
        compare_bytes(pair, pusher, others[-1], pulled)
        slow_down(None)
    pull, push, local, prefilled, moving = np.median(rows, axis=0).tolist()
    exposed = float(np.median([(row[1] - row[2]) / (row[0] - row[2]) for row in rows]))
    unmatched = float(np.median([max(0.0, row[4] - row[3]) / (row[0] - row[2]) for row in rows]))
    pull_worst, push_worst, *_ = np.max(rows, axis=0).tolist()
    return Result(
        model=model,
        compared="tokens, bytes",
        requests=requests,
        prefill=round(prefilled, 1),
        transfer=round(moving, 1),
        link_mbit=round(8e-3 * size / moving, 1),
        prompt_bytes=size,
        pull=round(pull, 1),
        pull_worst=round(pull_worst, 1),
        push=round(push, 1),
        push_worst=round(push_worst, 1),
        ratio=round(push / pull, 3),
        local=round(local, 1),
        exposed=round(exposed, 3),
        unmatched=round(unmatched, 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=KNOWN, help="default: gqa, with --one-step deep and deep-hybrid")
    parser.add_argument("--one-step", action="store_true", help="prompts of one prefill step, written layer by layer")
    parser.add_argument("--push-when", choices=("steps", "layers"), help="default: steps, with --one-step layers")
    parser.add_argument("--requests", type=int, help="of each kind, in turns; default: 10, with --one-step 12")
    parser.add_argument("--into", type=Path, help="default: out/bench/overlap.json, or overlap-layers.json")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        enter_namespace()
    one = options.one_step
    requests = options.requests or (12 if one else 10)
    models = [options.model] if options.model else [DEEP.name, DEEP_HYBRID.name] if one else ["gqa"]
    push_when = options.push_when or ("layers" if one else "steps")
    step_tokens = 2048 if one else STEP_TOKENS
    into = options.into or ROOT / "out" / "bench" / ("overlap-layers.json" if one else "overlap.json")
    into.parent.mkdir(parents=True, exist_ok=True)
    results = [measure(model, requests, into.parent / "logs", step_tokens, push_when) for model in models]
    facts: dict[str, Any] = {"prompt_tokens": PROMPT_TOKENS, "step_tokens": step_tokens, "push_when": push_when}
    write(into, facts | {"unit": "ms", "rows": [asdict(result) for result in results]})
    for result in results:
        print(
            f"\n{result.model}: from the end of the prefill to the first token: pull {result.pull} ms, push "
            f"{result.push} ms, ratio {result.ratio}{'' if one else f' (goal {GOAL})'}; decode alone {result.local} "
            f"ms, exposed of the transfer {result.exposed}{f' (goal {EXPOSED_GOAL})' if one else ''}"
        )


if __name__ == "__main__":
    main()

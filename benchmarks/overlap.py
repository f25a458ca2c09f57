"""How much of a slow transfer a push hides behind the prefill.

A prompt of at least eight prefill steps goes twice through the same prefill instance, which keeps no prefixes, to two
decode instances: one reads when the prefill has finished, one is written into while it computes. The link is slowed to
where moving the whole prompt takes about as long as computing it, which the benchmark measures first. The time is from
the end of the prefill (its answer) to the decode instance's first token. Both must give the same tokens, or the
benchmark fails: bytes that arrived wrong, or too late, are no gain.

With `--one-step` the prompt takes a single step, of a model of 16 layers, and pushes are written layer by layer
(`push_when`): what is exposed is the time from the end of the prefill to the first token, less that of a prompt of
which the decode instance has all blocks and computes one token, as it does behind a push; as a part of what the whole
transfer takes. What the decode leg needs to come there (its own server, its engine, the question) is exposed, too: the
transfer takes as long as the step and cannot begin before.

Everything runs in a network namespace of its own (`unshare --net`), whose only link is slowed by `tc` (a token bucket);
NIXL is confined to TCP, so no bytes pass beside it. Needs root or the right to make namespaces.

    python benchmarks/overlap.py [--one-step] [--requests 10] [--into out/bench/overlap.json]
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
import uuid
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
from examples.make_models import DEEP, MODELS, make  # noqa: E402

PROMPT_TOKENS = 1920
STEP_TOKENS = 192
GOAL = 0.4
EXPOSED_GOAL = 0.15
INSIDE = "PD_OVERLAP_INSIDE"
KNOWN = {**MODELS, DEEP.name: DEEP}


@dataclass(frozen=True, slots=True)
class Result:
    """Medians and worst values in milliseconds over `requests`; `ratio` is of the medians of push and pull. `local` is
    the first token's of a prompt that the decode instance has, `exposed` what a push adds to it, as a part of the time
    that the bytes take over the link."""

    requests: int
    prefill: float
    link_mbit: float
    prompt_bytes: int
    pull: float
    pull_worst: float
    push: float
    push_worst: float
    ratio: float
    local: float
    exposed: float


@dataclass(frozen=True, slots=True)
class Answer:
    """Of a decode instance: seconds from the end of the prefill to the first token, and all tokens."""

    seconds: float
    tokens: tuple[int, ...]


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
        }
        transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": extra}
        flags = (*KNOWN[model].flags, *flags)
        return vllm_spec(name, make(KNOWN[model]), flags=flags, transfer=transfer)

    none = "--no-enable-prefix-caching"
    return [
        spec("overlap-prefill", "kv_producer", "push", "--max-num-batched-tokens", str(step_tokens), none),
        spec("overlap-pull", "kv_consumer", "pull", none),
        spec("overlap-push", "kv_consumer", "push", "--enable-prefix-caching"),
    ]


def prompt_bytes(model: str) -> int:
    """Bytes of a prompt's cache: K and V of every layer in float32."""
    config = json.loads((make(KNOWN[model]) / "config.json").read_text())
    heads, size = config["num_key_value_heads"], config["head_dim"]
    return int(PROMPT_TOKENS * config["num_hidden_layers"] * 2 * heads * size * 4)


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

    def push(self, decode: Server, prompt: Sequence[int]) -> Answer:
        """Both legs are sent at the same time."""
        name = uuid.uuid4().hex
        params = {"do_remote_prefill": True, "do_remote_decode": False, "transfer_id": name, **self._address}
        begun = time.perf_counter()
        answers: list[Answer] = []
        thread = threading.Thread(target=lambda: answers.append(self._decode(decode, prompt, params)))
        thread.start()
        self.prefill(prompt, name)
        ended = time.perf_counter()
        thread.join()
        return replace(answers[0], seconds=begun + answers[0].seconds - ended)


def side_port(server: Server) -> int:
    return int(server.spec.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])


def measure(model: str, requests: int, logs: Path, step_tokens: int = STEP_TOKENS, push_when: str = "steps") -> Result:
    with Servers(logs) as servers:
        prefill, puller, pusher = servers.start(*specs(model, step_tokens, push_when))
        for server in (prefill, puller, pusher):
            event_times(server.url, body(model, [0] * 40))  # the first forward of a process is slow
        [warm, *others] = prompts(requests + 4, seed=1)
        answer = Pair(model, prefill, side_port(prefill), "").prefill(warm, "warm")
        pair = Pair(model, prefill, side_port(prefill), answer["remote_engine_id"])
        taken = []
        for prompt in others[:3]:
            began = time.perf_counter()
            pair.prefill(prompt, uuid.uuid4().hex)
            taken.append(time.perf_counter() - began)
        seconds = float(np.median(taken))
        for decode, way in ((puller, pair.pull), (pusher, pair.push)):
            way(decode, warm)  # the handshake
        mbit = prompt_bytes(model) * 8 / 1e6 / seconds
        print(
            f"prefill {1e3 * seconds:.0f} ms, {prompt_bytes(model)} bytes: link slowed to {mbit:.1f} Mbit/s", flush=True
        )
        slow_down(mbit)
        pulls, pushes, locals_ = [], [], []
        for prompt in others[3:]:  # in turns, so that whatever else happens on the machine meets both
            pulled, pushed = pair.pull(puller, prompt), pair.push(pusher, prompt)
            if wrong := difference(pulled, pushed):
                sys.exit(f"request {len(pulls) + 1}: {wrong}")
            pulls.append(pulled.seconds)
            pushes.append(pushed.seconds)
            # One more token: of a prompt of whole blocks vLLM computes the last block again.
            locals_.append(event_times(pusher.url, body(model, [*prompt, 0]))[0])
            told = ((name, 1e3 * times[-1]) for name, times in (("pull", pulls), ("push", pushes), ("alone", locals_)))
            print("  " + ", ".join(f"{name} {ms:.0f} ms" for name, ms in told), flush=True)
        slow_down(None)
    pull, push, local = (1e3 * float(np.median(times)) for times in (pulls, pushes, locals_))
    return Result(
        requests,
        round(1e3 * seconds, 1),
        round(mbit, 1),
        prompt_bytes(model),
        round(pull, 1),
        round(1e3 * max(pulls), 1),
        round(push, 1),
        round(1e3 * max(pushes), 1),
        round(push / pull, 3),
        round(local, 1),
        round((push - local) / (1e3 * seconds), 3),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", choices=KNOWN, help="default: gqa, with --one-step deep")
    parser.add_argument("--one-step", action="store_true", help="prompts of one prefill step, written layer by layer")
    parser.add_argument("--push-when", choices=("steps", "layers"), help="default: steps, with --one-step layers")
    parser.add_argument("--requests", type=int, default=10, help="of each kind, in turns")
    parser.add_argument("--into", type=Path, help="default: out/bench/overlap.json, or overlap-layers.json")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        enter_namespace()
    one = options.one_step
    model = options.model or ("deep" if one else "gqa")
    push_when = options.push_when or ("layers" if one else "steps")
    step_tokens = 2048 if one else STEP_TOKENS
    into = options.into or ROOT / "out" / "bench" / ("overlap-layers.json" if one else "overlap.json")
    into.parent.mkdir(parents=True, exist_ok=True)
    result = measure(model, options.requests, into.parent / "logs", step_tokens, push_when)
    facts: dict[str, Any] = {"model": model, "prompt_tokens": PROMPT_TOKENS, "step_tokens": step_tokens}
    facts |= {"push_when": push_when, "unit": "ms", "rows": [asdict(result)]}
    write(into, facts)
    print(
        f"\nfrom the end of the prefill to the first token: pull {result.pull} ms, push {result.push} ms, ratio "
        f"{result.ratio}{'' if one else f' (goal {GOAL})'}; decode alone {result.local} ms, exposed of the transfer "
        f"{result.exposed}{f' (goal {EXPOSED_GOAL})' if one else ''}"
    )


if __name__ == "__main__":
    main()

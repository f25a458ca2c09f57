"""The demonstration: a prefill and a decode instance with a router give the tokens of one plain instance.

Starts all four on this machine's CPU with a tiny model, sends prompts of 1 to 1900 tokens to the router and to the
plain instance, prints for each whether the tokens are equal, how many bytes moved and how long it took, and stops
everything. Exits with 1 if any answer differs, any prompt of two tokens or more moved no bytes, or a server does not
start.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))

from examples.launch import Server, Servers, StartError, opened, post, router_spec, vllm_spec  # noqa: E402
from examples.make_models import MODELS, make  # noqa: E402
from examples.stages import Progress  # noqa: E402

PROMPT_TOKENS = (1, 16, 33, 100, 256, 500, 1000, 1900)
OUTPUT_TOKENS = 24
RECEIVED = re.compile(r"^vllm:pd_received_bytes_total\{[^}]*\} (\S+)$", re.MULTILINE)


def say(text: str) -> None:
    print(f"[demo] {text}", flush=True)


def complete(url: str, model: str, prompt: Sequence[int]) -> tuple[list[int], float]:
    """Greedy tokens for a prompt, and the seconds until they were there."""
    body: dict[str, Any] = {"model": model, "prompt": list(prompt), "max_tokens": OUTPUT_TOKENS, "temperature": 0}
    started = time.perf_counter()
    answer = post(f"{url}/v1/completions", body | {"ignore_eos": True, "return_token_ids": True})
    return answer["choices"][0]["token_ids"], time.perf_counter() - started


def received_bytes(decode: Server) -> float:
    """Bytes that the connector has read so far, from the decode instance's Prometheus series."""
    with opened(f"{decode.url}/metrics", timeout=30) as answer:
        return sum(map(float, RECEIVED.findall(answer.read().decode())))


def compare(model: str, plain: Server, router: Server, decode: Server) -> bool:
    """Send every prompt both ways and print one line for each; whether all were right."""
    generator = random.Random(1)
    all_right = True
    print(f"\n{'prompt':>8} {'tokens':>10} {'moved':>12} {'P/D':>10} {'plain':>10}")
    for length in PROMPT_TOKENS:
        prompt = [generator.randrange(256) for _ in range(length)]
        expected, plain_time = complete(plain.url, model, prompt)
        before = received_bytes(decode)
        tokens, pd_time = complete(router.url, model, prompt)
        moved = received_bytes(decode) - before
        verdict = "equal" if tokens == expected else "DIFFERENT"
        times = f"{pd_time * 1e3:>7.0f} ms {plain_time * 1e3:>7.0f} ms"
        print(f"{length:>8} {verdict:>10} {moved / 1024:>8.0f} KiB {times}", flush=True)
        if tokens != expected:
            print(f"         plain: {expected}\n         P/D:   {tokens}")
        # The last prompt token is decode's to compute, so one of a single token has nothing to hand over.
        all_right &= tokens == expected and (moved > 0) == (length > 1)
    print()
    return all_right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="gqa", choices=MODELS, help="which tiny model (default: gqa)")
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "demo", help="directory of the servers' logs")
    options = parser.parse_args()
    model = MODELS[options.model]

    say(f"making the model {model.name} ({model.family}, random weights)")
    path = make(model)
    with Servers(options.logs) as servers:
        say(f"starting a prefill, a decode and a plain instance, about a minute; logs are in {options.logs}")

        def spec(name: str, role: str | None) -> Any:
            transfer = {"kv_connector": "PDConnector", "kv_role": role} if role else None
            return vllm_spec(name, path, flags=model.flags, transfer=transfer)

        started = time.monotonic()
        try:
            prefill, decode, plain = servers.start(
                spec("prefill", "kv_producer"),
                spec("decode", "kv_consumer"),
                spec("plain", None),
                progress=Progress(say, options.logs),
            )
            [router] = servers.start(router_spec("router", [prefill.url], [decode.url]))
        except StartError as error:
            say(str(error))
            return 1
        say(f"all serve after {time.monotonic() - started:.0f} s; the first request to each is slow, so one goes ahead")
        for server in (prefill, decode, plain):
            complete(server.url, model.name, [0])
        all_right = compare(model.name, plain, router, decode)
        say("P/D is slower than plain here: three processes share this machine's cores, a request passes the router")
        say("and both instances, and its cache is copied. It pays where long prompts hold up the answers of others.")
        say("stopping the servers")
    say("every answer equals the plain run's" if all_right else "FAILED: see the lines above")
    return 0 if all_right else 1


if __name__ == "__main__":
    sys.exit(main())

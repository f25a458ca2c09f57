"""The recall task on this machine's CPU: a plain instance against pairs of every kind that is asked for.

    python benchmarks/accuracy/recall.py [--pairs pull pull-blocks …] [--questions 200] [--json FILE]

Trains the model first if it is not there (minutes). Exits with 1 if a pair's score is not the plain one, or if one with
corrupted transfers scores CORRUPT_BELOW or more: then the task could not see a wrong cache.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks.accuracy.compare import Outcome, evaluate, outcomes, recall_config, table  # noqa: E402
from benchmarks.accuracy.train_recall import ensure  # noqa: E402
from examples.launch import Server, Servers, router_spec, vllm_spec  # noqa: E402

CORRUPT_BELOW = 0.5
GOOD = 0.95
"""Score that the plain instance must reach for the comparison to mean something."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One kind of pair; block sizes are tokens."""

    config: Mapping[str, Any] = field(default_factory=dict)
    p_block: int = 32
    d_block: int = 32
    corrupt: bool = False


PAIRS = {
    "pull": Pair(),
    "pull-blocks": Pair(p_block=32, d_block=128),
    "push": Pair({"mode": "push"}),
    "push-blocks": Pair({"mode": "push"}, p_block=128, d_block=32),
    "mooncake-pull": Pair({"transport": "mooncake"}),
    "mooncake-pull-blocks": Pair({"transport": "mooncake"}, p_block=32, d_block=128),
    "mooncake-push": Pair({"transport": "mooncake", "mode": "push"}),
    "mooncake-push-blocks": Pair({"transport": "mooncake", "mode": "push"}, p_block=128, d_block=32),
    "corrupt": Pair(corrupt=True),
}


def ask(server: Server, questions: int) -> Any:
    return evaluate(server.url, "recall", [recall_config(questions)], limit=None, at_once=8, few=0)


def run(name: str, servers: Servers, model: Path, plain: Any, questions: int) -> Outcome:
    """Start a pair, ask it everything, end it."""
    pair = PAIRS[name]
    environment = {"PD_TEST_POLITE": "1", **({"PD_TEST_CORRUPT": "1"} if pair.corrupt else {})}

    def spec(side: str, role: str, block: int) -> Any:
        transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": dict(pair.config)}
        flags = ("--block-size", str(block))
        return vllm_spec(f"{name}-{side}", model, flags=flags, transfer=transfer, environment=environment)

    prefill, decode = servers.start(
        spec("prefill", "kv_producer", pair.p_block), spec("decode", "kv_consumer", pair.d_block)
    )
    [router] = servers.start(router_spec(f"{name}-router", [prefill.url], [decode.url]))
    try:
        [found] = outcomes(plain, ask(router, questions))
        return found
    finally:
        servers.stop(router, prefill, decode)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--pairs", nargs="+", choices=PAIRS, default=["pull", "pull-blocks", "corrupt"])
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--json", type=Path, help="write the outcomes there")
    parser.add_argument("--logs", type=Path, default=ROOT / "out" / "accuracy")
    options = parser.parse_args()
    model = ensure()
    found: dict[str, Outcome] = {}
    with Servers(options.logs) as servers:
        [server] = servers.start(vllm_spec("plain", model, flags=("--block-size", "32")))
        plain = ask(server, options.questions)
        servers.stop(server)
        for name in options.pairs:
            found[name] = run(name, servers, model, plain, options.questions)
            print(f"{name}:\n{table([found[name]])}\n", flush=True)
            if options.json:
                outcome = {name: asdict(one) for name, one in found.items()}
                options.json.write_text(json.dumps(outcome, indent=1) + "\n")
    wrong = [name for name, one in found.items() if not is_right(PAIRS[name], one)]
    print(f"not as it must be: {', '.join(wrong)}" if wrong else "all as it must be")
    return 1 if wrong else 0


def is_right(pair: Pair, one: Outcome) -> bool:
    if pair.corrupt:
        return one.plain >= GOOD and one.pd < CORRUPT_BELOW
    return one.plain >= GOOD and one.difference == 0.0


if __name__ == "__main__":
    sys.exit(main())

"""The recall task on this machine's CPU: a plain instance against pairs of every kind that is asked for.

    python benchmarks/accuracy/recall.py [--pairs pull pull-blocks …] [--questions 200] [--json FILE]

Trains the models first if they are not there (minutes). Exits with 1 if a pair's score is not the plain one, if one
with corrupted transfers scores CORRUPT_BELOW or more (then the task could not see a wrong cache), or if not every cache
was received, also those that are corrupted.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks.accuracy.compare import (  # noqa: E402
    RECALL_PAIRS,
    STATES_PAIRS,
    Outcome,
    evaluate,
    outcomes,
    recall_config,
    received,
    requests_of,
    table,
)
from benchmarks.accuracy.train_recall import ATTENTION, STATES, ensure  # noqa: E402
from benchmarks.report import write  # noqa: E402
from examples.launch import Server, Servers, Spec, router_spec, vllm_spec  # noqa: E402
from examples.make_models import MODELS  # noqa: E402

CORRUPT_BELOW = 0.5
GOOD = 0.95
"""Score that the plain instance must reach for the comparison to mean something."""


@dataclass(frozen=True, slots=True)
class Pair:
    """One kind of pair; block sizes are tokens, None for what a model with states needs."""

    config: Mapping[str, Any] = field(default_factory=dict)
    p_block: int | None = 32
    d_block: int | None = 32
    corrupt: bool = False
    model: str = ATTENTION


OF_STATES: dict[str, Any] = {"p_block": None, "d_block": None, "model": STATES}


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
    "states": Pair(**OF_STATES),
    "states-push": Pair({"mode": "push"}, **OF_STATES),
    "states-mooncake": Pair({"transport": "mooncake"}, **OF_STATES),
    "states-corrupt": Pair(corrupt=True, **OF_STATES),
}


def spec(name: str, model: str, block: int | None, corrupt: bool = False, transfer: Any = None) -> Spec:
    like = MODELS["qwen3next"]  # as which vLLM runs the model with states on a CPU
    flags = like.flags if model == STATES else ()
    environment = {**(like.environment if model == STATES else {}), "PD_TEST_POLITE": "1"}
    if corrupt:
        environment["PD_TEST_CORRUPT"] = "1"
    flags = (*flags, "--block-size", str(block)) if block else flags
    return vllm_spec(name, ensure(model), flags=flags, transfer=transfer, environment=environment)


def ask(server: Server, model: str, questions: int) -> Any:
    config = recall_config(questions, STATES_PAIRS if model == STATES else RECALL_PAIRS)
    return evaluate(server.url, model, [config], limit=None, at_once=8, few=0)


def run(name: str, servers: Servers, plain: Any, questions: int) -> Outcome:
    """Start a pair, ask it everything, end it.

    Raises:
        RuntimeError: not every cache was received.
    """
    pair = PAIRS[name]

    def side(role: str, block: int | None) -> Spec:
        transfer = {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": dict(pair.config)}
        return spec(f"{name}-{role.removeprefix('kv_')}", pair.model, block, pair.corrupt, transfer)

    prefill, decode = servers.start(side("kv_producer", pair.p_block), side("kv_consumer", pair.d_block))
    [router] = servers.start(router_spec(f"{name}-router", [prefill.url], [decode.url]))
    try:
        before = received([decode.url])
        pd = ask(router, pair.model, questions)
        if wrong := received([decode.url]).lacks(requests_of(pd), before):
            raise RuntimeError(f"{name}: {wrong}")
        [found] = outcomes(plain, pd)
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
    needs = [name for name in options.pairs if PAIRS[name].corrupt or PAIRS[name].model == STATES]
    if needs and importlib.util.find_spec("pd_test_plugins") is None:
        parser.error(f"--pairs {' '.join(needs)} need the test plugins: `make setup`, or `pip install tests/plugins`")
    found: dict[str, Outcome] = {}
    with Servers(options.logs) as servers:
        plain = {}
        for model in sorted({PAIRS[name].model for name in options.pairs}):
            [server] = servers.start(spec(f"plain-{model}", model, 32 if model == ATTENTION else None))
            plain[model] = ask(server, model, options.questions)
            servers.stop(server)
        for name in options.pairs:
            found[name] = run(name, servers, plain[PAIRS[name].model], options.questions)
            print(f"{name}:\n{table([found[name]])}\n", flush=True)
            if options.json:
                write(options.json, {"rows": [{"pair": name} | asdict(one) for name, one in found.items()]})
    wrong = [name for name, one in found.items() if not is_right(PAIRS[name], one)]
    print(f"not as it must be: {', '.join(wrong)}" if wrong else "all as it must be")
    return 1 if wrong else 0


def is_right(pair: Pair, one: Outcome) -> bool:
    if pair.corrupt:
        return one.plain >= GOOD and one.pd < CORRUPT_BELOW
    return one.plain >= GOOD and one.difference == 0.0


if __name__ == "__main__":
    sys.exit(main())

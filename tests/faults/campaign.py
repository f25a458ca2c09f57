"""Run a campaign of faults against real servers and print what became of it.

    python tests/faults/campaign.py [--world pair|restarts|network] [--mode pull|push] [--transport nixl|mooncake]
                                    [--verify off|sample|all] [--faults N] [--seed S] [--only TEXT] [--skip N]

Worlds: one prefill and one decode instance, of which nothing is restarted; two of each, killed and started again in
turn; one of each in network namespaces, with a bad network between them and keys on the side channel (needs root).

After every fault four things must hold: no request was answered with wrong tokens or an empty 200; every request ended
within its deadline; every block is free again on every instance; no server or engine died but those that were killed;
and the pair serves the next request right. The table counts what did not. Exit code 0 if nothing did.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "tests")]

from faults.network import Network, NotPossible  # noqa: E402
from faults.plan import NETWORK, ONE_PAIR, ONE_PAIR_COMPARED, ONE_PAIR_PUSH, RESTARTS, Fault, Kind, plan  # noqa: E402
from faults.restarts import ended  # noqa: E402
from faults.strikes import STRIKES  # noqa: E402
from faults.world import End, Outcome, World  # noqa: E402
from launch import Servers  # noqa: E402
from vllm_pd_connector.sidechannel.keys import create_keys  # noqa: E402

WORLDS = ("pair", "restarts", "network")
ALL_STRIKES = {**STRIKES, **{kind.name: ended for kind in RESTARTS}}

GOOD = {End.RIGHT, End.REFUSED, End.ABORTED}
COLUMNS = ("faults", "requests", "right", "refused", "wrong tokens", "no end", "leaked", "died", "no recovery")


@dataclass(slots=True)
class Result:
    """One fault and what it led to; `problems` are sentences, one per thing that did not hold."""

    fault: Fault
    seconds: float = 0.0
    ends: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    stuck: list[str] = field(default_factory=list)
    leaked: list[str] = field(default_factory=list)
    died: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def problems(self) -> list[str]:
        return [*self.wrong, *self.stuck, *self.leaked, *self.died, *self.lost]

    def judge(self, outcomes: Sequence[Outcome], may_break: bool) -> None:
        for outcome in outcomes:
            self.ends[outcome.end.value] += 1
            text = f"{outcome.end.value}: {outcome.detail}"
            if outcome.end in (End.WRONG, End.EMPTY):
                self.wrong.append(text)
            elif outcome.end is End.STUCK:
                self.stuck.append(text)
            elif outcome.end is End.BROKEN and not may_break:
                self.died.append(text)


def kinds_of(world: str, mode: str, verify: str) -> tuple[Kind, ...]:
    """What can go wrong in a world."""
    if world == "pair" and mode == "push":
        return ONE_PAIR_COMPARED if verify == "all" else ONE_PAIR_PUSH
    return {"pair": ONE_PAIR, "restarts": RESTARTS, "network": NETWORK}[world]


def make_world(
    servers: Servers, name: str, family: str, extra: Mapping[str, str] | None = None, network: Network | None = None
) -> World:
    """The instances of a campaign, see above. One of two decode instances computes itself what it cannot read."""
    two = name == "restarts"
    return World(servers, family, 2 if two else 1, ("fail", "recompute") if two else ("fail",), extra, network)


def run(world: World, faults: Sequence[Fault], note: Path, until: float) -> list[Result]:
    """Make every fault, none after time.monotonic() has reached `until`; results are written down as they come."""
    results: list[Result] = []
    for number, fault in enumerate(faults):
        if time.monotonic() > until:
            break
        result = Result(fault)
        began = time.monotonic()
        p, d = world.pair(number)
        kills = fault.kind in {kind.name for kind in RESTARTS}
        result.judge(ALL_STRIKES[fault.kind](world, p, d, fault), may_break=kills)
        result.died += [f"{name} died" for name in world.dead()]
        if not result.died:
            result.lost += world.recovers()
            result.leaked += world.leaks()
            world.settled()
        result.seconds = time.monotonic() - began
        results.append(result)
        print(f"{number:4} {result.seconds:5.1f} s  {fault}: {dict(result.ends)}", *result.problems, sep="\n      ! "
              if result.problems else " ", flush=True)  # fmt: skip
        with note.open("a") as file:
            record = {**asdict(fault), "seconds": result.seconds, "ends": result.ends, "problems": result.problems}
            file.write(json.dumps(record) + "\n")
        for instance in [i for i in world.instances if i.name in world.dead()]:
            world.restart(instance)
    return results


def table(results: Sequence[Result]) -> str:
    """A line per kind and their sum, in Markdown."""
    rows = {kind: _row([r for r in results if r.fault.kind == kind]) for kind in dict.fromkeys(
        result.fault.kind for result in results)}  # fmt: skip
    rows["all"] = _row(results)
    lines = ["| kind | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    return "\n".join([*lines, *(f"| {kind} | " + " | ".join(map(str, row)) + " |" for kind, row in rows.items())])


def _row(results: Sequence[Result]) -> tuple[int, ...]:
    ends: Counter[str] = sum((result.ends for result in results), Counter())
    lists = [[getattr(r, name) for r in results] for name in ("wrong", "stuck", "leaked", "died", "lost")]
    return (len(results), sum(ends.values()), ends["right"], ends["refused"], *(sum(map(len, part)) for part in lists))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", choices=WORLDS, default="pair")
    parser.add_argument("--mode", choices=("pull", "push"), default="pull")
    parser.add_argument("--transport", choices=("nixl", "mooncake"), default="nixl")
    parser.add_argument("--verify", choices=("off", "sample", "all"), default="off")
    parser.add_argument("--faults", type=int, default=250)
    parser.add_argument("--skip", type=int, default=0, help="leave out the first faults of the plan")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="kinds whose name contains this text")
    parser.add_argument("--family", default="gqa")
    parser.add_argument("--seconds", type=float, default=1800.0, help="begin no further fault after this time")
    options = parser.parse_args(arguments)
    all_kinds = kinds_of(options.world, options.mode, options.verify)
    kinds = tuple(kind for kind in all_kinds if options.only in kind.name)
    faults = plan(kinds, options.faults, options.seed)[options.skip :]
    directory = ROOT / "out" / "faults" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    with ExitStack() as stack:
        servers = stack.enter_context(Servers(directory / "logs"))
        network = None
        extra = {"mode": options.mode, "transport": options.transport, "verify": options.verify}
        if options.world == "network":
            network = stack.enter_context(Network(options.seed))
            create_keys(directory / "keys", "all")
            extra["side_channel_keys"] = str(directory / "keys")
        world = make_world(servers, options.world, options.family, extra, network)
        try:
            until = time.monotonic() + options.seconds
            results = run(world, faults, directory / "results.jsonl", until)
        finally:
            world.close()
    print(table(results))
    print("messages that passed by:", dict(sum((i.relay.seen for i in world.prefills if i.relay), Counter())))
    return 1 if any(result.problems for result in results) else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotPossible as error:
        sys.exit(str(error))

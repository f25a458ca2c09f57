"""Run a campaign of faults against real servers and print what became of it.

    python tests/faults/campaign.py [--world pair|restarts|workers|network|both|operated|elastic|talks]
                                    [--mode pull|push] [--transport nixl|mooncake] [--verify off|sample|all]
                                    [--family NAME] [--stored] [--faults N] [--seed S] [--only TEXT] [--skip N]
                                    [--seconds S] [--into DIR]

Worlds: one prefill and one decode instance, of which nothing is restarted, with a router; two of each, killed and
started again in turn; one of each with two workers, of which one is killed or stopped; one of each in network
namespaces, with a bad network between them (needs root); two that each prefill for the other; one of each whose weights
change, that is paused, and whose caches are reset; two of each behind the router, which leave and come back under load;
one of each that keeps conversations, of which an instance may be killed and started again.
On the bad network the side channel has keys, in mode push none, so that both legs can be sent at once there. With
--stored every instance has a store of prefixes beside this connector, in a MultiConnector.

After every fault these must hold: no request was answered with wrong tokens or an empty 200; every request ended
within its deadline; every block is free again on every instance; no server or engine died but those that were killed;
and the pair serves the next request right. A fault that touched no message, process, packet or port is tried again,
and a problem if it still does not. Exit code 0 if all held for as many faults as were asked for. DIR gets `result.json`
(the counts), `results.jsonl` (each fault) and the servers' logs.
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
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from examples.launch import Servers  # noqa: E402
from tests.faults.plan import (  # noqa: E402
    BOTH,
    ELASTIC,
    NETWORK,
    ONE_PAIR,
    ONE_PAIR_COMPARED,
    ONE_PAIR_PUSH,
    OPERATED,
    RESTARTS,
    TALKS,
    WORKERS,
    WORKERS_PUSH,
    Fault,
    Kind,
    plan,
)
from tests.faults.results import PROBLEMS, Result, by_kind, count  # noqa: E402
from tests.faults.strikes import conversing, operating, restarts  # noqa: E402
from tests.faults.strikes.giving_back import FULL_S  # noqa: E402
from tests.faults.strikes.leaving import FLAGS as LEAVING_FLAGS  # noqa: E402
from tests.faults.strikes.leaving import LEAVES, drained  # noqa: E402
from tests.faults.strikes.outlived import outlived  # noqa: E402
from tests.faults.strikes.strikes import STRIKES  # noqa: E402
from tests.faults.system.network import Network, NotPossible  # noqa: E402
from tests.faults.world import World  # noqa: E402
from vllm_pd_connector.sidechannel.net.keys import create_keys  # noqa: E402

WORLDS = ("pair", "restarts", "workers", "network", "both", "operated", "elastic", "talks")
ALL_STRIKES = {
    **STRIKES,
    **dict.fromkeys(restarts.KINDS, restarts.ended),
    "outlived": outlived,
    **operating.KINDS,
    "drained": drained,
    **conversing.KINDS,
}
ENDS_ONE = (*restarts.KINDS, "outlived", "conversation killed")
"""Kinds that end an instance."""
BOTH_ROLES = {"kv_lease_duration": FULL_S / 2, "kv_lease_limit": FULL_S}
"""Long enough for all prefills of a fault, and short enough that who waits gives up."""
TRIES = 3
"""Of a fault that touches nothing."""


def kinds_of(world: str, mode: str, verify: str) -> tuple[Kind, ...]:
    """What can go wrong in a world."""
    if world == "pair" and mode == "push":
        return ONE_PAIR_COMPARED if verify == "all" else ONE_PAIR_PUSH
    if world == "workers" and mode == "push":
        return WORKERS_PUSH
    worlds = {"pair": ONE_PAIR, "restarts": RESTARTS, "workers": WORKERS, "network": NETWORK, "both": BOTH}
    return {**worlds, "operated": OPERATED, "elastic": ELASTIC, "talks": TALKS}[world]


def make_world(
    servers: Servers,
    name: str,
    family: str,
    extra: Mapping[str, object] | None = None,
    network: Network | None = None,
    hold: Path | None = None,
    stores: Path | None = None,
) -> World:
    """The instances of a campaign, see above. One of two decode instances computes itself what it cannot read. `hold`:
    where prefill workers in mode push are held. `stores`: where instances keep prefixes, if they do."""
    two, elastic, talks = name in ("restarts", "elastic"), name == "elastic", name == "talks"
    own = {
        **(BOTH_ROLES if name == "both" else {}),
        **(LEAVES if elastic else {}),
        **(conversing.TALKS if talks else {}),
    }
    return World(
        servers,
        family,
        prefills=2 if two else 1,
        policies=("fail", "fail" if elastic else "recompute") if two else ("fail",),
        extra={**(extra or {}), **own},
        network=network,
        tp_size=2 if name == "workers" else 1,
        routed=name in ("pair", "elastic"),
        both=name == "both",
        hold=hold if name == "workers" and (extra or {}).get("mode") == "push" else None,
        flags=LEAVING_FLAGS if elastic else conversing.FLAGS if talks else (),
        relayed=not (elastic or talks),
        stores=stores,
    )


def strike(world: World, number: int, fault: Fault) -> Result:
    """Make one fault, the `number`th of a campaign, and look at what it left."""
    result = Result(fault)
    began = time.monotonic()
    p, d = world.pair(number)
    killed = restarts.instance_of(p, d, fault).name if fault.kind in ENDS_ONE else ""
    for attempt in range(TRIES):
        struck = ALL_STRIKES[fault.kind](world, p, d, replace(fault, salt=fault.salt + attempt))
        result.judge(struck.outcomes, killed)
        result.touched += struck.touched
        if result.touched or world.dead():
            break
    else:
        result.problems["touched nothing"].append(f"in {TRIES} tries")
    dead = [f"{name} is gone" for name in world.dead()]
    result.problems["died"] += dead
    if not dead:
        result.problems["no recovery"] += world.recovers()
        result.problems["leaked"] += world.leaks()
        world.settled()
    result.seconds = time.monotonic() - began
    return result


def run(world: World, faults: Sequence[Fault], note: Path, until: float, first: int = 0) -> list[Result]:
    """Make every fault, none after time.monotonic() has reached `until`; results are written down as they come.

    `first` is the number in its campaign of the first fault, which decides whom it strikes.
    """
    results: list[Result] = []
    for number, fault in enumerate(faults, start=first):
        if time.monotonic() > until:
            break
        result = strike(world, number, fault)
        results.append(result)
        print(f"{number:4} {result.seconds:5.1f} s  {fault}: {dict(result.ends)}, touched {result.touched}",
              *result.sentences, sep="\n      ! ", flush=True)  # fmt: skip
        with note.open("a") as file:
            file.write(json.dumps(result.record()) + "\n")
        for instance in [i for i in world.instances if i.name in world.dead()]:
            world.restart(instance)
    return results


def verdict(results: Sequence[Result], asked: int) -> int:
    """Exit code: 0 if everything held, for as many faults as were asked for."""
    counts = count(results)
    return int(counts["faults"] < asked or any(counts[name] for name in PROBLEMS))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--world", choices=WORLDS, default="pair")
    made.add_argument("--mode", choices=("pull", "push"), default="pull")
    made.add_argument("--transport", choices=("nixl", "mooncake"), default="nixl")
    made.add_argument("--verify", choices=("off", "sample", "all"), default="off")
    made.add_argument("--faults", type=int, default=250, help="how far into the plan to go")
    made.add_argument("--skip", type=int, default=0, help="leave out the first faults of the plan")
    made.add_argument("--seed", type=int, default=1)
    made.add_argument("--only", default="", help="kinds whose name contains this text")
    made.add_argument("--family", default="gqa")
    made.add_argument("--stored", action="store_true", help="a store of prefixes beside this connector")
    made.add_argument("--ipv6", action="store_true", help="the two hosts of world network speak it")
    made.add_argument("--seconds", type=float, default=1800.0, help="begin no further fault after this time")
    made.add_argument("--into", type=Path, help="directory for what is written down (default: one under out/faults)")
    return made


def faults_of(options: argparse.Namespace) -> list[Fault]:
    """What a campaign with these options does."""
    kinds = [kind for kind in kinds_of(options.world, options.mode, options.verify) if options.only in kind.name]
    return plan(kinds, options.faults, options.seed)[options.skip :]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    until = time.monotonic() + options.seconds
    faults = faults_of(options)
    directory = options.into or ROOT / "out" / "faults" / time.strftime(f"%Y%m%d-%H%M%S-{os.getpid()}")
    extra: dict[str, object] = {"mode": options.mode, "transport": options.transport, "verify": options.verify}
    with ExitStack() as stack:
        servers = stack.enter_context(Servers(directory / "logs"))
        network = None
        if options.world == "network":
            network = stack.enter_context(Network(options.seed, 6 if options.ipv6 else 4))
            if options.mode == "push":
                extra["allow_unauthenticated_peers"] = True
            else:
                create_keys(directory / "keys", "all")
                extra["side_channel_keys"] = str(directory / "keys")
        stores = directory / "stores" if options.stored else None
        world = make_world(servers, options.world, options.family, extra, network, directory / "hold", stores)
        try:
            results = run(world, faults, directory / "results.jsonl", until, options.skip)
        finally:
            world.close()
    print(by_kind(results))
    print("messages that passed by:", dict(sum((i.relay.seen for i in world.prefills if i.relay), Counter())))
    record = {"asked": len(faults), "counts": count(results)}
    (directory / "result.json").write_text(json.dumps(record))
    return verdict(results, len(faults))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except NotPossible as error:
        sys.exit(str(error))

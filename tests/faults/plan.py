"""Which faults a campaign makes, in which order: data, the same for the same seed.

A fault is a kind, where it strikes, in which phase of a request, and a number whose meaning the kind gives (seconds,
bytes, …). `plan` goes through the catalogue of the kinds in turn, so that a short campaign has a bit of everything
and a long one repeats what it can with other numbers and other moments.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong. `amount` in [0, 1) scales what the kind has to choose; `salt` seeds the rest."""

    kind: str
    where: str
    phase: str
    amount: float
    salt: int

    def __str__(self) -> str:
        return f"{self.kind} {self.where} ({self.phase}, {self.amount:.2f})"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of fault, where it can strike and when. `share` is how often it comes up, against other kinds."""

    name: str
    where: tuple[str, ...]
    phases: tuple[str, ...]
    share: int = 1


MESSAGES = ("ReadDone", "ReadVerdict", "Release", "Renew")
PUSH_MESSAGES = ("PushInto", "Pushed", "WithdrawPush", "DeclinePush")
COMPARED = ("GetChecksums", "LeaseChecksums", "ReadDone", "ReadVerdict")
"""Said besides where what was written is compared."""
PHASES = ("prefill", "between", "decode")
"""While the prefill runs; between the two legs; a moment after the decode instance got the request."""

CONFIRMED_TOO = (*PHASES, "confirm")
"""And exactly when what was read, or pushed, is confirmed; seen by the man in the middle."""

FORGED = ("nonce", "incarnation", "request", "engine", "blocks", "far blocks", "tokens", "port", "mode", "groups",
          "digest", "version", "first blocks", "another prompt")  # fmt: skip
FORGED_NAMES = ("engine", "host", "port", "name", "no name", "mode", "both flags", "blocks", "sizes", "extension",
                "bootstrap", "unknown field")  # fmt: skip


def _one_pair(
    messages: tuple[str, ...],
    last: tuple[str, str],
    verdict: str,
    ports: tuple[str, ...],
    rejections: tuple[str, ...] = ("decode",),
) -> tuple[Kind, ...]:
    """The kinds for control messages of a mode, of which `last` are the question and the answer that end a request."""
    return (
        Kind("duplicated", messages, ("decode",), 2),
        Kind("delayed", messages, ("decode",), 2),
        Kind("lost once", messages, ("decode",), 2),
        Kind("lost", last, ("decode",)),
        Kind("replayed", (*last, messages[2]), ("decode", "between"), 2),
        Kind("damaged", last, ("decode",), 2),
        Kind("foreign", ("failure", verdict, "junk", "manifests"), ("decode",), 2),
        # Every process in every phase, within two rounds.
        Kind("stopped", ("prefill engine", "prefill server", "decode engine", "decode server"), CONFIRMED_TOO, 8),
        Kind("aborted", ("prefill", "decode"), ("at once", "soon", "late"), 4),
        Kind("junk", (*ports, "prefill server", "decode server", "prefill transport", "decode transport"),
             ("bytes", "greeting", "silence", "crowd"), 2 + len(ports)),
        Kind("forged", FORGED, ("decode",), 4),
        Kind("rejected", ("temperature", "length"), rejections),
        Kind("several choices", ("both", "decode"), ("decode", "client leaves")),
        Kind("used again", ("after the end", "at the same time", "after the lease", "after a reset"), ("decode",), 2),
    )  # fmt: skip


ONE_PAIR = _one_pair(MESSAGES, ("ReadDone", "ReadVerdict"), "verdict", ("side channel", "router"))
"""One prefill and one decode instance; every fault passes, and nothing is restarted."""


def _one_pair_push(messages: tuple[str, ...]) -> tuple[Kind, ...]:
    orders = ("decode first", "prefill first", "no prefill", "no decode", "two decodes", "two prefills",
              "another prompt", "name again", "prefill leaves", "decode leaves",
              "retry, decode first", "retry, prefill first")  # fmt: skip
    ports = ("side channel", "router", "decode side channel", "bootstrap")
    return (
        *_one_pair(messages, ("PushInto", "Pushed"), "pushed", ports, ("decode", "at once")),
        Kind("forged name", FORGED_NAMES, ("decode",), 4),
        Kind("out of order", orders, ("decode",), 4),
    )


ONE_PAIR_PUSH = _one_pair_push(PUSH_MESSAGES)
"""The same in mode push, where either leg may come first."""

ONE_PAIR_COMPARED = _one_pair_push((*PUSH_MESSAGES, *COMPARED))
"""In mode push with verification of every request."""

RESTARTS: tuple[Kind, ...] = (
    # Every process in every phase, within two rounds.
    Kind(
        "killed",
        tuple(f"{side} {part}" for side in ("prefill", "decode") for part in ("worker", "engine", "server")),
        CONFIRMED_TOO,
        12,
    ),
    Kind("terminated", ("prefill server", "decode server"), PHASES),
    Kind("frozen, then killed", ("prefill engine", "decode engine"), ("decode",)),
)
"""The instance is started again at the same address; parameters of its former incarnation are used afterwards."""

WORKERS: tuple[Kind, ...] = (
    Kind("killed", ("prefill worker", "decode worker"), CONFIRMED_TOO),
    # Every worker in every phase, within two rounds.
    Kind("stopped", ("prefill worker", "decode worker"), CONFIRMED_TOO, 4),
)
"""One of the two workers of an instance that runs tensor-parallel."""

WORKERS_PUSH: tuple[Kind, ...] = (
    Kind("outlived", ("prefill engine",), ("decode",)),
    Kind("killed", ("prefill worker", "decode worker", "prefill engine"), CONFIRMED_TOO, 2),
)
"""In mode push, where workers may outlive the engine core that was asked, and write on."""

NETWORK: tuple[Kind, ...] = (
    # Everything in every phase, within three rounds.
    Kind("killed", ("prefill engine", "decode engine"), ("decode",)),
    Kind("large lost", ("both",), PHASES),
    Kind("link down", ("prefill", "decode"), PHASES, 2),
    Kind("blackout", ("both",), PHASES),
    Kind("loss", ("both",), PHASES),
    Kind("delay", ("both",), PHASES),
    Kind("half-open", ("to prefill", "to decode"), PHASES, 2),
)
"""Prefill and decode on hosts of their own; see `network`."""


OPERATED: tuple[Kind, ...] = (
    Kind("new weights", ("prefill", "decode", "both"), PHASES),
    Kind("paused", tuple(f"{s} {mode}" for s in ("prefill", "decode") for mode in ("abort", "wait", "keep")), PHASES),
    Kind("reset", tuple(f"{s} {how}" for s in ("prefill", "decode") for how in ("plainly", "connector", "force")),
         PHASES),
)  # fmt: skip
"""One prefill and one decode instance whose operator does something while requests are handed over."""

TALKS: tuple[Kind, ...] = (
    Kind("conversation gone", ("lease over", "blocks used", "forgotten"), ("told", "named"), 3),
    Kind("conversation forged", ("nonce", "incarnation", "request", "engine", "blocks", "far blocks", "tokens", "port",
                                 "groups", "digest", "version", "first blocks", "prefixes", "another's", "twice"),
         ("told",), 4),
    Kind("conversation stopped", ("decode engine", "decode server", "prefill engine"), ("between", "reading"), 3),
    Kind("conversation killed", ("decode engine", "decode server", "prefill engine"), ("between", "reading"), 2),
)  # fmt: skip
"""Turns of conversations, see `strikes/conversing.py`: nothing is refused, whatever became of what decode had kept."""

BOTH: tuple[Kind, ...] = (Kind("full", ("in turn", "one after the other"), ("prefill",)),)
"""Two instances, each of which prefills for the other, with more prefills than leave room to decode one."""


ELASTIC: tuple[Kind, ...] = (Kind("drained", ("prefill", "decode"), ("by the command", "by a signal")),)
"""Two of each behind the router, under load; one leaves and comes back."""


def plan(kinds: Sequence[Kind], number: int, seed: int) -> list[Fault]:
    """The first `number` faults of a campaign."""
    rng = random.Random(seed)
    places = {kind.name: _places(kind, rng) for kind in kinds}
    turn: list[Kind] = []
    faults: list[Fault] = []
    while len(faults) < number:
        if not turn:
            turn = [kind for kind in kinds for _ in range(kind.share)]
            rng.shuffle(turn)
        kind = turn.pop()
        if not places[kind.name]:
            places[kind.name] = _places(kind, rng)
        where, phase = places[kind.name].pop()
        faults.append(Fault(kind.name, where, phase, rng.random(), rng.randrange(1 << 32)))
    return faults


def _places(kind: Kind, rng: random.Random) -> list[tuple[str, str]]:
    places = list(product(kind.where, kind.phases))
    rng.shuffle(places)
    return places

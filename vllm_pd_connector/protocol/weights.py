"""Which weights this instance computes with, while they are changed under it, and whether another's caches fit them.

    AS STARTED --named--> NAMED --changing--> NAMELESS --named--> NAMED
         \\---------------------changing--------^

An instance begins with what its files or its configuration tell. Whoever changes weights in place says which they are
then, by a name that it gives to every instance that gets them: a number that each counts for itself would be another
after a restart, and the same by accident. Between the change and the name nobody knows what a cache was computed with,
so none is handed over and none is taken. Every change that is told moves the epoch, by which caches of this instance
are told from earlier ones.

No clock, no thread and no I/O in here.
"""

from __future__ import annotations

import hashlib
from typing import Final

from vllm_pd_connector.protocol.wire.fields import Weights

MAX_NAME: Final = 256
OTHER_WEIGHTS: Final = "weights: "
"""With it begins why weights stand against a hand-over."""
HOW_TO_NAME: Final = (
    "give them a name on every instance that has them: weight_version of POST /finish_weight_update, or POST "
    "/update_weight_version"
)


class OwnWeights:
    """See the module. `now` is what peers are told; while `nameless`, nothing is to be told."""

    def __init__(self) -> None:
        self.now = Weights()
        self.nameless = False

    def begin(self, name: str) -> None:
        """What the files or the configuration tell; of no interest once they were changed."""
        if self.now.epoch == 0:
            self.now = Weights(name)

    def changing(self) -> bool:
        """They are being changed. Returns whether an epoch ends with it: several calls make one change."""
        if self.nameless:
            return False
        self.now, self.nameless = Weights(self.now.name, self.now.epoch + 1), True
        return True

    def named(self, version: str) -> bool:
        """They are what is called `version` wherever they are. Returns whether an epoch ends with it: they had another
        name until now."""
        name, was, self.nameless = version_name(version), self.nameless, False
        moves = not was and name != self.now.name
        self.now = Weights(name, self.now.epoch + moves)
        return moves

    def unlike(self, there: Weights) -> str:
        """Why caches that were computed with the weights of `there` mean nothing here; empty if they do, or if the
        handshake has to say."""
        if self.nameless:
            return f"{OTHER_WEIGHTS}changed in place here and not named yet; {HOW_TO_NAME}"
        return unlike(there, self.now) if there.epoch or self.now.epoch else ""


def unlike(there: Weights, here: Weights) -> str:
    """Why caches that were computed with the weights of `there` mean nothing to those of `here`; empty if they do."""
    if there.name == here.name:
        return ""
    return (
        f"{OTHER_WEIGHTS}{there.name!r} there, {here.name!r} here (changed in place {there.epoch} times there, "
        f"{here.epoch} times here): have the same on both sides before requests go on, and {HOW_TO_NAME}"
    )


def version_name(version: str) -> str:
    """What a version is called, whether it was configured (`weights_version`) or told to a running instance."""
    text = version.encode(errors="backslashreplace").decode()
    if len(text) > MAX_NAME:
        text = f"{text[:MAX_NAME]} ({hashlib.blake2b(text.encode(), digest_size=8).hexdigest()})"
    return f"version {text}"

"""The recall task: hundreds of key-value pairs, then one key; the answer is the value that stood beside it.

    k17 v3 k201 v60 k5 v3 … ? k201        →  v60 .

Every key and every value is one token, so a prompt of `pairs` pairs has `2 * pairs + 2` tokens. The answer stands in
one place of the context only: a model that sees a cache whose pages are exchanged, stale, permuted or empty cannot
know it and is right in one of `VALUES` cases by chance. That is what makes the task a test of caches, which general
benchmarks are not: a model can often answer those from its weights.

Samples are drawn from a seeded generator, so training and evaluation never share one, and every run asks the same.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

KEYS = 256
VALUES = 64
ASK, END, BOS, EOS = "?", ".", "<s>", "</s>"
WORDS = [*(f"k{i}" for i in range(KEYS)), *(f"v{i}" for i in range(VALUES)), ASK, END, BOS, EOS]
WORD_IDS = {word: number for number, word in enumerate(WORDS)}
VOCAB_SIZE = 384
"""The words, padded to what two and three tensor-parallel ranks can share."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One question; `pairs` are (key, value) numbers, no key twice."""

    pairs: tuple[tuple[int, int], ...]
    key: int

    @property
    def prompt(self) -> str:
        told = " ".join(f"k{key} v{value}" for key, value in self.pairs)
        return f"{told} {ASK} k{self.key}"

    @property
    def answer(self) -> str:
        return f"v{dict(self.pairs)[self.key]}"


def samples(seed: int, count: int, pairs: int) -> list[Sample]:
    """`count` questions over `pairs` pairs each (at most KEYS), the same for the same seed."""
    generator = random.Random(seed)
    drawn = []
    for _ in range(count):
        keys = generator.sample(range(KEYS), pairs)
        told = tuple((key, generator.randrange(VALUES)) for key in keys)
        drawn.append(Sample(told, generator.choice(keys)))
    return drawn

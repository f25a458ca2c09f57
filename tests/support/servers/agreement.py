"""When an answer of a pair is the plain run's.

In float32 the tokens must be equal. In bfloat16 two instances round differently, so two tokens whose logits are nearly
equal may change places, and from there the answers part. Such a place is recognized by the plain run's own
log-probabilities: the pair's token must be within PARTING_GAP of the plain run's best. So that no difference hides
before such a place, the log-probabilities themselves are compared too, as long as both answers have the same tokens
before them: what was computed from a wrong cache is off by far more than rounding. So that none hides behind it,
whoever asks can go on from there with the plain run's token (`Cluster.check`).
"""

from __future__ import annotations

from tests.support.servers.workload import Answer

PARTING_GAP = 0.15
"""The largest difference between two tokens' log-probabilities in the plain run that may part the answers there.

A pair computes the last prompt token in a step of its own. A plain instance made to do so (steps of 1899 tokens for a
prompt of 1900) parts from one that does not where two tokens are 0.094 apart, and takes the pair's token.
"""

MOST_DRIFT = 0.5
"""The largest difference of a log-probability between two instances that passes. Up to 0.25 was seen between
tensor-parallel sizes, once, with equal bytes on both sides; the digests, not this limit, show that a cache is right."""


def disagreement(plain: Answer, answer: Answer, *, exact: bool) -> str:
    """How an answer differs from the plain run's; empty if it does not. `exact` allows no near-tie."""
    differs = f"{answer.tokens} instead of {plain.tokens}"
    if exact or len(answer.tokens) != len(plain.tokens):
        return "" if answer.tokens == plain.tokens else differs
    steps = range(len(plain.tokens))
    parting = parting_step(plain, answer)
    if parting is not None:
        best = plain.logprobs[parting]
        gap = max(best.values()) - best.get(answer.tokens[parting], float("-inf"))
        if gap > PARTING_GAP:
            return f"{differs}: no near-tie at step {parting}, where the plain run has {dict(best)}"
    drift = [_drift(plain, answer, step) for step in steps[: len(steps) if parting is None else parting + 1]]
    if answer.logprobs and max(drift) > MOST_DRIFT:
        return f"log-probabilities are off by {max(drift):.2f} at step {drift.index(max(drift))}"
    return ""


def parting_step(plain: Answer, answer: Answer) -> int | None:
    """First step at which two answers of equal length have other tokens."""
    pairs = zip(plain.tokens, answer.tokens, strict=True)
    return next((step for step, (expected, got) in enumerate(pairs) if expected != got), None)


def rest_of(plain: Answer, step: int) -> Answer:
    """The answer from `step` on: the one to the prompt with the tokens before it."""
    return Answer(plain.tokens[step:], None, plain.logprobs[step:])


def _drift(plain: Answer, answer: Answer, step: int) -> float:
    """Largest difference of a log-probability that both tell; infinite if they have no token in common."""
    if not answer.logprobs:
        return 0.0
    ours, theirs = plain.logprobs[step], answer.logprobs[step]
    return max((abs(ours[token] - theirs[token]) for token in ours.keys() & theirs.keys()), default=float("inf"))

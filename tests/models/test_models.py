"""The tiny models answer consistently in vLLM alone, so that a wrong token of a pair is the connector's doing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from examples.make_models import MODELS
from tests.support.servers.engine import Answer, Request, could_be, could_be_all, generate, rounds_to_bfloat16
from tests.support.servers.workload import prompts

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

LENGTHS = (1, 2, 16, 33, 65, 300, 1100)
CACHED_LENGTHS = (33, 130, 255, 256, 257, 513, 1000, 1900)
DECODED = 12
LOGPROBS = 5


def one_by_one(family: str, requests: Sequence[Request], *flags: str) -> list[Answer]:
    return [answer for [answer] in generate(family, [[request] for request in requests], flags=flags)]


@pytest.mark.parametrize("family", MODELS)
def test_a_decoded_token_is_the_first_token_of_a_prefill(family: str) -> None:
    """Decoding reads what earlier steps left in the caches, a prefill computes it anew; both must say the same."""
    asked = prompts(f"consistent {family}", LENGTHS)
    logprobs = LOGPROBS if rounds_to_bfloat16(family) else None
    flags = ("--no-enable-prefix-caching",)
    decoded = one_by_one(family, [Request(prompt, DECODED) for prompt in asked], *flags)
    grown = [
        (*prompt, *answer.tokens[:step])
        for prompt, answer in zip(asked, decoded, strict=True)
        for step in range(DECODED)
    ]
    prefilled = iter(one_by_one(family, [Request(prompt, 1, logprobs) for prompt in grown], *flags))
    wrong = []
    for prompt, answer in zip(asked, decoded, strict=True):
        for step, token in enumerate(answer.tokens):
            first = next(prefilled)
            if not could_be(token, first):
                wrong.append(f"{len(prompt)} + {step} tokens: decoded {token}, prefilled {first.tokens[0]}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("family", [name for name, model in MODELS.items() if model.prefix_caching])
def test_what_the_prefix_cache_has_gives_the_same_tokens(family: str) -> None:
    """Computed in chunks, and continued from cached blocks (states, too): both as computed at once."""
    asked = prompts(f"cached {family}", CACHED_LENGTHS)
    plain = one_by_one(family, [Request(prompt, DECODED) for prompt in asked], "--no-enable-prefix-caching")
    logprobs = LOGPROBS if rounds_to_bfloat16(family) else None
    requests = [Request(prompt, DECODED, logprobs) for prompt in asked]
    flags = ("--enable-prefix-caching", "--max-num-batched-tokens", "512")
    answers = one_by_one(family, [*requests, *requests], *flags)
    for expected, chunked, cached in zip(plain, answers, answers[len(asked) :], strict=False):
        assert could_be_all(expected, chunked), "computed in chunks"
        assert could_be_all(expected, cached), f"continued after {cached.cached} cached tokens"
    assert [answer.cached for answer in answers[: len(asked)]] == [0] * len(asked)
    assert answers[-1].cached > 1024, "most of the longest prompt is cached the second time"


def test_requests_of_a_hybrid_together_answer_as_alone() -> None:
    """Waves in which every block is given out again: a block that is wiped or shared by mistake changes tokens."""
    lengths = (40, 300, 520, 700, 260, 900, 600, 30, 1100, 280, 777, 512, 640, 333, 1200, 450)
    asked = [Request(prompt, 24) for prompt in prompts("waves", lengths)]
    answers = generate("kimi16", [*([request] for request in asked), asked, asked, asked])
    alone = [answer.tokens for [answer] in answers[: len(asked)]]
    for wave in answers[len(asked) :]:
        assert [answer.tokens for answer in wave] == alone

"""The reference attention backend answers as vLLM's own, in every layout and block size that tests use."""

from __future__ import annotations

import functools

import pytest

from tests.support.servers.engine import Request, generate
from tests.support.servers.workload import LENGTHS, prompts

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]

DECODED = 12
CASES = [
    ("gqa", "NHD", 16),
    ("gqa", "HND", 48),
    ("gqa", "BLNHC", 64),
    ("gqa", "BLHNC", 128),
    ("gqa", "NHD", 32),
    ("gqa6", "HND", 16),
    ("swa", "NHD", 16),
    ("swa", "BLNHC", 48),
]
"""Family, VLLM_KV_CACHE_LAYOUT, tokens per block: every layout and every block size at least once."""


def requests(family: str) -> list[Request]:
    return [Request(prompt, DECODED) for prompt in prompts(f"reference {family}", LENGTHS)]


@functools.cache
def plain(family: str) -> list[tuple[int, ...]]:
    """Tokens of vLLM's own backend, one request at a time."""
    return [answer.tokens for [answer] in generate(family, [[request] for request in requests(family)])]


@pytest.mark.parametrize(("family", "layout", "block_size"), CASES)
def test_tokens_are_those_of_vllms_own_backend(family: str, layout: str, block_size: int) -> None:
    asked = requests(family)
    answers = generate(
        family,
        [*([request] for request in asked), asked],
        flags=("--block-size", str(block_size), "--max-num-batched-tokens", "128", "--enable-prefix-caching"),
        environment={"PD_TEST_REFERENCE_ATTENTION": "1", "VLLM_KV_CACHE_LAYOUT": layout},
    )
    expected = plain(family)
    assert [answer.tokens for [answer] in answers[:-1]] == expected, "computed in chunks of 128 tokens"
    assert [answer.tokens for answer in answers[-1]] == expected, "continued from the prefix cache, all at once"
    # All whole blocks of a prompt without its last token.
    assert all(
        a.cached == (len(r.prompt) - 1) // block_size * block_size for a, r in zip(answers[-1], asked, strict=True)
    )

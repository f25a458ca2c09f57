"""`vllm-pd plan`: enough for the load, and no instance more."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.cli import main
from vllm_pd_connector.cli.load.plan import size
from vllm_pd_connector.cli.output import Exit

WORDS = [
    "--rate",
    "4",
    "--prefill-seconds",
    "0.5",
    "--token-seconds",
    "0.02",
    "--batch",
    "32",
    "--prompt-tokens",
    "1000",
    "--answer-tokens",
    "400",
    "--block-size",
    "16",
]


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *WORDS]) == Exit.OK
    assert capsys.readouterr().out.splitlines() == [
        "prefill: 3 instances, 67% of their time, 126 blocks each",
        "decode: 2 instances, 50% of their time, 2816 blocks each",
        "kv_lease_duration: 30",
    ]
    assert main(["plan", *WORDS, "--wait-seconds", "20", "--json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out)["kv_lease_duration"] == 60
    assert main(["plan", *WORDS, "--wait-seconds", "300"]) == Exit.OK
    assert capsys.readouterr().out.splitlines()[-2:] == ["kv_lease_duration: 900", "kv_lease_limit: 900"]


@given(
    rate=st.floats(0.01, 1e3), prefill_s=st.floats(1e-3, 10), token_s=st.floats(1e-4, 1), batch=st.integers(1, 512),
    prompt=st.integers(1, 100_000), answer=st.integers(1, 10_000), block=st.integers(1, 256), used=st.floats(0.1, 1),
)  # fmt: skip
def test_no_instance_is_used_for_more_and_none_is_too_many(
    rate: float, prefill_s: float, token_s: float, batch: int, prompt: int, answer: int, block: int, used: float
) -> None:
    found = size(rate, prefill_s, token_s, batch, prompt, answer, block, 1.0, used)
    for number, part in ((found.prefill, found.prefill_used), (found.decode, found.decode_used)):
        assert part <= used * 1.0001
        assert number == 1 or part * number / (number - 1) > used * 0.9999
    assert found.decode_blocks * block >= batch * (prompt + answer)


def test_what_fits_exactly_is_one_instance() -> None:
    """7 * 0.1 / 0.7 is a little more than 1 in floating point."""
    found = size(7.0, 0.1, 0.01, 64, 100, 10, 16, 1.0, 0.7)
    assert found.prefill == 1


def test_words_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in (["--rate", "-1"], ["--rate", "nan"], ["--prefill-seconds", "0"], ["--batch", "0"], ["--use", "2"]):
        assert main(["plan", *WORDS, *wrong]) == Exit.USAGE
        assert len(capsys.readouterr().err.splitlines()) == 1

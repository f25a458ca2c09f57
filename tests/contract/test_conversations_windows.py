"""Conversations of models with windows, of which a part may be gone before it is asked for, or has never come."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput

from tests.support.scheduler.engines import FULL, SAMPLED, WINDOWED, Engine, prefilled, read
from tests.support.scheduler.talks import PROMPT, both, told

GROUPS = (FULL, WINDOWED)


def ends_in_drafts(decode: Engine, name: str, params: Any, max_tokens: int, drafts: int) -> None:
    """A decode request whose last step accepts `drafts` drafts, of which its answer takes none."""
    request = decode.add(name, PROMPT, params, max_tokens=max_tokens)
    decode.step()
    assert read(decode.receive_of(name))
    decode.step(received={name})
    while request.num_tokens + len(decode.in_flight) < len(PROMPT) + max_tokens - 1:
        decode.step()
    decode.catch_up()
    decode.scheduler.num_spec_tokens = drafts
    request.spec_token_ids = [SAMPLED] * drafts
    output = decode.scheduler.schedule()
    assert output.num_scheduled_tokens == {name: 1 + drafts}
    decode.look(output, ModelRunnerOutput([name], {name: 0}, [[SAMPLED] * (1 + drafts)], prompt_logprobs_dict={}))


def test_a_window_that_drafts_have_moved_beyond_the_answer_is_not_kept(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = both(engine, groups=GROUPS)
    with caplog.at_level(logging.INFO):
        ends_in_drafts(decode, "d-1", prefilled(prefill, "p-1", PROMPT), max_tokens=13, drafts=3)
    assert decode.ended("d-1").finish_reason is FinishReason.LENGTH
    assert told(decode, "d-1") is None
    assert caplog.text.count("not kept for a next turn: ") == 1
    decode.check_empty()

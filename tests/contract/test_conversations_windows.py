"""Conversations of models with windows, of which a part may be gone before it is asked for, or has never come.

Windows look back on 24 tokens and blocks have 16. A block comes in part where the other side's blocks are smaller; here
the test says so, as the workers would. `tests/scheduler/leases/test_tables.py` has blocks of unequal sizes.
"""

from __future__ import annotations

import logging
from typing import Any

import pytest
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import ModelRunnerOutput

from tests.support.scheduler.engines import BLOCK, FULL, SAMPLED, WINDOWED, Engine, given_back, prefilled, read
from tests.support.scheduler.talks import NEXT, PROMPT, both, decoded, first_turn, next_prompt, told, turn
from vllm_pd_connector.metadata import WorkerReport

GROUPS = (FULL, WINDOWED)
IN_PART = {1: 1}
"""Tokens 16 to 31 of the windowed group: in the window of the prompts' ends here, and of the next 15 positions."""
WINDOW = 24
BEHIND = 32 + WINDOW - 1
"""The least position that looks at nothing before token 32."""


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
    """Or it has not moved: vLLM 0.33 lets go only what steps that have ended do not look at any more."""
    prefill, decode = both(engine, groups=GROUPS)
    with caplog.at_level(logging.INFO):
        ends_in_drafts(decode, "d-1", prefilled(prefill, "p-1", PROMPT), max_tokens=13, drafts=3)
    assert decode.ended("d-1").finish_reason is FinishReason.LENGTH
    params = told(decode, "d-1")
    assert caplog.text.count("not kept for a next turn: ") == (params is None)
    if params is None:
        decode.check_empty()
        return
    begin = params["pd_connector"]["first_blocks"][1] * BLOCK
    lengths = [tokens for tokens, _ in params["pd_connector"]["prefixes"]]
    assert lengths[-1] == len(PROMPT) + 13 - 1 and lengths[0] - (WINDOW - 1) >= begin


def test_a_conversation_of_which_nothing_can_be_read_is_not_kept(
    engine: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = both(engine, groups=GROUPS)
    monkeypatch.setattr(decode.connector.scheduler.producer.lending, "prefixes", lambda *_: ())
    with caplog.at_level(logging.INFO):
        assert decoded(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT)) is None
    assert caplog.text.count("not kept for a next turn: ") == 1
    decode.check_empty()


def lent(decode: Engine, params: Any, max_tokens: int, report: WorkerReport) -> Any:
    """A decode request that is answered from what has come; what it answers for the next turn."""
    decode.add("d-1", PROMPT, params, max_tokens=max_tokens)
    decode.step()
    assert read(decode.receive_of("d-1"))
    decode.step(received={"d-1"}, report=report)
    decode.run("d-1")
    decode.rest()
    return told(decode, "d-1")


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "in part"])
def test_a_block_that_came_in_part_is_lent_to_nobody(engine: Any, whole: bool) -> None:
    """The window still reaches into it when the answer ends, and who goes on from an earlier prefix looks at more."""
    prefill, decode = both(engine, groups=GROUPS)
    report = WorkerReport(unshareable={} if whole else {"d-1": IN_PART})
    params = lent(decode, prefilled(prefill, "p-1", PROMPT), BEHIND - 1 - len(PROMPT), report)
    if whole:
        assert params["pd_connector"]["first_blocks"][1] == 1
        assert params["pd_connector"]["prefixes"][0][0] < BEHIND
    else:
        assert params is None
        decode.check_empty()
    given_back(prefill)


def test_a_turn_is_lent_from_behind_a_block_that_came_in_part(engine: Any) -> None:
    prefill, decode = both(engine, groups=GROUPS)
    report = WorkerReport(unshareable={"d-1": IN_PART})
    params = lent(decode, prefilled(prefill, "p-1", PROMPT), BEHIND + 1 - len(PROMPT), report)
    assert params["pd_connector"]["first_blocks"][1] == 2
    assert [tokens for tokens, _ in params["pd_connector"]["prefixes"]] == [BEHIND]


def received_in_part(prefill: Engine, prompt: list[int], params: Any) -> None:
    """The next turn, of which prefill receives a window's first block in part; until its end."""
    prefill.scheduler.reset_prefix_cache()
    turn(prefill, "p-2", prompt, params)
    receive = prefill.receive_of("p-2")
    assert receive.blocks[1].first_block == 1, "all of the window is received"
    assert read(receive)
    prefill.step(received={"p-2"}, report=WorkerReport(unshareable={"p-2": IN_PART}))
    prefill.run("p-2")


def test_a_block_of_a_turn_that_came_in_part_is_not_handed_on(engine: Any) -> None:
    prefill, decode = both(engine, groups=GROUPS)
    params = first_turn(prefill, decode)
    prompt = [*next_prompt(), 55, 56]
    assert len(prompt) - 1 == BEHIND, "decode computes the last token"
    received_in_part(prefill, prompt, params)
    handed = told(prefill, "p-2")
    assert handed is not None and handed["remote_num_tokens"] == BEHIND
    assert handed["pd_connector"]["first_blocks"][1] == 2, "where decode's window begins"
    assert sum(step.get("p-2", 0) for step in prefill.scheduled) == BEHIND - params["remote_num_tokens"]


def test_a_turn_whose_decode_needs_a_block_that_came_in_part_is_computed(
    engine: Any, caplog: pytest.LogCaptureFixture
) -> None:
    prefill, decode = both(engine, groups=GROUPS)
    params = first_turn(prefill, decode)
    prompt = [*next_prompt(), 55]
    assert len(prompt) - 1 == BEHIND - 1
    with caplog.at_level(logging.INFO):
        received_in_part(prefill, prompt, params)
    assert caplog.text.count("all is computed: its window came in part") == 1
    handed = told(prefill, "p-2")
    assert handed is not None and handed["remote_num_tokens"] == BEHIND - 1
    assert handed["pd_connector"]["first_blocks"][1] < 2, "all that decode looks at"
    assert sum(step.get("p-2", 0) for step in prefill.scheduled) == BEHIND - 1
    given_back(decode)
    assert prefill.shared([*prompt[:-1], *NEXT]) == 48, "what was computed is whole"

"""What is known of a cache is what it holds, whatever is computed, evicted and lost on the way."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.proxy.caches import CLEARED, FULL, ModelCache, Tokens, batch, removed, stored
from vllm_pd_connector.errors import ProtocolError
from vllm_pd_connector.proxy.kv_events.block_keys import PromptBlocks, prompt_blocks
from vllm_pd_connector.proxy.kv_events.held_blocks import HeldBlocks
from vllm_pd_connector.proxy.kv_events.known_prefixes import Announcements, KnownPrefixes, Loss

PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=9).map(tuple)
STEPS = st.one_of(
    st.tuples(st.sampled_from(["compute", "twice"]), PROMPTS),
    st.tuples(st.just("evict"), st.integers(0, 50)),
    st.tuples(st.sampled_from(["clear", "restart"]), st.none()),
)
MODEL = "m"


def blocks(prompt: Tokens | list[int], model: str = MODEL, salt: str = "") -> PromptBlocks:
    return PromptBlocks(list(prompt), model, salt)


def step(cache: ModelCache, what: str, how: object) -> None:
    match what, how:
        case "compute", tuple():
            cache.compute(how)
        case "twice", tuple():
            cache.compute(how, twice=True)
        case "evict", int():
            cache.evict(how)
        case "clear", _:
            cache.clear()
        case "restart", _:
            cache.restart()


def hear(known: Announcements, cache: ModelCache, replays: bool) -> None:
    """The last batch comes; what is missing before is replayed if the engine does that."""
    number = len(cache.log) - 1
    missing = known.missing_from(number)
    if missing is not None and replays:
        for earlier in range(missing, len(cache.log)):
            known.take(earlier, cache.log[earlier])
    known.take(number, cache.log[number])


@given(st.integers(1, 3), st.lists(STEPS, max_size=30), st.lists(PROMPTS, min_size=1, max_size=5))
def test_who_hears_everything_knows_what_is_held(
    block_size: int, steps: list[tuple[str, object]], asked: list[Tokens]
) -> None:
    cache, known = ModelCache(block_size), Announcements()
    for what, how in steps:
        before = len(cache.log)
        step(cache, what, how)
        if len(cache.log) != before or what == "restart":
            hear(known, cache, replays=False)
        for prompt in asked:
            assert known.held.length(blocks(prompt), adapter=False) == cache.holds(prompt)
    assert set(known.losses) <= {Loss.RESTART}


@given(st.lists(st.tuples(STEPS, st.booleans()), max_size=40), st.lists(PROMPTS, min_size=1, max_size=5), st.booleans())
def test_who_misses_something_never_knows_more_than_is_held(
    steps: list[tuple[tuple[str, object], bool]], asked: list[Tokens], replays: bool
) -> None:
    cache, known = ModelCache(2), Announcements()
    for (what, how), comes in steps:
        before = len(cache.log)
        step(cache, what, how)
        if len(cache.log) != before or what == "restart":
            # The first batch of another life tells it; the module says what is not told apart without it.
            if not comes and what != "restart":
                continue
            hear(known, cache, replays)
            for prompt in asked:
                length, held = known.held.length(blocks(prompt), adapter=False), cache.holds(prompt)
                assert length == held if replays else length <= held


def announced(*events: object) -> HeldBlocks:
    known = Announcements()
    known.take(0, batch(*events))
    return known.held


def length(held: HeldBlocks, prompt: list[int], **more: str) -> int:
    return held.length(blocks(prompt, **more), adapter=False)


def test_a_block_held_twice_is_held_until_both_copies_are_gone() -> None:
    twice = [stored([b"a"], None, [1, 2], 2, **FULL)] * 2
    gone = removed([b"a"], group_idx=0)
    assert [length(announced(*twice, *[gone] * n), [1, 2]) for n in range(4)] == [2, 2, 0, 0]


def test_what_hangs_on_an_unknown_parent_is_not_held() -> None:
    held = announced(stored([b"b"], b"a", [3, 4], 2, **FULL))
    assert length(held, [3, 4]) == length(held, [1, 2, 3, 4]) == len(held) == 0


def test_fewer_hashes_than_blocks_are_placed_nowhere() -> None:
    held = announced(stored([b"b"], None, [1, 2, 3, 4], 2, **FULL), stored([b"c"], b"b", [5, 6], 2, **FULL))
    assert len(held) == 0


def test_groups_with_full_attention_decide_and_all_must_hold_a_prefix() -> None:
    window = stored([b"a", b"b"], None, [1, 2, 3, 4], 2, group_idx=0, kv_cache_spec_kind="sliding_window")
    full = stored([b"a", b"b"], None, [1, 2, 3, 4], 2, group_idx=1, kv_cache_spec_kind="full_attention")
    other = full | {"group_idx": 2}
    assert length(announced(window), [1, 2, 3, 4]) == 4, "the only group"
    assert length(announced(window, full), [1, 2, 3, 4]) == 4
    assert length(announced(window, full, removed([b"a"], group_idx=0)), [1, 2, 3, 4]) == 4
    assert length(announced(full, window, removed([b"b"], group_idx=1)), [1, 2, 3, 4]) == 2
    assert length(announced(full, other, removed([b"b"], group_idx=2)), [1, 2, 3, 4]) == 2
    assert length(announced(window, window | {"group_idx": 3}), [1, 2, 3, 4]) == 0, "none keeps everything"


def test_groups_with_blocks_of_other_sizes_hold_the_shortest() -> None:
    fine = stored([b"a", b"b", b"c"], None, [1, 2, 3, 4, 5, 6], 2, group_idx=0, kv_cache_spec_kind="full_attention")
    coarse = stored([b"b"], None, [1, 2, 3, 4], 4, group_idx=1, kv_cache_spec_kind="mla_attention")
    assert length(announced(fine, coarse), [1, 2, 3, 4, 5, 6]) == 4


def test_the_first_part_of_a_block_is_passed_over() -> None:
    part, whole = stored([b"a"], None, [1, 2], 2, **FULL), stored([b"b"], None, [1, 2, 3, 4], 4, **FULL)
    for events in ((part, whole), (whole, part), (part, whole, removed([b"a"], group_idx=0))):
        assert length(announced(*events), [1, 2, 3, 4]) == 4


@pytest.mark.parametrize("elsewhere", [{"medium": "CPU"}, {"medium": "STORAGE"}, {"locality": "REMOTE"}])
def test_what_is_stored_elsewhere_is_not_held_and_its_loss_is_none(elsewhere: dict[str, str]) -> None:
    here = stored([b"a"], None, [1, 2], 2, **FULL)
    assert length(announced(here | elsewhere), [1, 2]) == 0
    assert length(announced(here, removed([b"a"], group_idx=0) | elsewhere), [1, 2]) == 2


def test_a_salt_and_an_adapter_part_what_is_held() -> None:
    plain = stored([b"a", b"b"], None, [1, 2, 3, 4], 2, extra_keys=[None, None], **FULL)
    salted = stored([b"c", b"d"], None, [1, 2, 3, 4], 2, extra_keys=[["s"], None], **FULL)
    adapted = stored([b"e"], None, [1, 2], 2, **FULL) | {"lora_name": "l", "extra_keys": [["l"]]}
    known = KnownPrefixes()
    for url, events in {"plain": [plain], "salted": [salted], "adapted": [adapted]}.items():
        known.begin(url)
        known.take(url, 0, batch(*events))
    urls = ["plain", "salted", "adapted", "unknown"]

    def lengths(**body: object) -> tuple[int, ...]:
        return tuple(known.lengths(prompt_blocks({"prompt": [1, 2, 3, 4], **body}), urls).values())

    assert lengths(model="m") == (4, 0, 0)
    assert lengths(model="m", cache_salt="s") == (0, 4, 0)
    assert lengths(model="l") == (0, 0, 2)
    assert lengths(model="l", cache_salt="s") == (0, 0, 0)


@pytest.mark.parametrize("prompt", ["text", None, [], ["text"], [1, -1], [1, 1 << 32], [1, 2.0], [[1]]])
def test_a_prompt_without_token_ids_has_no_blocks(prompt: object) -> None:
    found = prompt_blocks({"prompt": prompt})
    assert found is None or found.key(0, 1, adapter=False) is None
    assert KnownPrefixes().lengths(None, ["a"]) == {}


def test_a_salt_that_is_no_text_leaves_nothing_known() -> None:
    assert prompt_blocks({"prompt": [1], "cache_salt": "\ud800"}) is None


def test_hashes_may_be_numbers() -> None:
    name = (1 << 64) - 1
    assert (
        length(announced(stored([name], None, [1, 2], 2, **FULL), stored([7], name, [3, 4], 2, **FULL)), [1, 2, 3, 4])
        == 4
    )


UNREADABLE = {
    "no batch": b"\xc1",
    "no array": b"\x80",
    "an unknown event": batch({"type": "BlockMoved"}),
    "no block size": batch(stored([b"a"], None, [1], 0)),
    "a negative token": batch(stored([b"a"], None, [-1], 1)),
    "an enormous token": batch(stored([b"a"], None, [1 << 32], 1)),
    "a long hash": batch(stored([bytes(65)], None, [1], 1)),
    "extras nested without end": batch(stored([b"a"], None, [1], 1, extra_keys=[7])).replace(
        b"\xaaextra_keys\x91\x07", b"\xaaextra_keys\x91" + b"\x91" * 100_000 + b"\xc0"
    ),
    "nested without end": b"\x93\x00" + b"\x91" * 5000 + b"\xc0\x00",
}


@pytest.mark.parametrize("payload", UNREADABLE.values(), ids=UNREADABLE)
def test_a_batch_that_cannot_be_read_makes_all_forgotten(payload: bytes) -> None:
    known = Announcements()
    known.take(0, batch(stored([b"a"], None, [1, 2], 2, **FULL)))
    with pytest.raises(ProtocolError, match="KV-cache events"):
        known.take(1, payload)
    assert len(known.held) == 0 and known.losses == {Loss.UNREADABLE: 1}
    known.take(2, batch(stored([b"a"], None, [1, 2], 2, **FULL)))
    assert length(known.held, [1, 2]) == 2


def test_more_blocks_than_an_engine_may_hold_make_all_forgotten() -> None:
    known = Announcements(limit=2)
    with pytest.raises(ProtocolError, match="3 blocks held there, at most 2 here"):
        known.take(0, batch(stored([b"a", b"b", b"c"], None, [1, 2, 3], 1, **FULL)))
    assert len(known.held) == 0


def test_fields_that_are_unknown_here_are_passed_over() -> None:
    later = stored([b"a"], None, [1, 2], 2, lookahead_token_ids=[[3]], session_id="s", anything=[{}], **FULL)
    assert length(announced(later, CLEARED, later), [1, 2]) == 2

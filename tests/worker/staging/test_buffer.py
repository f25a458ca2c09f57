"""Slots of the staging buffer are apart, and one holder leaves half of it to others, however small its slots are."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.effort import examples
from vllm_pd_connector.worker.staging.buffer import StagingBuffer

SECTION, SECTIONS = 640, 8
STEPS = st.lists(st.one_of(st.tuples(st.integers(1, SECTION), st.integers(0, 2)), st.none()), max_size=80)


def sections_of(held: dict[int, tuple[int, int]], holder: int) -> set[int]:
    return {slot // SECTION for slot, (_, who) in held.items() if who == holder}


@settings(max_examples=examples(300), deadline=None)
@given(st.integers(0, 63), STEPS)
def test_slots_are_apart_and_inside_one_section_and_a_holder_has_half_of_these(rest: int, steps: list) -> None:
    length, held = SECTIONS * SECTION + rest, {}
    staging = StagingBuffer(length, SECTION)
    for step in steps:
        if step is None:
            if held:
                staging.give(held.popitem()[0])
            continue
        size, holder = step
        allowed = staging.allows(size, holder)
        if (slot := staging.take(size, holder)) is None:
            full = all(any(at // SECTION == section for at in held) for section in range(SECTIONS))
            assert full or not allowed, "a section was empty"
            continue
        assert allowed and slot % 64 == 0 and slot // SECTION == (slot + size - 1) // SECTION < SECTIONS
        assert all(slot + size <= at or at + length <= slot for at, (length, _) in held.items())
        held[slot] = size, holder
        assert len(sections_of(held, holder)) <= SECTIONS // 2
    for slot in held:
        staging.give(slot)
    assert staging.free == length and not any(section.holders for section in staging._sections)


def test_small_slots_that_never_come_back_leave_room_for_the_largest_chunks_in_half_of_the_buffer() -> None:
    """Spread over the buffer, eight of them left no hole for one."""
    staging, healthy, pinned = StagingBuffer(SECTIONS * SECTION, SECTION), [], 0
    while (slot := staging.take(SECTION - 64, 0 if len(healthy) < 4 else 1)) is not None:
        healthy.append(slot)
        pinned += staging.take(64, 2) is not None
    assert len(healthy) == SECTIONS and pinned == SECTIONS // 2
    for slot in healthy:
        staging.give(slot)
    assert [staging.take(SECTION, 3) is not None for _ in range(SECTIONS)] == [True] * 4 + [False] * 4


def test_a_holder_fills_its_own_sections_before_it_begins_another() -> None:
    staging = StagingBuffer(SECTIONS * SECTION, SECTION)
    first, other = staging.take(64, 0), staging.take(SECTION, 1)
    assert (first, other) == (0, SECTION)
    assert all(slot is not None and slot < SECTION for slot in (staging.take(64, 0) for _ in range(9)))
    assert staging.take(64, 0) == 2 * SECTION
    staging.give(first)
    assert staging.take(64, 1) == 0, "who has no room of its own shares"
    assert staging.take(SECTION, 0) == 3 * SECTION


def test_small_slots_of_many_holders_are_out_at_once() -> None:
    staging = StagingBuffer(SECTIONS * SECTION, SECTION)
    assert all(staging.take(64, holder) is not None for holder in range(80)) and staging.free == 0


def test_a_buffer_of_no_bytes_has_no_room() -> None:
    staging = StagingBuffer(0, 0)
    assert staging.free == 0 and not staging._sections and staging.take(64, 0) is None

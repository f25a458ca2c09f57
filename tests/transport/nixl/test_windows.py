"""How much of a peer's transfers runs at once, by how long the library's calls take."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm_pd_connector.transport.nixl import window as windows
from vllm_pd_connector.transport.nixl.window import Window

MIB = 1 << 20


class Clocks:
    """The clock and a thread's processor time, as far as calls of a library let them go on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.clock, self.busy = 1000.0, 0.0
        self.asked = 0
        self.window = Window()
        clocks = SimpleNamespace(monotonic=lambda: self.clock, thread_time=self._thread_time)
        monkeypatch.setattr(windows, "time", clocks)

    def _thread_time(self) -> float:
        self.asked += 1
        return self.busy

    def look(self, took: float, ended: int, busy: float | None = None) -> int:
        """The window after a look that took so long, of this thread's processor time so much; what ended in it had
        been posted before."""
        self.window.running += ended
        began = self.window.begin()
        self.clock, self.busy = self.clock + took, self.busy + (took if busy is None else busy)
        self.window.looked(ended, began)
        return self.window.size

    def post(self, took: float, cost: int, *, runs: bool, writes: bool = False) -> None:
        began = self.window.begin()
        self.clock, self.busy = self.clock + took, self.busy + took
        self.window.posted(cost, began, runs=runs, writes=writes)

    def copy(self, *, writes: bool = False) -> None:
        """So many posts that copied 64 MiB in no time that the library's calls are known to copy."""
        for _ in range(windows._STRAIGHT):
            self.post(0.00001, 64 * MIB, runs=False, writes=writes)


def test_the_window_is_what_calls_copy_in_a_few_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    assert clocks.window.size == 2 * MIB
    assert clocks.look(0.0003, 2 * MIB) > 6 * MIB, "the first call tells more than what was supposed before"
    for _ in range(200):
        clocks.look(0.001, MIB)
        clocks.look(0.0001, 0)
    assert clocks.window.size == pytest.approx(3.5 * MIB, rel=0.1), "1 MiB takes a millisecond: all of it may have come"
    for _ in range(200):
        clocks.look(0.001, 10 * MIB)
    assert clocks.window.size == pytest.approx(35 * MIB, rel=0.1)
    for _ in range(200):
        clocks.look(0.00002, 16 * MIB)
    assert clocks.window.size == 256 * MIB, "the library's calls copy nothing"
    for _ in range(200):
        clocks.look(0.002, MIB)
    assert clocks.window.size == 2 * MIB


def test_of_what_is_written_a_call_may_copy_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP it goes on while the peer makes room, for the whole window."""
    clocks = Clocks(monkeypatch)
    clocks.post(0.0, MIB, runs=True, writes=True)
    for _ in range(200):
        clocks.look(0.001, 10 * MIB)
    assert clocks.window.size == pytest.approx(25 * MIB, rel=0.1)
    clocks.post(0.0, MIB, runs=True)
    clocks.look(0.001, 10 * MIB)
    assert clocks.window.size == pytest.approx(25 * MIB, rel=0.1), "a look copies of both what can be copied"
    clocks.look(0.003, 10 * MIB)
    clocks.look(0.003, 10 * MIB)
    assert clocks.window.size == pytest.approx(25 / 3 * MIB, rel=0.01), "that was too long, and is believed at once"


def test_posts_are_known_to_copy_when_many_ended_in_their_calls_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Over TCP some do where the peer is quick, up to 8 in a row, and it may be slow in the next."""
    clocks = Clocks(monkeypatch)
    window = clocks.window
    for _ in range(10):
        for _ in range(windows._STRAIGHT - 1):
            clocks.post(0.001, 10 * MIB, runs=False, writes=True)
            assert not window.inline and window.descriptors == 128
        clocks.post(0.001, 10 * MIB, runs=True, writes=True)
        clocks.look(0.0, 0)
        window.forget(window.running)
    for _ in range(100):
        clocks.post(0.001, 10 * MIB, runs=False, writes=True)
    assert window.copies and window.inline and window.descriptors == 256
    assert window.size == pytest.approx(35 * MIB, rel=0.1), "what is written is what was asked for, as with reads"
    clocks.post(0.0, 10 * MIB, runs=True, writes=True)
    assert not window.inline and window.size == pytest.approx(25 * MIB, rel=0.1)


def test_a_read_that_ended_in_its_call_has_left_nothing_for_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether posts copy or the peer was quick: the next one may be long."""
    clocks = Clocks(monkeypatch)
    clocks.post(0.0, MIB, runs=True)
    clocks.window.forget(MIB)
    assert not clocks.window.inline and clocks.window.descriptors == 128
    clocks.post(0.001, MIB, runs=False)
    assert clocks.window.inline and clocks.window.descriptors == 256 and not clocks.window.copies
    assert clocks.window.room(clocks.clock) == clocks.window.size
    clocks.post(0.001, MIB, runs=False, writes=True)
    assert not clocks.window.inline


def test_many_looks_that_find_little_do_not_widen_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over TCP one of the next copies all that they let in."""
    clocks = Clocks(monkeypatch)
    for _ in range(1000):
        assert clocks.look(0.0005, MIB // 2) <= 4 * MIB


def test_one_call_that_copied_for_too_long_fits_the_window_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    for _ in range(200):
        clocks.look(0.001, 10 * MIB)
    clocks.look(0.01, 10 * MIB)
    clocks.look(0.01, 10 * MIB)
    assert clocks.window.size == pytest.approx(3.5 * MIB, rel=0.01)


def test_a_call_is_long_that_took_this_threads_time_and_not_one_in_which_others_had_the_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks(monkeypatch)
    clocks.look(0.0001, 2 * MIB)
    assert clocks.look(20, MIB, busy=10) > 4 * MIB, "nothing is known of it but the clock"
    for _ in range(100):
        assert clocks.look(20, MIB, busy=0.0005) >= 4 * MIB
    assert clocks.look(20, MIB, busy=10) == 2 * MIB


def test_the_kernel_is_asked_for_a_threads_time_only_for_a_while_after_a_call_that_seemed_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks(monkeypatch)
    for _ in range(5):
        clocks.look(0.0029, MIB)
        clocks.look(0.0001, MIB)
    clocks.look(0.0031, MIB)
    assert not clocks.asked
    for _ in range(windows._TIMED):
        clocks.look(0.0001, MIB)
    assert clocks.asked == windows._TIMED
    clocks.look(0.0001, MIB)
    assert clocks.asked == windows._TIMED, "it was long ago"


@pytest.mark.parametrize("runs", [True, False])
def test_all_of_the_window_is_written_where_nothing_runs_and_what_is_left_of_it_once_half_has_ended(
    monkeypatch: pytest.MonkeyPatch, runs: bool
) -> None:
    """What posts copy has moved when they return, so only their number counts."""
    clocks = Clocks(monkeypatch)
    window = clocks.window
    clocks.post(0.0002, 2 * MIB, runs=runs, writes=True)
    window.looked(window.running, window.begin())
    assert window.room(clocks.clock) == window.size >= 4 * MIB, "what it begins with is not believed for long"
    clocks.post(0.0, size := window.size, runs=True, writes=True)
    assert window.room(clocks.clock) == 0
    window.looked(size // 4, window.begin())
    assert window.room(clocks.clock) == 0
    window.looked(size // 4, window.begin())
    assert window.room(clocks.clock) == window.size - window.running >= window.size // 2


def test_what_looks_read_is_posted_in_parts_of_the_window_so_that_some_runs_when_one_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks(monkeypatch)
    window = clocks.window
    for _ in range(100):
        clocks.look(0.001, 10 * MIB)
    part = window.size // 4
    for running in range(4):
        assert window.room(clocks.clock) == part and window.running == running * part
        clocks.post(0.0, part, runs=True)
    assert window.room(clocks.clock) == 0 and not window.unmoved
    window.forget(part)
    assert window.room(clocks.clock) == part
    clocks.copy()
    window.forget(3 * part)
    assert window.room(clocks.clock) == window.size, "where the call that posts copies, it is all"


def test_no_part_is_shorter_than_a_descriptor_so_that_the_window_bounds_all_that_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clocks = Clocks(monkeypatch)
    assert clocks.window.room(clocks.clock) == MIB
    clocks.post(0.0, MIB + (32 << 10), runs=True)
    clocks.window.size = 2 * MIB
    assert clocks.window.room(clocks.clock) == 0


def test_a_descriptor_may_be_long_where_the_call_that_posts_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    assert clocks.window.longest == MIB
    clocks.copy()
    assert clocks.window.longest == 8 * MIB
    clocks.post(0.01, 2 * MIB, runs=False)
    clocks.post(0.01, 2 * MIB, runs=False)
    assert clocks.window.size == 2 * MIB and clocks.window.longest == MIB
    clocks.copy()
    clocks.post(0.0, MIB, runs=True)
    assert clocks.window.longest == MIB, "over TCP it is not"
    clocks.copy()
    for _ in range(2):
        assert clocks.window.longest == 8 * MIB
        clocks.look(0.01, 2 * MIB)
        if clocks.window.size == 2 * MIB:
            break
    assert clocks.window.longest == MIB, "what was posted before says that calls are slow"


def test_what_stands_still_does_not_keep_the_peers_others_from_being_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    clocks = Clocks(monkeypatch)
    clocks.post(0.0, 5 * MIB, runs=True)
    assert clocks.window.room(clocks.clock) == 0
    clocks.clock += 0.2
    assert clocks.window.room(clocks.clock) == 2 * MIB
    clocks.window.forget(5 * MIB)
    assert clocks.window.running == 0 and clocks.window.room(clocks.clock) == MIB


def test_while_nothing_ends_less_and_less_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what a slow link has under way nothing ends before nearly all has come, and its receives would have no more
    time; a quick one's would come in one look when it goes on."""
    clocks = Clocks(monkeypatch)
    window = clocks.window
    clocks.post(0.0, 5 * MIB, runs=True)
    for still in (0.1, 0.2, 0.4):
        clocks.clock += still * 0.9
        assert window.room(clocks.clock) == 0
        clocks.clock += still * 0.2
        assert window.room(clocks.clock) == 2 * MIB
        clocks.post(0.0, 2 * MIB, runs=True)
    window.forget(MIB)
    assert window.room(clocks.clock) == 0
    clocks.clock += 0.11
    assert window.room(clocks.clock) == 2 * MIB, "it moves"

"""Which prefills for decode instances begin, and which wait for leases to end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from vllm_pd_connector.scheduler.leases.lease_share import LeaseShare

LIMIT = 10


class Share(LeaseShare):
    """Of a pool of 20 blocks, half; `held` are blocks by request."""

    def __init__(self) -> None:
        super().__init__(0.5, lambda num_tokens: num_tokens)
        self.held: Mapping[str, int] = {}
        stand_in: Any = self
        self.bind(stand_in)

    num_in_pool = 2 * LIMIT

    @property
    def num_blocks(self) -> int:
        return sum(self.held.values())

    def num_held_for(self, request_id: str) -> int:
        return self.held.get(request_id, 0)


def admits(of: Share, name: str, held: Mapping[str, int] | None = None) -> bool:
    of.held = held or {}
    return of.admits(name)


def test_what_is_no_prefill_for_a_decode_instance_begins_whatever_is_leased() -> None:
    assert admits(Share(), "plain", {"a": 100})


def test_a_prefill_begins_while_what_is_leased_and_under_way_leaves_room_for_it() -> None:
    of = Share()
    for name in "abc":
        of.add(name, 4)
    assert admits(of, "a", {"lease": 2})
    of.begin("a")
    assert admits(of, "b", {"lease": 2}), "2 + 4 + 4"
    of.begin("b")
    assert not admits(of, "c", {"lease": 2})
    assert of.step() == {"c"} and of.num_held_back == 1
    assert not of.step() and not of.num_held_back


def test_no_more_is_given_up_for_a_prefill_than_it_needs() -> None:
    of, kept = Share(), {"oldest": 3, "older": 3, "new": 3}

    def give_up() -> bool:
        if not kept:
            return False
        del kept[next(iter(kept))]
        return True

    of.held = kept
    of.add("a", 4)
    assert of.admits("a", give_up) and list(kept) == ["older", "new"]
    of.add("b", 20)
    of.begin("a")
    assert not of.admits("b", give_up) and not kept
    assert not of.admits("b", give_up), "and nothing is given up behind one that is held back"


def test_a_preempted_prefill_begins_again() -> None:
    of = Share()
    of.add("a", 4)
    of.begin("a")
    assert admits(of, "a", {"lease": 10})


def test_a_prefill_above_the_share_begins_when_nothing_else_is_leased_or_under_way() -> None:
    of = Share()
    of.add("large", 11)
    assert not admits(of, "large", {"lease": 1})
    of.step()
    of.add("small", 1)
    of.begin("small")
    assert not admits(of, "large")
    of.step()
    of.end("small")
    assert admits(of, "large")


def test_small_prefills_do_not_pass_one_that_is_held_back() -> None:
    of = Share()
    of.add("large", 9)
    of.add("small", 1)
    assert not admits(of, "large", {"lease": 2})
    assert not admits(of, "small", {"lease": 2})
    assert len(of.step()) == 2
    assert admits(of, "small", {"lease": 2}), "nobody before it was held back in this step"


def test_blocks_that_a_running_prefill_holds_already_are_counted_once() -> None:
    of = Share()
    of.add("a", 6)
    of.begin("a")
    of.add("b", 4)
    assert admits(of, "b", {"a": 5})


@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 14)),
            st.tuples(st.sampled_from(["end", "read"]), st.integers(0, 20)),
        ),
        max_size=60,
    )
)
def test_leases_never_take_more_than_their_share_and_prefills_begin_in_order(
    events: list[tuple[str, int]],
) -> None:
    """`end` ends a prefill that has begun, which leases its blocks; `read` ends a lease."""
    of, held, waits, begun, order = Share(), dict[str, int](), list[str](), list[str](), list[str]()
    needs: dict[str, int] = {}
    for number, (event, value) in enumerate(events):
        if event == "add":
            name = f"r{number}"
            needs[name] = value
            of.add(name, value)
            waits.append(name)
        elif event == "end" and begun:
            name = begun.pop(value % len(begun))
            held[name] = needs[name]
            of.end(name)
        elif event == "read" and held:
            del held[sorted(held)[value % len(held)]]
        for name in list(waits):
            if admits(of, name, held):
                of.begin(name)
                waits.remove(name)
                begun.append(name)
                order.append(name)
        assert of.step() == set(waits)
        taken = sum(held.values()) + sum(needs[name] for name in begun)
        assert taken <= LIMIT or len(held) + len(begun) == 1
        assert begun or held or not waits, "somebody waits for nothing"
    assert order == sorted(order, key=lambda name: int(name[1:]))

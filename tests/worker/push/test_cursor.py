"""How far each step of a prefill lets a push write: whole pages of both sides, and the step that ends it everything.

Most cases are those of another engine's step window (first chunk, later chunk, partial block, shared prefix, sides with
unequal blocks), in tokens in place of blocks. A partial page goes once, when no token is missing: nothing is written
twice.
"""

from __future__ import annotations

import msgspec
import pytest

from tests.support.worker.prefill_instance import MODEL, Side, instance, real
from vllm_pd_connector.bounded import at_once
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.peer import Peer, PeerKey
from vllm_pd_connector.protocol.wire.push_messages import InstanceAddress, PrefillRef, PushInto
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.worker.push.link import WriteLink

HOME = InstanceAddress("decode-1", "0" * 32, "h", 1)
BLOCKS_16 = Side(block_tokens=16)


def reached(source: Side, destination: Side, start: int, steps: list[int], stop: int) -> list[int]:
    """The cursor after each step that completes so many tokens, and after the end, of a push of tokens
    [`start`, `stop`)."""
    [writer], [reader] = instance(MODEL, source), instance(MODEL, destination, "decode-1")
    here, there = LoopbackTransport(), LoopbackTransport()
    here.register(real(writer).segments)
    there.register(real(reader).segments)
    encoded = [msgspec.msgpack.encode(real(reader, there.describe()))]
    own = [msgspec.msgpack.encode(real(writer))]
    link = WriteLink(Peer(PeerKey("h", 1, ""), lambda: 0.5), "decode-1", "", 0.0, encoded, own=own)
    at_once(link.connecting(real(writer), here))
    into = PushInto(PrefillRef("a", None), HOME, 0, 0, 0, 0, 1, b"a" * 16, (BlockTable(0, b""),), start, stop, "0" * 16)
    cursors = [start]
    for ready in steps:
        cursors.append(link.reach(into, ready, cursors[-1], final=False))
    cursors.append(link.reach(into, stop, cursors[-1], final=True))
    link.disconnect(here)
    here.close()
    there.close()
    return cursors[1:]


@pytest.mark.parametrize(
    ("start", "steps", "stop", "cursors"),
    [
        pytest.param(0, [32, 64], 64, [32, 64, 64], id="first and later chunk"),
        pytest.param(0, [33], 34, [32, 34], id="partial page"),
        pytest.param(0, [33, 48], 48, [32, 48, 48], id="partial page that fills"),
        pytest.param(0, [33], 33, [33, 33], id="partial page that nothing goes into any more"),
        pytest.param(0, [15], 16, [0, 16], id="less than a page"),
        pytest.param(0, [15], 15, [15, 15], id="a prompt of less than a page"),
        pytest.param(0, [80], 80, [80, 80], id="prefix that the prefill side had"),
        pytest.param(32, [80], 80, [80, 80], id="prefix that the decode side has"),
        pytest.param(32, [16, 32, 48], 48, [32, 32, 48, 48], id="chunk within what the decode side has"),
        pytest.param(0, [32, 80, 48], 80, [32, 80, 80, 80], id="computed again after a preemption"),
        pytest.param(32, [80, 48], 80, [80, 80, 80], id="behind what the decode side has, computed again"),
    ],
)
def test_a_step_lets_whole_pages_go(start: int, steps: list[int], stop: int, cursors: list[int]) -> None:
    assert reached(BLOCKS_16, BLOCKS_16, start, steps, stop) == cursors


@pytest.mark.parametrize(
    ("source", "destination", "cursors"),
    [
        (Side(block_tokens=32), BLOCKS_16, [0, 32, 64, 96, 100]),
        (BLOCKS_16, Side(block_tokens=32), [0, 32, 64, 96, 100]),
        (Side(block_tokens=32), Side(block_tokens=48), [0, 0, 0, 96, 100]),
        (Side(block_tokens=32, ratio=2), BLOCKS_16, [16, 48, 64, 96, 100]),
        (Side(block_tokens=4), Side(block_tokens=4), [20, 48, 64, 96, 100]),
    ],
    ids=["larger here", "larger there", "least common multiple", "pages and not blocks", "small"],
)
def test_a_step_stops_at_pages_of_both_sides(source: Side, destination: Side, cursors: list[int]) -> None:
    assert reached(source, destination, 0, [20, 48, 64, 99], 100) == cursors


def test_what_the_prefill_side_had_cached_goes_with_its_first_step() -> None:
    """Eight of eleven tokens, in blocks of four: the cursor begins at the first token all the same."""
    small = Side(block_tokens=4)
    assert reached(small, small, 0, [10], 11) == [8, 11]

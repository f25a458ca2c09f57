"""What `geometry.explain` says of a pair, against what a decode worker's receive really takes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest

from tests.support.geometry.world import Model, Side, instance
from tests.support.worker.decode_instance import Decode
from tests.support.worker.prefill_instance import PrefillInstance
from vllm_pd_connector.config import Config
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.geometry.explain import Explanation, explain_pair
from vllm_pd_connector.geometry.staging.chunks import CHUNKS_PER_BUFFER
from vllm_pd_connector.metadata import ReadFrom, ReceiveRequest
from vllm_pd_connector.transport.base import Transport
from vllm_pd_connector.transport.loopback import LoopbackTransport
from vllm_pd_connector.transport.registry import create

MODEL = Model(layers=4, heads=8, key=32, value=32)
WINDOW = Model(layers=4, heads=8, key=32, value=32, window=40)
CPU = Side(layout="HND", block_tokens=128, num_blocks=16)
SMALL = Side(layout="NHD", block_tokens=16, num_blocks=100)

PAIRS = {
    "equal": (MODEL, CPU, CPU),
    "two ranks to one": (MODEL, Side(tp=2, layout="HND", block_tokens=128, num_blocks=16), CPU),
    "other layout": (MODEL, SMALL, CPU),
    "window": (WINDOW, SMALL, SMALL),
}
STAGING = 1 << 20


def received(
    pair: str,
    ids: list[int],
    tokens: int,
    staging_bytes: int,
    make: Callable[[], Transport],
    *,
    neighbours: bool = True,
) -> tuple[int, int]:
    """Bytes and runs that a decode worker counts for a receive of this many tokens into these blocks of the pair, from
    prefill blocks 1, 2, 3 ..., or every other one before the others."""
    model, ours, theirs = PAIRS[pair]
    [worker] = instance(model, theirs, "decode-1")
    if model.window:
        ids = [b if (i + 1) * theirs.block_tokens > tokens - model.window else 0 for i, b in enumerate(ids)]
    config = Config(transport="loopback", staging_bytes=staging_bytes)
    with contextlib.closing(PrefillInstance(make=make, workers=instance(model, ours))) as prefill:
        remote = prefill.hand_over("a")
        blocks = range(1, -(-tokens // ours.block_tokens) + 1)
        held = BlockTable.of(0, blocks if neighbours else [*blocks[1::2], *blocks[::2]])
        source = ReadFrom(remote.peer, remote.remote_engine_id, remote.lease, (held,))
        decode = Decode(config, make, worker=worker)
        with contextlib.closing(decode.loop):
            assert decode.received(ReceiveRequest("a", source, (BlockTable.of(0, ids),), 0, tokens)) == [True]
    return decode.bytes, decode.runs


def explained(pair: str, tokens: int, staging_bytes: int) -> Explanation:
    model, ours, theirs = PAIRS[pair]
    sides = ([rank.manifest for rank in instance(model, side, name)] for side, name in ((ours, "p"), (theirs, "d")))
    found = explain_pair(*sides, tokens, staging_bytes // CHUNKS_PER_BUFFER)
    assert found.check.allowed and found.tokens == tokens
    return found


@pytest.mark.parametrize("staging_bytes", [0, STAGING], ids=["direct", "staged"])
@pytest.mark.parametrize("tokens", [16, 1000])
@pytest.mark.parametrize("pair", PAIRS)
def test_a_receive_takes_what_was_explained(pair: str, tokens: int, staging_bytes: int) -> None:
    movements = explained(pair, tokens, staging_bytes).movements
    count = -(-tokens // PAIRS[pair][2].block_tokens)
    read = sum(movement.read_bytes for movement in movements)
    for ids, runs, neighbours in (
        (list(range(count, 0, -1)), sum(movement.runs for movement in movements), False),
        (list(range(1, count + 1)), sum(movement.neighbouring_runs for movement in movements), True),
    ):
        found = received(pair, ids, tokens, staging_bytes, LoopbackTransport, neighbours=neighbours)
        assert found == (read, runs)


@pytest.mark.libraries
def test_over_a_library_too() -> None:
    [movement] = explained("equal", 16, 0).movements
    assert (movement.bytes, movement.runs) == (4 * 8 * 128 * 128, 4), "a page of each layer, and not 16 slots per head"
    assert received("equal", [1], 16, 0, lambda: create("nixl", {"ucx": {"TLS": "tcp"}})) == (movement.bytes, 4)

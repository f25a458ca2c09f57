"""No bytes from the network raise anything but the decoder's own error, or cost more than they should."""

from __future__ import annotations

import time
import tracemalloc
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz.decoders import DECODERS, Decoder

busy = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
SECONDS = 5.0
BYTES_FIXED, BYTES_PER_BYTE = 8 << 20, 400
"""What a decoder may use for one input: generous, a count or a length that was believed would take gigabytes."""

LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.sampled_from([2**31, 2**53, 2**62, 2**63, -1, 0, 1]),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=40),
    st.lists(st.integers(0, 9), max_size=5),
    st.dictionaries(st.text(max_size=5), st.integers(-9, 9), max_size=3),
)


def run(decoder: Decoder, content: bytes) -> None:
    """Decode; fails on an error that is not the decoder's, on much time or much memory."""
    tracemalloc.start()
    began = time.process_time()
    try:
        decoder.run(content)
    except decoder.errors as error:
        assert str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.process_time() - began < SECONDS
    assert peak < BYTES_FIXED + BYTES_PER_BYTE * len(content), f"{peak} bytes for {len(content)}"


def places(value: Any) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside."""
    found: list[tuple[Any, Any]] = []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found.append((value, key))
        found += places(inner)
    return found


@pytest.mark.parametrize("name", DECODERS)
def test_valid_examples_are_understood(name):
    for example in DECODERS[name].examples:
        DECODERS[name].run(example)
        run(DECODERS[name], DECODERS[name].pack(DECODERS[name].unpack(example)))


@pytest.mark.parametrize("name", DECODERS)
@busy
@given(data=st.data())
def test_arbitrary_bytes(name, data):
    run(DECODERS[name], data.draw(st.binary(max_size=300)))


@pytest.mark.parametrize("name", DECODERS)
@busy
@given(data=st.data())
def test_damaged_examples(name, data):
    content = bytearray(data.draw(st.sampled_from(DECODERS[name].examples)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(content)))
        match data.draw(st.sampled_from(["flip", "cut", "insert", "repeat"])):
            case "flip" if at < len(content):
                content[at] ^= 1 << data.draw(st.integers(0, 7))
            case "cut":
                del content[at : at + data.draw(st.integers(1, 20))]
            case "insert":
                content[at:at] = data.draw(st.binary(min_size=1, max_size=8))
            case "repeat":
                content[at:at] = content[at : at + data.draw(st.integers(1, 40))]
    run(DECODERS[name], bytes(content))


@pytest.mark.parametrize("name", DECODERS)
@busy
@given(data=st.data())
def test_well_formed_with_other_values(name, data):
    decoder = DECODERS[name]
    value = decoder.unpack(data.draw(st.sampled_from(decoder.examples)))
    for _ in range(data.draw(st.integers(1, 3))):
        inside = places(value)
        if not inside:
            break
        container, key = inside[data.draw(st.integers(0, len(inside) - 1))]
        match data.draw(st.sampled_from(["replace", "remove", "add", "double"])):
            case "replace":
                container[key] = data.draw(LEAVES)
            case "remove":
                del container[key]
            case "add" if isinstance(container, dict):
                container[data.draw(st.text(max_size=8))] = data.draw(LEAVES)
            case "double" if isinstance(container, list):
                container.insert(key, container[key])
    run(decoder, decoder.pack(value))

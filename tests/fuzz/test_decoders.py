"""No bytes from the network raise anything but the decoder's own error, or cost more than they should."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz.decoders import DECODERS
from tests.fuzz.forms import Decoder

busy = settings(deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
SECONDS = 5.0
BYTES_FIXED, BYTES_PER_BYTE = 8 << 20, 400
"""What a decoder may use for one input: generous, a count or a length that was believed would take gigabytes."""

SEEDS = sorted(path for path in (Path(__file__).parent / "corpus").rglob("*") if path.is_file())
assert SEEDS

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
    began = time.thread_time()
    try:
        decoder.run(content)
    except decoder.errors as error:
        assert str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert time.thread_time() - began < SECONDS
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
@given(value=st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=9), inner)))
def test_arbitrary_values(name, value):
    """Well-formed, and of no shape that was asked for: random bytes rarely get past the parser of the format."""
    run(DECODERS[name], DECODERS[name].pack(value))


@pytest.mark.parametrize("name", DECODERS)
def test_seeds(name):
    """What was found once, and what coverage-guided fuzzing begins with: every seed, given to every decoder."""
    for seed in SEEDS:
        try:
            run(DECODERS[name], seed.read_bytes())
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("name", DECODERS)
def test_nesting_at_any_place(name):
    """Parsers and writers of nested values have limits that are not the same."""
    decoder, mark = DECODERS[name], "@@ nested @@"
    packed = {msgspec.msgpack.encode(mark): (b"\x91", b"\xc0", b""), json.dumps(mark).encode(): (b"[", b"0", b"]")}
    for example in decoder.examples:
        for at in range(len(places(decoder.unpack(example)))):
            value = decoder.unpack(example)
            container, key = places(value)[at]
            container[key] = mark
            content = decoder.pack(value)
            for written, (opening, inner, closing) in packed.items():
                if written in content:
                    for depth in (200, *range(850, 1000, 30), 100_000):
                        run(decoder, content.replace(written, opening * depth + inner + closing * depth))


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("digits", [5, 4300, 4301])
def test_long_numbers(name, digits):
    """Python refuses to read integers of more than 4300 digits, with an error of its own."""
    for example in DECODERS[name].examples:
        for found in re.finditer(rb"[0-9]+", example):
            run(DECODERS[name], example[: found.start()] + b"9" * digits + example[found.end() :])


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

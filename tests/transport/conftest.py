"""The two ends of a connection, for `test_conformance` over each transport.

Other tests here override what they make otherwise.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from tests.support.transport.ends import End
from tests.support.transport.variants import SIZE, VARIANTS, AnyPeer, Variant, chosen, marked


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.module.__name__.endswith("test_conformance") and "variant" in metafunc.fixturenames:
        metafunc.parametrize("variant", _variants(metafunc.config), indirect=True, scope="module")


def _variants(config: pytest.Config) -> list[Any]:
    """All of ours, or the one that was asked for."""
    name = config.getoption("--transport")
    if not name:
        return marked(VARIANTS)
    given = json.loads(config.getoption("--transport-options"))
    return [pytest.param(replace(chosen(name), options=given) if given else chosen(name), id=name)]


@pytest.fixture(scope="module")
def variant(request: pytest.FixtureRequest) -> Variant:
    return request.param if isinstance(request.param, Variant) else VARIANTS[request.param]


@pytest.fixture(scope="module")
def living(variant: Variant) -> Iterator[AnyPeer]:
    """A peer that no test may harm; its memory holds pattern 1 unless a test writes to it."""
    peer = variant.peer(variant.transport, variant.options, SIZE)
    yield peer
    peer.stop()


@pytest.fixture
def spawn(variant: Variant) -> Iterator[Callable[..., AnyPeer]]:
    """Makes peers that a test may kill."""
    made: list[AnyPeer] = []

    def make(length: int = SIZE) -> AnyPeer:
        made.append(variant.peer(variant.transport, variant.options, length))
        return made[-1]

    yield make
    for peer in made:
        peer.tell_to_stop()
    for peer in made:
        peer.stop()


@pytest.fixture
def ends(variant: Variant) -> Iterator[Callable[..., End]]:
    """Makes the local side."""
    made: list[End] = []

    def make(length: int = SIZE, **options: Any) -> End:
        made.append(End(variant.transport, variant.options | options, length))
        return made[-1]

    yield make
    for end in made:
        end.transport.close()


@pytest.fixture(scope="module")
def standing(variant: Variant) -> Iterator[End]:
    made = End(variant.transport, variant.options, SIZE)
    yield made
    made.transport.close()


@pytest.fixture
def end(standing: End) -> End:
    """The local side for tests that end what they begin there; `ends` makes one for a test that does not."""
    standing.renew()
    return standing

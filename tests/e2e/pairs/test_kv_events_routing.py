"""One prefill and two decode instances behind a router that listens to what they announce.

The router is asked only after a decode instance has got a prompt without it, so nothing but the instance's own events
can tell it where the prompt is; and that one is the instance whose turn it is not.
"""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from examples.launch import Server, router_spec, vllm_spec
from examples.make_models import MODELS, make
from tests.support.ports import free_port
from tests.support.servers.cluster import until
from tests.support.servers.events import announcing
from tests.support.servers.pairs import Pairs
from tests.support.servers.workload import Prompt, ask, completion, prompts

FAMILY = "gqa"
TOKENS = 700

pytestmark = [pytest.mark.e2e, pytest.mark.matrix]


@dataclass(frozen=True, slots=True)
class Fleet:
    prefill: Server
    decodes: list[Server]
    router: Server

    def hand_over(self, prompt: Prompt, decode: Server) -> tuple[int, ...]:
        """Both legs by hand; the decode side's tokens."""
        keep = {"do_remote_decode": True, "do_remote_prefill": False}
        params = ask(self.prefill.url, completion(FAMILY, prompt, max_tokens=1, kv_transfer_params=keep))
        assert params.kv_transfer_params
        return ask(
            decode.url, completion(FAMILY, prompt, kv_transfer_params=params.kv_transfer_params)
        ).tokens  # fmt: skip

    def figure(self, series: str, server: Server) -> float:
        """A series of the router for an instance, 0 while it has none."""
        with urllib.request.urlopen(f"{self.router.url}/metrics", timeout=30) as answer:
            page = answer.read().decode()
        found = re.search(rf'^{series}\{{instance="{re.escape(server.url)}"[^}}]*\}} (\S+)$', page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def held(self, server: Server) -> float:
        return self.figure("vllm_pd_proxy_known_blocks", server)

    def choices(self) -> list[float]:
        """How often each decode instance was chosen."""
        return [self.figure("vllm_pd_proxy_legs_total", server) for server in self.decodes]


@pytest.fixture(scope="module")
def fleet(pairs: Pairs) -> Iterator[Fleet]:
    pairs.end()
    specs = []
    flags = [*MODELS[FAMILY].flags, "--block-size", str(MODELS[FAMILY].block_size), "--enable-prefix-caching"]
    for name, role in (("p", "kv_producer"), ("d-0", "kv_consumer"), ("d-1", "kv_consumer")):
        specs.append(
            vllm_spec(
                f"kv-events-{name}",
                make(MODELS[FAMILY]),
                flags=(*flags, *announcing(f"tcp://*:{free_port()}", f"tcp://*:{free_port()}")),
                transfer={"kv_connector": "PDConnector", "kv_role": role},
                environment={"PD_TEST_POLITE": "1", "VLLM_SERVER_DEV_MODE": "1"},
            )
        )
    prefill, *decodes = pairs.servers.start(*specs)
    spec = router_spec("kv-events-router", [prefill.url], [server.url for server in decodes])
    [router] = pairs.servers.start(replace(spec, command=(*spec.command, "--policy", "kv-events")))
    yield Fleet(prefill, decodes, router)
    pairs.servers.stop(router, prefill, *decodes)


def hold(fleet: Fleet, prompt: Prompt, decode: Server) -> tuple[int, ...]:
    """Have a decode instance hold a prompt, and the router hear of it; its tokens."""
    expected = fleet.held(decode) + len(prompt) // MODELS[FAMILY].block_size
    tokens = fleet.hand_over(prompt, decode)
    until(lambda: fleet.held(decode) >= expected, "the router to hear of it")
    return tokens


def test_a_prompt_goes_to_the_decode_instance_that_holds_it(fleet: Fleet) -> None:
    for prompt in prompts("routed by events", [TOKENS, TOKENS + 100, TOKENS + 200]):
        chosen = fleet.choices()
        holder = chosen.index(max(chosen))  # whose turn it is not
        tokens = hold(fleet, prompt, fleet.decodes[holder])
        assert ask(fleet.router.url, completion(FAMILY, prompt)).tokens == tokens
        chosen[holder] += 1
        assert fleet.choices() == chosen


def test_a_prompt_that_an_instance_has_lost_goes_where_it_is_held(fleet: Fleet) -> None:
    [prompt] = prompts("lost where it was", [TOKENS])
    first, second = fleet.decodes
    hold(fleet, prompt, first)
    before = fleet.choices()
    tokens = ask(fleet.router.url, completion(FAMILY, prompt)).tokens
    assert fleet.choices() == [before[0] + 1, before[1]]

    def forgotten() -> bool:
        urllib.request.urlopen(
            urllib.request.Request(f"{first.url}/reset_prefix_cache", method="POST"), timeout=30
        ).close()
        ask(first.url, completion(FAMILY, (0,), max_tokens=1))  # a step, which publishes it
        return fleet.held(first) == 0

    until(forgotten, "the router to hear that it is lost")
    hold(fleet, prompt, second)
    assert ask(fleet.router.url, completion(FAMILY, prompt)).tokens == tokens
    assert fleet.choices() == [before[0] + 1, before[1] + 1]

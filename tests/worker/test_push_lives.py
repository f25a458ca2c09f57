"""Requests of concurrent routers name no incarnation: whichever life of the prefill instance answers is meant."""

from __future__ import annotations

import contextlib

from test_loop import until
from test_pushing import CONFIG, Target, Writer, freed, whole

from vllm_pd_connector.protocol.peer import State


def test_the_first_request_after_a_prefill_instance_was_restarted_is_served() -> None:
    with contextlib.closing(Target(CONFIG)) as target:
        with contextlib.closing(Writer(CONFIG)) as first:
            first.whole()
            target.loop.submit([target.order(first)], [])
            assert target.wait_for("d") == [True]
            freed(first, "a")
            port = first.server.port
        [link] = target.loop._receives._asked._links.values()
        until(lambda: link.machine.state is State.DEAD, "the word that it leaves")
        with contextlib.closing(Writer(CONFIG, port)) as second:
            second.whole("b")
            target.loop.submit([target.order(second, "e", "b")], [])
            assert target.wait_for("e") == [True]
            assert whole(target.worker.memory, target.expected())
            freed(second, "b")

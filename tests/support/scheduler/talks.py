"""Conversations of engines without workers, a turn of which is read by prefill or computed."""

from __future__ import annotations

import json
from typing import Any

from vllm.v1.request import RequestStatus

from tests.support.scheduler.engines import KEEP, SAMPLED, Engine, given_back, prefilled, read, transfer
from tests.support.scheduler.halves import until

PROMPT = list(range(100, 140))
ANSWER = 9
NEXT = [50, 51, 52, 53, 54]
"""What the client says in the next turn."""
ON = {"conversations": True}


def told(engine: Engine, name: str) -> dict[str, Any] | None:
    """The parameters of a finished request, as a router keeps them."""
    params = engine.ended(name).kv_transfer_params
    found: dict[str, Any] | None = json.loads(json.dumps(params))
    return found


def decoded(decode: Engine, name: str, prompt: list[int], params: Any, **ends: Any) -> dict[str, Any] | None:
    """A decode request from its load to its end; what it answers."""
    request = decode.add(name, prompt, params, **{"max_tokens": ANSWER, **ends})
    decode.step()
    if request.status is RequestStatus.WAITING_FOR_REMOTE_KVS:
        assert read(decode.receive_of(name))
        decode.step(received={name})
    decode.run(name)
    decode.rest()
    return told(decode, name)


def turn(prefill: Engine, name: str, prompt: list[int], params: Any) -> Any:
    """The prefill of the next turn, until it is loading or computed."""
    request = prefill.add(name, prompt, params, max_tokens=1)

    def decided() -> bool:
        prefill.step()
        return request.status is not RequestStatus.WAITING

    until(decided, "the decode instance says what it holds")
    return request


def first_turn(prefill: Engine, decode: Engine) -> dict[str, Any]:
    params = decoded(decode, "d-1", PROMPT, prefilled(prefill, "p-1", PROMPT))
    assert params is not None
    given_back(prefill)
    return params


def computed(prefill: Engine, name: str, prompt: list[int], params: Any) -> None:
    """A turn that reads nothing and is computed, beside what its instance has in its own prefix cache."""
    hit = prefill.shared(prompt)
    request = turn(prefill, name, prompt, params)
    assert request.status is not RequestStatus.WAITING_FOR_REMOTE_KVS
    prefill.run(name)
    handed = told(prefill, name)
    assert handed is not None and handed["do_remote_prefill"] and handed["remote_num_tokens"] == len(prompt)
    assert sum(step.get(name, 0) for step in prefill.scheduled) == len(prompt) - hit


def next_prompt(answer: int = ANSWER) -> list[int]:
    return PROMPT + [SAMPLED] * answer + NEXT


def named(decode: Engine, name: str) -> dict[str, Any]:
    """What a router sends that has seen a stream, in which vLLM tells no parameters."""
    home = decode.connector.scheduler.producer.home
    found = {"remote_engine_id": home.engine_id, "remote_host": home.host, "remote_port": home.port}
    return KEEP | found | {"remote_request_id": name}


def both(engine: Any, **arguments: Any) -> tuple[Engine, Engine]:
    return engine(transfer("kv_producer", **ON), **arguments), engine(transfer("kv_consumer", **ON), **arguments)

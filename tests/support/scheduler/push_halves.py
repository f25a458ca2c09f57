"""A prefill instance's scheduler half that pushes, and the decode side's requests for it."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.support.scheduler.halves import BLOCK, FULL, PROMPT, TOKEN, make_half, make_request, until
from vllm_pd_connector.compat.blocks import prompt_digest
from vllm_pd_connector.geometry.blocks import BlockTable
from vllm_pd_connector.protocol.wire import push_messages as pm
from vllm_pd_connector.protocol.wire.messages import Ack, Request
from vllm_pd_connector.scheduler.half import SchedulerHalf
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint

ASK: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False, "transfer_id": "t-1"}


def concurrent(port: int = 5600, **changes: Any) -> dict[str, Any]:
    """What a concurrent router sends to the decode instance."""
    sent = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_engine_id": "kv_producer-0",
        "remote_host": "127.0.0.1",
        "remote_port": port,
        "remote_request_id": "x",
        "tp_size": 1,
        "pp_size": 1,
    }
    return sent | changes


HOME = pm.InstanceAddress("kv_consumer-0", "ab" * 16, "127.0.0.1", 5600)
ATTEMPT = b"a" * 16


def step(half: SchedulerHalf, **scheduled: tuple[int, int]) -> Any:
    """Metadata of a step: for every request (underscores for hyphens), tokens computed before and scheduled now."""
    named = {name.replace("_", "-"): value for name, value in scheduled.items()}
    cached = SimpleNamespace(
        resumed_req_ids=set(), req_ids=list(named), num_computed_tokens=[computed for computed, _ in named.values()]
    )
    tokens = {name: count for name, (_, count) in named.items()}
    fields = {"scheduled_new_reqs": [], "scheduled_cached_reqs": cached, "num_scheduled_tokens": tokens}
    output = SimpleNamespace(**fields, finished_req_ids=set())
    return half.build_metadata(output)


class PushPeer:
    """A client of a prefill instance that pushes: it plays its worker, and a decode worker. `half` is the instance's
    scheduler half."""

    def __init__(self, half: SchedulerHalf) -> None:
        self.half = half
        home = half.producer.home
        assert home is not None
        self.address = endpoint(home.host, home.port)
        self.client = SideChannelClient()
        self.seen = 0
        self.come: dict[int, Any] = {}

    def send(self, request: Request) -> Callable[[], Any]:
        """Waits for the reply, or what took its place."""
        token = self.client.send(self.address, request, 20.0)

        def outcome() -> Any:
            def there() -> bool:
                self.come.update(self.client.receive())
                return token in self.come

            until(there, f"the answer to {request}")
            return self.come[token]

        return outcome

    def register(self, digest: str, stop: int = len(PROMPT)) -> Callable[[], Any]:
        before = self.count("PushInto")
        blocks = (BlockTable(0, b"\1\0\0\0"),)
        prefill = pm.PrefillRef("t-1", None)
        answer = self.send(pm.PushInto(prefill, HOME, 0, 0, 0, 0, 1, ATTEMPT, blocks, 0, stop, digest))
        until(lambda: self.count("PushInto") > before, "the registration")
        return answer

    def count(self, kind: str) -> int:
        assert self.half.producer._server is not None
        return self.half.producer._server.counts().get(kind, 0)

    def commands(self) -> list[Any]:
        """What the worker is told to write or to cancel since the last call."""
        answer = self.send(pm.AwaitCommands(TOKEN, 0, self.seen))()
        assert isinstance(answer, pm.Commands)
        self.seen = answer.last
        return [order for order in answer.orders if not isinstance(order, pm.BeginCommand)]

    def ended(self, ok: bool = True, reason: str = "", terminal: bool = True) -> None:
        assert self.send(pm.PushEnded(TOKEN, 0, ATTEMPT, ok, reason, terminal))() == Ack()

    def close(self) -> None:
        self.client.close()


class Prefill(PushPeer):
    """A producer in mode push, with such a client."""

    def __init__(self, spec: Any = FULL, **changes: Any):
        half, self.pool = make_half("kv_producer", mode="push", spec=spec, **changes)
        half.serve([b"manifest"], [TOKEN])
        self.tables: dict[str, list[list[int]]] = {}
        unaligned = SimpleNamespace(enable_partial_hash_hits=False, scheduler_block_size=BLOCK)
        config = SimpleNamespace(kv_cache_groups=())
        of_vllm: dict[str, Any] = {"coordinator": unaligned, "kv_cache_config": config}
        of_vllm |= {"prefix_cache_lookup_enabled": bool, "allocate_slots": list}
        half.bind_cache_manager(SimpleNamespace(**of_vllm, get_block_ids=self.tables.__getitem__))
        self.free = self.pool.get_num_free_blocks()
        super().__init__(half)

    def arrive(self, *prompt: list[int], **changes: Any) -> Any:
        """A prefill that was not scheduled yet."""
        request = make_request("p-1", ASK, *prompt, **changes)
        self.half.on_new_request(request)
        return request

    def arrive_asked_for(self, **changes: Any) -> tuple[Any, Callable[[], Any]]:
        """One that a decode worker waits for; and what waits for its answer."""
        request = self.arrive(**changes)
        return request, self.register(digest_of(request))

    def held(self) -> int:
        self.half.producer.drain()
        return int(self.free - self.pool.get_num_free_blocks())

    def close(self) -> None:
        super().close()
        self.half.shutdown()


def digest_of(request: Any) -> str:
    return prompt_digest(request, request.num_prompt_tokens)

"""Engines without workers: vLLM's own scheduler, cache manager and block pool, with PDConnector in it as vLLM makes it.

A test plays the workers: `step` has the scheduler schedule, samples a token for every request whose prompt is computed,
and reports what the test says of transfers. With `overlapping` it is vLLM's AsyncScheduler, and a step is scheduled
before the results of the last are looked at, as the engine core does then. Prefill and decode engines talk over real
side channels; `read` is a decode worker that says it has read a lease.
"""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal

import torch
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from examples.make_models import MODELS, make
from tests.support.ports import free_port
from tests.support.scheduler.halves import TOKEN, until
from vllm_pd_connector import plugin
from vllm_pd_connector.connector import EncodedManifest
from vllm_pd_connector.metadata import ReceiveRequest, StepMetadata, WorkerReport
from vllm_pd_connector.protocol.wire.messages import ReadDone, ReadVerdict
from vllm_pd_connector.sidechannel.client import SideChannelClient
from vllm_pd_connector.sidechannel.net.sockets import endpoint

BLOCK = 16
SAMPLED = 7
FULL = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
WINDOWED = SlidingWindowSpec(block_size=BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32, sliding_window=24)
STATES = MambaSpec(block_size=BLOCK, shapes=((2, 8),), dtypes=(torch.float32,), mamba_cache_mode="align")
RING = CircularBufferSpec(block_size=8, num_kv_heads=1, head_size=8, dtype=torch.float32)

KEEP = {"do_remote_decode": True, "do_remote_prefill": False}
STAND_IN = EncodedManifest(b"manifest", TOKEN)


def transfer(role: str, **extra: Any) -> dict[str, Any]:
    """The configuration of PDConnector in one engine. Its leases outlive a test, so that only a release ends them."""
    own = {"side_channel_host": "127.0.0.1", "side_channel_port": free_port(), "kv_lease_duration": 600.0}
    found = {**own, **extra}
    return {"kv_connector": "PDConnector", "kv_role": role, "kv_connector_extra_config": found}


class Engine:
    """One engine; `groups` are the specs of its KV-cache groups, `config` what `--kv-transfer-config` says, `wrap` what
    another connector that has this one in it makes of its workers' report, `worker` what its one worker says of itself
    at the start, `block` the tokens of a block, which the specs must have too, or multiples of `hash_block`."""

    def __init__(
        self,
        config: Mapping[str, Any],
        groups: Sequence[KVCacheSpec] = (FULL,),
        *,
        blocks: int = 64,
        step_tokens: int = 256,
        requests: int = 8,
        overlapping: bool = False,
        policy: str = "fail",
        scheduling: Literal["fcfs", "priority"] = "fcfs",
        watermark: float = 0.0,
        wrap: Callable[[WorkerReport], Any] = lambda report: report,
        worker: EncodedManifest = STAND_IN,
        block: int = BLOCK,
        hash_block: int | None = None,
    ):
        self.role = config["kv_role"]
        self.policy = policy
        self.hashed = hash_block or block
        plugin.register()
        init_none_hash(sha256)
        vllm_config = VllmConfig(
            model_config=ModelConfig(model=str(make(MODELS["gqa"])), dtype="float32", skip_tokenizer_init=True),
            scheduler_config=SchedulerConfig(
                max_num_seqs=requests,
                max_num_batched_tokens=step_tokens,
                max_model_len=2048,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                watermark=watermark,
                policy=scheduling,
            ),
            cache_config=CacheConfig(block_size=block, enable_prefix_caching=True),
            device_config=DeviceConfig("cpu"),
            kv_transfer_config=KVTransferConfig(**{"kv_load_failure_policy": policy, **config}),
        )
        # The CPU platform turns it off; what it does to a connector does not depend on the platform.
        vllm_config.scheduler_config.async_scheduling = overlapping
        vllm_config.cache_config.num_gpu_blocks = blocks
        vllm_config.cache_config.kv_cache_layout = "LBHNC"
        specs = [KVCacheGroupSpec([f"layer {i}"], spec) for i, spec in enumerate(groups)]
        register_all_kvcache_specs(vllm_config)
        self.scheduler = (AsyncScheduler if overlapping else Scheduler)(
            vllm_config=vllm_config,
            kv_cache_config=KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=specs),
            structured_output_manager=StructuredOutputManager(vllm_config),
            block_size=block,
            hash_block_size=self.hashed,
            log_stats=True,
        )
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.free_at_start = int(self.pool.get_num_free_blocks())
        self.told: list[StepMetadata] = []
        self.said: list[EngineCoreOutput] = []
        self.scheduled: list[dict[str, int]] = []
        self._launched: deque[tuple[SchedulerOutput, list[str]]] = deque()
        self.overlapping = overlapping
        self._lag = 1 if overlapping else 0
        self._wrap = wrap
        self.connector.set_xfer_handshake_metadata_pp_aware({(0, 0): worker})

    @property
    def connector(self) -> Any:
        return self.scheduler.connector

    def add(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: Any = None,
        max_tokens: int = 4,
        stop: int = -1,
        priority: int = 0,
        lora: LoRARequest | None = None,
        prompt_logprobs: int | None = None,
    ) -> Request:
        """A request that ends after `max_tokens`, or with the token `stop`."""
        arguments = SamplingParams(
            max_tokens=max_tokens,
            prompt_logprobs=prompt_logprobs,
            ignore_eos=True,
            stop_token_ids=[] if stop < 0 else [stop],
            extra_args={"kv_transfer_params": params},
        )
        request = Request(
            request_id,
            list(prompt),
            arguments,
            None,
            lora_request=lora,
            block_hasher=self._hasher(),
            priority=priority,
        )
        self.scheduler.add_request(request)
        return request

    def step(
        self,
        received: Collection[str] = (),
        failed: Collection[str] = (),
        sent: Collection[str] = (),
        report: WorkerReport | None = None,
        invalid: Collection[int] = (),
    ) -> SchedulerOutput:
        """One step of the engine core; what the workers report comes with the results that it looks at. Another
        connector could not load the `invalid` blocks."""
        output = self.scheduler.schedule()
        self.scheduled.append(dict(output.num_scheduled_tokens))
        # vLLM counts the tokens of a step as computed when it is scheduled; who has all of its tokens then samples one.
        live = self.scheduler.requests
        sampling = [name for name in output.num_scheduled_tokens if _computed(live[name]) >= live[name].num_tokens]
        self._launched.append((output, sampling))
        # As the workers get it: vLLM pickles it.
        self.told.append(pickle.loads(pickle.dumps(_of_pd(output.kv_connector_metadata))))
        self.compute(output)
        told = KVConnectorOutput(
            finished_sending=set(sent) or None,
            finished_recving={*received, *failed} or None,
            failed_recving=set(failed),
            kv_connector_worker_meta=self._wrap(report) if report is not None else None,
            invalid_block_ids=set(invalid),
        )
        if len(self._launched) > self._lag:
            self.look(*_results(*self._launched.popleft(), told))
        else:
            assert told.is_empty(), "the results of an overlapping step are looked at in the next"
        return output

    def look(self, output: SchedulerOutput, results: ModelRunnerOutput) -> None:
        """The engine core looks at the results of a step."""
        said = self.scheduler.update_from_output(output, results)
        self.said += [answer for outputs in said.values() for answer in outputs.outputs]

    def catch_up(self) -> None:
        """Look at the results of all steps that were scheduled."""
        while self._launched:
            self.look(*_results(*self._launched.popleft(), KVConnectorOutput()))

    def compute(self, output: SchedulerOutput) -> None:
        """What the workers do in a step: nothing here."""

    def run(self, *names: str) -> None:
        """Steps until these requests have ended."""
        for _ in range(50):
            if not self.scheduler.requests.keys() & set(names):
                return
            self.step()
        raise AssertionError(f"{names} did not end in 50 steps")

    def rest(self) -> None:
        """Steps that find nothing to do: what was deferred is done after them."""
        for _ in range(2 + self._lag):
            self.step()

    def ended(self, name: str) -> EngineCoreOutput:
        """The last that a request's client heard."""
        [answer] = [answer for answer in self.said if answer.request_id == name and answer.finish_reason is not None]
        return answer

    def receive_of(self, name: str) -> ReceiveRequest:
        """What the workers were ordered to receive for a request, which is ordered once."""
        [found] = [receive for told in self.told for receive in told.receives if receive.request_id == name]
        return found

    def blocks_of(self, name: str, group: int = 0) -> list[Any]:
        return list(self.scheduler.kv_cache_manager.get_blocks(name).blocks[group])

    def held(self) -> int:
        """Blocks that are not free."""
        return self.free_at_start - int(self.pool.get_num_free_blocks())

    def shared(self, prompt: Sequence[int]) -> int:
        """How many tokens of a prompt the prefix cache has, found as vLLM finds them."""
        request = Request("looks", list(prompt), SamplingParams(max_tokens=1), None, block_hasher=self._hasher())
        return int(self.scheduler.kv_cache_manager.get_computed_blocks(request)[1])

    def _hasher(self) -> Any:
        return get_request_block_hasher(self.hashed, sha256)

    @property
    def in_flight(self) -> list[SchedulerOutput]:
        """Steps in which something is computed and whose results were not looked at."""
        return [output for output, _ in self._launched if output.num_scheduled_tokens]

    def check_empty(self) -> None:
        """Nothing of any request is left: not in vLLM's books, not in its block pool, not with us."""
        scheduler, manager = self.scheduler, self.scheduler.kv_cache_manager
        self.rest()
        left = {
            "requests": scheduler.requests,
            "running": scheduler.running,
            "waiting": [*scheduler.waiting, *scheduler.kv_holding_waiting],
            "received": scheduler.finished_recving_kv_req_ids,
            "failed": scheduler.failed_recving_kv_req_ids,
            "block tables": [m.req_to_blocks for m in manager.coordinator.single_type_managers if m.req_to_blocks],
        }
        assert not any(left.values()), {name: found for name, found in left.items() if found}
        assert self.held() == 0
        assert [block.block_id for block in self.pool.blocks if block.ref_cnt and not block.is_null] == []


def _computed(request: Request) -> int:
    return int(request.num_computed_tokens)


def _of_pd(metadata: Any) -> StepMetadata:
    """Of several connectors' metadata, ours."""
    found = [one for one in getattr(metadata, "metadata", (metadata,)) if isinstance(one, StepMetadata)]
    return found[0]


def _results(output: SchedulerOutput, sampling: list[str], told: KVConnectorOutput) -> tuple[Any, ModelRunnerOutput]:
    names = list(output.num_scheduled_tokens)
    return output, ModelRunnerOutput(
        req_ids=names,
        req_id_to_index={name: index for index, name in enumerate(names)},
        sampled_token_ids=[[SAMPLED] if name in sampling else [] for name in names],
        prompt_logprobs_dict={},
        kv_connector_output=None if told.is_empty() else told,
    )


def prefilled(engine: Engine, name: str, prompt: Sequence[int]) -> dict[str, Any]:
    """Compute a prompt for a decode instance; the parameters as the router forwards them."""
    engine.add(name, prompt, KEEP, max_tokens=1)
    engine.run(name)
    params = engine.ended(name).kv_transfer_params
    assert params is not None, "nothing was handed over"
    found: dict[str, Any] = json.loads(json.dumps(params))
    return found


def read(receive: ReceiveRequest) -> bool:
    """Have the one worker of a decode instance say that it has read what it was ordered to; whether that was held."""
    assert receive.read is not None, receive.source
    client, verdicts = SideChannelClient(), list[Any]()

    def heard() -> list[Any]:
        verdicts.extend(said for _, said in client.receive())
        return verdicts

    try:
        where = endpoint(receive.read.peer.host, receive.read.peer.port)
        client.send(where, ReadDone(receive.read.lease, 0, 1, receive.attempt, receive.shared), 20.0)
        until(lambda: bool(heard()), "a verdict")
    finally:
        client.close()
    [verdict] = verdicts
    assert isinstance(verdict, ReadVerdict), verdict
    return verdict.held


def loading(decode: Engine, name: str, prompt: Sequence[int], params: Any) -> Request:
    """A request that has got its blocks, and whose workers were told to fill them."""
    request = decode.add(name, prompt, params)
    decode.step()
    assert request.status is RequestStatus.WAITING_FOR_REMOTE_KVS
    return request


def passed_over(decode: Engine, name: str) -> Request:
    """Have a request whose load has ended wait behind another for the one place that there is for adapters: vLLM has
    put it among those that wait, and it holds its blocks."""
    decode.scheduler.lora_config = SimpleNamespace(max_loras=1)
    other = decode.add("other", range(700, 710), max_tokens=1000)
    other.lora_request = LoRARequest("one", 1, "/none")
    request = decode.scheduler.requests[name]
    request.lora_request = LoRARequest("two", 2, "/none")
    decode.step()
    decode.step(received={name})
    decode.rest()
    assert request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED) and request.num_computed_tokens > 0
    return request


def given_back(prefill: Engine) -> None:
    """Wait until nothing is leased any more, and check that nothing is left."""

    def free() -> bool:
        prefill.step()
        return prefill.held() == 0

    until(free, "the prefill's blocks")
    prefill.check_empty()

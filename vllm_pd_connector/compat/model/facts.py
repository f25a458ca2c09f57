"""What vLLM's configuration says about the model and about this worker's place in the instance."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any, TypeVar

from vllm_pd_connector import __version__
from vllm_pd_connector.compat.model.overrides import configuration_of, options_of
from vllm_pd_connector.compat.model.weights import kept_as, orders_keys, quantization_of, weights_of
from vllm_pd_connector.config import Config, parse_config
from vllm_pd_connector.geometry.manifest import CONFIGURATION, Coordinates, ModelFacts
from vllm_pd_connector.instance_info import EngineInfo
from vllm_pd_connector.protocol.weights import version_name

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T")


def model_facts(config: VllmConfig, own: Config) -> ModelFacts:
    """The model facts of a manifest.

    `model_id` overrides the model's name, for instances that serve one model under different local paths, and
    `weights_version` what the weights tell of themselves. Rope parameters and the speculative method are part of the
    facts because the cached numbers depend on them; options that decide numbers stand with the architecture, since a
    field of their own would be refused by the release before.
    """
    model = config.model_config
    name = own.model_id or str(model.model)
    version = own.weights_version
    mixed = own.allow_mixed_quantization and not orders_keys(model)
    options = options_of(model, any_quantization=mixed)
    dtype = str(model.dtype).removeprefix("torch.")
    return ModelFacts(
        model=name,
        architecture=f"{model.architecture}{options}",
        num_layers=model.get_total_num_hidden_layers(),
        hidden_size=model.get_hidden_size(),
        num_kv_heads=model.get_total_num_kv_heads(),
        head_size=model.get_head_size(),
        dtype=dtype,
        kv_cache_dtype=kept_as(str(config.cache_config.cache_dtype), dtype),
        rope=_rope(config),
        speculative=_speculative(config, name, own.weights_version),
        weights=weights_of(model, config.load_config) if version is None else version_name(version),
        quantization="mixed" if mixed else quantization_of(model),
    )


def software(config: VllmConfig, own: Config) -> str:
    """Which releases this is, and what tells the files of the model's configuration from others; nothing of these where
    nobody can, or where a name stands for the weights and all that says how they are computed with."""
    releases = f"vllm {vllm_version()}, vllm_pd_connector {__version__}"
    files = configuration_of(config.model_config) if own.weights_version is None else ""
    return f"{releases}{CONFIGURATION}{files}" if files else releases


# Methods that draft from the tokens alone, or from the model's last hidden states without attention: what is cached is
# the same without them.
_DRAFT_WITHOUT_CACHES = ("ngram", "ngram_gpu", "suffix", "medusa", "mlp_speculator")


def drafts_with_caches(config: VllmConfig) -> bool:
    """Whether a drafter writes caches of its own."""
    speculative = config.speculative_config
    return speculative is not None and speculative.method not in _DRAFT_WITHOUT_CACHES


def _speculative(config: VllmConfig, name: str, version: str | None) -> str:
    """The draft method and model, which decide what the draft layers' caches hold; empty if there are none.

    How many tokens are drafted is not among them: a drafter's pass over a prompt writes one entry per token, whatever
    it drafts afterwards. Where the number changes what is cached, in states' taps, tensors are compared.

    Drafters that are part of the served model (MTP) have its path as the draft's: there the model's `name` stands,
    which `model_id` makes the same on both sides. Another draft model is told by its weights, too, which a weights
    `version` stands for.

    Source: vLLM 0.32, `vllm/config/speculative.py` (`__post_init__`).
    """
    if not drafts_with_caches(config):
        return ""
    speculative = config.speculative_config
    assert speculative is not None
    draft = getattr(speculative, "draft_model_config", None)
    path = getattr(draft, "model", None)
    own = path in (config.model_config.model, config.model_config.model_weights)
    facts = {"method": speculative.method, "model": name if own else path}
    if draft is not None and not own and version is None:
        facts["weights"] = weights_of(draft, speculative.draft_load_config or config.load_config)
    return _canonical(facts)


_LLAMA4 = ("Llama4ForCausalLM", "Llama4ForConditionalGeneration")
_LLAMA4_TUNES_ABOVE = 32768


_READ_OF_V4 = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")


def _rope_of_v4(config: Any, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
    """What DeepSeek-V4 reads of its rope parameters, which vLLM's configuration class of 0.32 has flat, and
    transformers', which 0.33 takes, by kinds of layers.

    Source: vLLM 0.32 and 0.33, `build_rope` of `models/deepseek_v4/common/rope.py`.
    """
    of_compressed = parameters.get("compress", parameters)
    scaled = of_compressed.get("rope_type", of_compressed.get("type", "default")) != "default"
    told = {name: of_compressed.get(name) for name in _READ_OF_V4} if scaled else {}
    return {"compress": told, "rope_theta": [config.rope_theta, config.compress_rope_theta]}


def _rope(config: VllmConfig) -> str:
    """The rope parameters; with LongRoPE also which of its two sets of factors vLLM takes for all positions: the long
    ones, if the longest request that it serves is longer than what the model was first trained on. Llama 4 goes by that
    length, too, in layers without rope, and PLaMo 3 and MiniMax-M2 give it to a dynamic rope, whose base follows from
    it where the parameters say what was trained. How many heads this rank has is left out, which InternS1-Pro writes
    there.

    Source: vLLM 0.32, `Phi3LongRoPEScaledRotaryEmbedding`, `Llama4ForCausalLM`, `DynamicNTKScalingRotaryEmbedding`,
    `plamo3.py`, `minimax_m2.py`, `InternS1ProMoeAttention`.
    """
    model: Any = config.model_config
    own = model.hf_text_config
    parameters = getattr(own, "rope_parameters", None)
    if not isinstance(parameters, Mapping):
        return _canonical(parameters)
    if hasattr(own, "compress_rope_theta"):
        return _canonical(_rope_of_v4(own, parameters))
    kinds: list[Any] = [one for one in (parameters, *parameters.values()) if isinstance(one, Mapping)]  # or several
    otherwise = getattr(own, "original_max_position_embeddings", None) or 0
    trained = [
        one.get("original_max_position_embeddings") or otherwise
        for one in kinds
        if "longrope" in (one.get("rope_type"), one.get("type"))
    ]
    told: dict[str, Any] = {"long_factors": [_length_at_load(config) > length for length in trained]} if trained else {}
    if any("dynamic" in (one.get("rope_type"), one.get("type")) and "max_trained_positions" in one for one in kinds):
        told["length"] = _length_at_load(config)
    if model.architecture in _LLAMA4:
        stated = model.try_get_generation_config() | model.override_generation_config
        told["tuned"] = [bool(stated.get("attn_temperature_tuning", _length_at_load(config) > _LLAMA4_TUNES_ABOVE))]
    kept = {name: value for name, value in parameters.items() if name != "num_key_value_heads"}
    return _canonical(kept | told)


def _length_at_load(config: VllmConfig) -> int:
    """The longest request by which the model was made: `--max-model-len auto` is that of its configuration, or what
    vLLM lowers that to for a drafter, until vLLM knows what fits into its caches.

    Source: vLLM 0.32, `ModelConfig.__post_init__`, `_auto_fit_max_model_len` of `v1/core/kv_cache_utils.py`; 0.33,
    `VllmConfig._limit_max_model_len_to_draft`.
    """
    model: Any = copy(config.model_config)
    if model.original_max_model_len == -1:
        model.max_model_len = model.get_and_verify_max_len(-1)
        if hasattr(config, "_limit_max_model_len_to_draft"):
            made_by: Any = copy(config)
            made_by.model_config = model
            made_by._limit_max_model_len_to_draft()
    return int(model.max_model_len)


def _canonical(value: Any) -> str:
    return "" if value is None else json.dumps(value, sort_keys=True, default=str)


def coordinates(config: VllmConfig) -> Coordinates:
    """This worker's ranks. Call it in a worker, after the parallel groups exist.

    Source: vLLM 0.32, `vllm/distributed/parallel_state.py`.
    """
    from vllm.distributed.parallel_state import get_dcp_group, get_pcp_group, get_pp_group, get_tp_group

    parallel = config.parallel_config
    return Coordinates(
        tp_rank=get_tp_group().rank_in_group,
        tp_size=parallel.tensor_parallel_size,
        pp_rank=get_pp_group().rank_in_group,
        pp_size=parallel.pipeline_parallel_size,
        dp_rank=parallel.data_parallel_rank,  # 0 of 1 in each engine of a dense model, which are independent
        dp_size=parallel.data_parallel_size,
        dcp_size=parallel.decode_context_parallel_size,
        pcp_size=parallel.prefill_context_parallel_size,
        dcp_rank=get_dcp_group().rank_in_group,
        pcp_rank=get_pcp_group().rank_in_group,
        interleave=parallel.cp_kv_cache_interleave_size,
    )


def of_replicas(config: VllmConfig, own: T) -> tuple[T, ...]:
    """What those workers give that vLLM cannot tell apart when it collects their handshake metadata, in the order of
    their ranks: prefill-context parallel ranks that hold the same. Every worker must call it.

    Source: vLLM 0.32, `Worker.get_kv_connector_handshake_metadata` (keys are pipeline and tensor ranks, and
    prefill-context ranks only under decode-context parallelism).
    """
    parallel = config.parallel_config
    if parallel.prefill_context_parallel_size == 1 or parallel.decode_context_parallel_size > 1:
        return (own,)
    from torch.distributed import all_gather_object
    from vllm.distributed.parallel_state import get_pcp_group

    given = [own] * parallel.prefill_context_parallel_size
    all_gather_object(given, own, group=get_pcp_group().cpu_group)
    return tuple(given)


def share_engine_id(config: VllmConfig) -> None:
    """Have all prefill-context ranks take the first one's id: those of another node have drawn one of their own, and
    vLLM broadcasts it among tensor and pipeline ranks alone. Every worker must call it.

    Source: vLLM 0.32, `ensure_kv_transfer_initialized`.
    """
    if config.parallel_config.prefill_context_parallel_size > 1:
        from vllm.distributed.parallel_state import get_pcp_group

        assert config.kv_transfer_config is not None
        config.kv_transfer_config.engine_id = get_pcp_group().broadcast_object(engine_id(config), src=0)


def engine_id(config: VllmConfig) -> str:
    """The instance's id; vLLM broadcasts one to workers before it builds them (`share_engine_id`)."""
    assert config.kv_transfer_config is not None
    return str(config.kv_transfer_config.engine_id)


def rank_for_routers(config: VllmConfig) -> int:
    """The rank by which this engine's API server knows it: what routers send as `X-data-parallel-rank`. An API server
    that has the engines of its own host alone (external and hybrid load balancing) counts those, from 0.

    Source: vLLM 0.32, `vllm/v1/engine/input_processor.py`, `mooncake_connector.py` (`MooncakeConnectorWorker.dp_rank`).
    """
    parallel = config.parallel_config
    if parallel.local_engines_only:
        return parallel.data_parallel_rank_local or 0
    return int(parallel.data_parallel_index)


def engine_info(config: VllmConfig, index: int, engines: int = 1) -> EngineInfo:
    """What engine `index` behind this API server, one of so many, tells routers. vLLM has more than its configuration
    says when it scales up (`AsyncLLM.scale_elastic_ep`).

    Call it in the API server. Its configuration is what the engine core got, but an engine core of several
    data-parallel ones then adds its rank to the engine id and to the side channel's port.

    Source: vLLM 0.32, `vllm/v1/engine/core.py` (`EngineCoreProc.run_engine_core`).
    """
    assert config.kv_transfer_config is not None
    own = parse_config(config.kv_transfer_config.kv_connector_extra_config)
    parallel = config.parallel_config
    several = max(parallel.data_parallel_size, engines) > 1
    host, port = own.side_channel(index if several else 0)
    events, replay = event_endpoints(config, index if several else 0)
    return EngineInfo(
        role=str(config.kv_transfer_config.kv_role),
        mode=own.mode,
        handoff=own.handoff,
        transport=own.transport,
        engine_id=f"{engine_id(config)}_dp{index}" if several else engine_id(config),
        side_channel_host=host,
        side_channel_port=port,
        tp_size=parallel.tensor_parallel_size,
        pp_size=parallel.pipeline_parallel_size,
        dcp_size=parallel.decode_context_parallel_size,
        dp_size=parallel.data_parallel_size,
        kv_events=events,
        kv_events_replay=replay,
        conversations="on" if own.conversations else "",
        version=__version__,
    )


def event_endpoints(config: VllmConfig, index: int) -> tuple[str, str]:
    """Where engine `index` publishes its KV-cache events and where it replays them, as it binds; empty for nowhere, and
    for a port that the system chooses or an endpoint that the engine connects to, where a router cannot subscribe.

    Source: vLLM 0.32, `ZmqEventPublisher` (`offset_endpoint_port`, `_is_bind_endpoint`).
    """
    events = config.kv_events_config
    if events is None or not events.enable_kv_cache_events or events.publisher != "zmq":
        return "", ""
    binds = "*" in events.endpoint or "::" in events.endpoint or events.endpoint.startswith("ipc://")
    return _of_engine(events.endpoint if binds else "", index), _of_engine(events.replay_endpoint or "", index)


def _of_engine(endpoint: str, index: int) -> str:
    """The endpoint of a data-parallel engine: vLLM adds its index to the port."""
    place, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://"):
        return endpoint if endpoint.startswith("ipc://") else ""
    return f"{place}:{int(port) + index}" if port.isdigit() and int(port) else ""


def first_engine(config: VllmConfig) -> str | None:
    """Host of the first engine of this engine's `vllm serve`, None if this is the first. Call it in the engine core.

    An address of this host where vLLM knows none: with hybrid or external load balancing each server is on its own.

    Source: vLLM 0.32, `should_launch_bootstrap_server` and `get_mooncake_bootstrap_addr` of `mooncake_connector.py`.
    """
    parallel = config.parallel_config
    if parallel.local_engines_only:
        return "127.0.0.1" if parallel.data_parallel_rank_local else None
    return str(parallel.data_parallel_master_ip) if parallel.data_parallel_index else None


def vllm_version() -> str:
    import vllm

    return str(vllm.__version__)


READ = frozenset({"0.32", "0.33"})
"""Releases of vLLM that this package was written by."""

_RELEASED = re.compile(r"(\d+\.\d+)\.\d+(\.post\d+)?(\+(?!(g|git)?[0-9a-f]{7}|.*\bd\d{8})[\w.]+)?")
"""What follows a plus tells a device or, as NVIDIA's images have it, a commit; a date, that files were changed."""


def vllm_release() -> str:
    """What tells vLLM's code from other code of it: `X.Y` of a release, its patches and its builds for other devices;
    the whole version of whatever else there is: a build between two releases has the code of neither."""
    found = _RELEASED.fullmatch(version := vllm_version())
    return found[1] if found is not None else version

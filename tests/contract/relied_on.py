"""What this package relies on in vLLM beside the names that it imports: members, the order of calls, parameters."""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULER = "vllm.v1.core.sched.scheduler:Scheduler"
LMCACHE = "vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector"
V2 = "vllm.v1.worker.gpu"
MIXIN = "vllm.v1.worker.kv_connector_model_runner_mixin:KVConnectorModelRunnerMixin"


@dataclass(frozen=True, slots=True)
class Members:
    """Attributes, fields and methods that a class has, itself or from its bases; `since` a release of vLLM."""

    of: str
    names: tuple[str, ...]
    since: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Order:
    """A function of vLLM calls these, in this order, among others."""

    of: str
    calls: tuple[str, ...]
    says: str
    since: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Takes:
    """A function of vLLM takes these parameters, in this order (others may stand between and behind them)."""

    of: str
    parameters: tuple[str, ...]
    since: tuple[int, int] = (0, 0)


@dataclass(frozen=True, slots=True)
class Decorated:
    """A function of vLLM has these decorators, the outermost first, among others."""

    of: str
    decorators: tuple[str, ...]
    says: str


def _members(of: str, names: str, since: tuple[int, int] = (0, 0)) -> Members:
    return Members(of, tuple(names.split()), since)


MEMBERS = (
    _members(
        "vllm.v1.request:Request",
        "request_id num_prompt_tokens prompt_token_ids prompt_embeds prompt_is_token_ids _all_token_ids max_tokens "
        "status kv_transfer_params num_computed_tokens num_in_flight_tokens mm_features lora_request "
        "get_skip_reading_prefix_cache trace_headers resumable last_sched_seq sampling_params prefill_stats "
        "num_preemptions priority arrival_time",
    ),
    _members(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionRequest",
        "messages echo return_token_ids return_prompt_text kv_transfer_params drop_prompt_token_ids_with_media",
    ),
    _members(
        "vllm.entrypoints.openai.chat_completion.protocol:ChatCompletionResponse",
        "prompt_token_ids kv_transfer_params",
    ),
    _members("vllm.v1.metrics.stats:PrefillStats", "num_local_cached_tokens"),
    _members(
        "vllm.v1.request:RequestStatus",
        "FINISHED_LENGTH_CAPPED FINISHED_STOPPED FINISHED_REPETITION FINISHED_ABORTED WAITING_FOR_REMOTE_KVS WAITING "
        "PREEMPTED RUNNING WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR WAITING_FOR_STREAMING_REQ",
    ),
    _members(
        "vllm.v1.core.sched.output:SchedulerOutput",
        "scheduled_new_reqs scheduled_cached_reqs num_scheduled_tokens has_sync_kv_loads",
    ),
    _members("vllm.v1.core.sched.output:NewRequestData", "req_id num_computed_tokens"),
    _members("vllm.v1.core.sched.output:CachedRequestData", "req_ids num_computed_tokens resumed_req_ids"),
    _members(
        "vllm.v1.engine.core:EngineCore",
        "collective_rpc set_weight_version pause_scheduler resume_scheduler _finish_pause is_scheduler_paused add_lora "
        "remove_lora model_executor scheduler sleep vllm_config batch_queue_size",
    ),
    _members(
        "vllm.v1.engine.core:EngineCoreProc",
        "input_queue _process_input_queue step_fn post_step _reject_add_in_shutdown is_running engines_running "
        "_handle_mm_cache_miss _handle_request_preproc_error",
    ),
    _members("vllm.v1.engine.core:EngineCoreProc", "_handle_request_validation_error", (0, 33)),
    _members("vllm.v1.engine.core:DPEngineCoreProc", "dp_group"),
    _members("vllm.distributed.device_communicators.shm_broadcast:SpinCondition", "last_read busy_loop_s"),
    _members("vllm.v1.executor.abstract:Executor", "sleep discard"),
    _members("vllm.config.lora:LoRAConfig", "max_cpu_loras target_modules"),
    _members("vllm.lora.request:LoRARequest", "lora_name lora_int_id lora_path load_inplace"),
    _members(
        "vllm.v1.worker.gpu_worker:Worker",
        "start_weight_update start_draft_weight_update update_weights finish_weight_update reload_weights "
        "reset_weights add_lora remove_lora",
    ),
    _members(
        SCHEDULER,
        "requests failed_recving_kv_req_ids _update_from_kv_xfer_finished kv_cache_manager reset_prefix_cache "
        "defer_block_free processed_step_seq running vllm_config encoder_cache_manager ec_connector "
        "deferred_frees",
    ),
    _members("vllm.v1.core.encoder_cache_manager:EncoderCacheManager", "cached"),
    _members(
        "vllm.v1.core.block_pool:BlockPool",
        "num_gpu_blocks blocks touch free_blocks get_num_free_blocks reset_prefix_cache",
    ),
    _members("vllm.v1.core.kv_cache_utils:KVCacheBlock", "block_id is_null ref_cnt block_hash"),
    _members("vllm.v1.core.kv_cache_manager:KVCacheBlocks", "blocks get_block_ids"),
    _members("vllm.v1.engine.async_llm:AsyncLLM", "add_request errored notify_kv_transfer_request_rejected"),
    _members(
        "vllm.v1.core.kv_cache_manager:KVCacheManager",
        "coordinator get_block_ids evict_blocks free kv_cache_config prefix_cache_lookup_enabled",
    ),
    _members(
        "vllm.v1.core.kv_cache_coordinator:KVCacheCoordinator",
        "single_type_managers reset_prefix_cache enable_partial_hash_hits scheduler_block_size",
    ),
    _members("vllm.v1.kv_cache_interface:KVCacheSpec", "prefix_cacheable"),
    _members(f"{LMCACHE}:LMCacheMPConnectorUpstream", "request_trackers"),
    _members(f"{LMCACHE}:LMCacheMPRequestTracker", "state allocated_block_ids"),
    _members(f"{LMCACHE}:LMCacheMPRequestState", "PREFETCHING"),
    _members(
        "vllm.v1.core.single_type_kv_cache_manager:SingleTypeKVCacheManager", "num_cached_block cache_blocks block_size"
    ),
    _members("vllm.v1.core.single_type_kv_cache_manager:MambaManager", "cached_blocks_this_step"),
    _members("vllm.distributed.kv_transfer.kv_connector.v1.multi_connector:MultiConnector", "sub_connectors"),
    _members(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector:OffloadingConnector", "connector_scheduler"
    ),
    _members(
        "vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler:OffloadingConnectorScheduler",
        "_current_batch_allocated_block_ids",
    ),
    _members("vllm.v1.kv_cache_interface:KVCacheConfig", "num_blocks transfer_groups transfer_group_ids"),
    _members("vllm.v1.kv_cache_interface:KVCacheGroupSpec", "kv_cache_spec layer_names host_resident"),
    _members(
        "vllm.v1.kv_cache_interface:AttentionSpec",
        "block_size head_size dtype kv_quant_mode num_head_slots state_content_bytes tokens_per_state",
    ),
    _members("vllm.v1.kv_cache_interface:KVCacheSpec", "block_size dcp_sharded"),
    _members("vllm.v1.kv_cache_interface:FullAttentionSpec", "head_size_v non_causal"),
    _members("vllm.v1.kv_cache_interface:SlidingWindowSpec", "sliding_window"),
    _members("vllm.v1.kv_cache_interface:ChunkedLocalAttentionSpec", "attention_chunk_size"),
    _members("vllm.v1.kv_cache_interface:MLAAttentionSpec", "cache_role cache_dtype_str max_tp_shards"),
    _members(
        "vllm.v1.kv_cache_interface:MambaSpec",
        "shapes dtypes mamba_type mamba_cache_mode block_size num_speculative_blocks tp_replicated",
    ),
    _members("vllm.v1.kv_cache_interface:UniformTypeKVCacheSpecs", "kv_cache_specs first_spec"),
    _members("vllm.v1.kv_cache_interface:KVQuantMode", "NONE FP8_PER_TENSOR"),
    _members("vllm.v1.attention.backends.registry:MambaAttentionBackendEnum", "MAMBA1 MAMBA2 GDN_ATTN SHORT_CONV"),
    _members(
        "vllm.config.vllm:VllmConfig",
        "model_config cache_config parallel_config speculative_config kv_transfer_config compilation_config "
        "kv_events_config aux_output_config lora_config scheduler_config ec_transfer_config "
        "num_prefill_lookahead_tokens max_concurrent_batches shutdown_timeout __post_init__",
    ),
    _members(
        "vllm.config.model:ModelConfig",
        "model model_weights architecture dtype hf_config hf_text_config hf_config_path hf_overrides max_model_len "
        "original_max_model_len get_and_verify_max_len "
        "enable_sleep_mode enable_cumem_allocator "
        "get_total_num_hidden_layers get_hidden_size get_total_num_kv_heads get_head_size "
        "try_get_generation_config override_generation_config multimodal_config uses_mrope revision "
        "model_class_overrides config_format is_mm_prefix_lm is_diffusion",
    ),
    _members(
        "vllm.config.multimodal:MultiModalConfig",
        "is_multimodal_pruning_enabled video_pruning_rate mm_processor_kwargs get_video_pruning_spec "
        "mm_encoder_attn_dtype allow_missing_mm_embeddings mm_processor_cache_gb",
    ),
    _members("vllm.config.ec_transfer:ECTransferConfig", "is_ec_consumer"),
    _members("vllm.config.aux_output:AuxOutputConfig", "enable_return_routed_experts"),
    _members("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase", "is_draft_layer get_attn_backend"),
    _members("vllm.model_executor.layers.attention.attention:Attention", "kv_cache_dtype"),
    _members("vllm.models.inkling.nvidia.attention:InklingAttention", "num_total_kv_heads"),
    _members("vllm.models.inkling.amd.attention:InklingAttention", "num_total_kv_heads"),
    _members(
        "vllm.v1.attention.backends.triton_attn:TritonAttentionImpl", "_ensure_scale_caches _is_per_token_head_quant"
    ),
    # Read with a default, so that a name that is gone would have another meaning and break nothing.
    _members("vllm.v1.attention.backends.turboquant_attn:TurboQuantAttentionImpl", "_soa_store"),
    _members(
        "vllm.v1.attention.backends.mla.flashinfer_mla_sparse_sm120:FlashInferMLASparseSM120Impl", "kv_scale_format"
    ),
    _members("vllm.v1.attention.backends.rocm_attn:RocmAttentionImpl", "_use_interleaved_v_cache", (0, 33)),
    _members(
        "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors:CompressedTensorsConfig",
        "kv_cache_scheme",
    ),
    _members("vllm.config.vllm:VllmConfig", "_limit_max_model_len_to_draft", (0, 33)),
    _members("vllm.multimodal.inputs:MultiModalFeatureSpec", "data identifier modality mm_position"),
    _members("vllm.platforms.interface:Platform", "device_name get_device_capability is_fp8_fnuz is_rocm"),
    _members("vllm.config.cache:CacheConfig", "cache_dtype enable_prefix_caching"),
    _members("vllm.config.scheduler:SchedulerConfig", "disable_chunked_mm_input"),
    _members("vllm.config.kv_events:KVEventsConfig", "enable_kv_cache_events publisher endpoint replay_endpoint"),
    _members(
        "vllm.config.speculative:SpeculativeConfig",
        "method draft_model_config draft_load_config num_speculative_tokens",
    ),
    _members("vllm.config.load:LoadConfig", "load_format download_dir model_loader_extra_config"),
    _members(
        "vllm.config.parallel:ParallelConfig",
        "tensor_parallel_size pipeline_parallel_size data_parallel_rank data_parallel_size data_parallel_index "
        "data_parallel_rank_local data_parallel_master_ip local_engines_only decode_context_parallel_size "
        "prefill_context_parallel_size cp_kv_cache_interleave_size dcp_kv_cache_interleave_size "
        "data_parallel_size_local data_parallel_backend node_rank_within_dp _allow_auto_resolve_cp_interleave_size "
        "distributed_executor_backend enable_fault_tolerance use_ubatching",
    ),
    _members(
        "vllm.config.kv_transfer:KVTransferConfig",
        "is_kv_producer is_kv_consumer kv_connector kv_role engine_id kv_connector_extra_config kv_load_failure_policy "
        "__post_init__",
    ),
    _members("vllm.platforms.interface:Platform", "is_device_capability_family"),
    _members(
        "vllm.v1.outputs:KVConnectorOutput",
        "finished_sending finished_recving failed_recving kv_connector_worker_meta",
    ),
)

ORDERS = (
    Order(
        "vllm.renderers.online_renderer:OnlineRenderer.preprocess_chat",
        ("build_tok_params", "_reused_prompt_token_ids", "tokens_input", "render_chat_async", "adjust_request"),
        "a chat's limits are looked at before the ids of its prompt are taken, and its tools and format behind that",
    ),
    Order(
        "vllm.config.vllm:VllmConfig.__post_init__",
        ("_resolve_mm_embedding_inputs", "_post_init_kv_transfer_config"),
        "what vLLM makes of a connector's role, and puts in its place, is there when it has made its configuration",
    ),
    Order(
        f"{SCHEDULER}._update_from_kv_xfer_finished",
        ("update_connector_output", "_free_blocks"),
        "quarantine comes before the blocks of an ended receive are freed",
    ),
    Order(
        f"{SCHEDULER}.reset_prefix_cache",
        ("reset_prefix_cache", "reset_connector_cache"),
        "the pool is reset before the connector is asked, so leases that ended are given back in the pool's reset",
    ),
    Order(
        "vllm.v1.engine.core:EngineCoreProc.pause_scheduler",
        ("finish_requests", "set_pause_state", "_pause_complete", "_finish_pause"),
        "a pause clears caches when the engine has no work, and the connector says whether it has some",
    ),
    Order(
        "vllm.v1.engine.core:EngineCore.sleep",
        ("pause_scheduler", "sleep"),
        "caches are reset before the workers give their memory away",
    ),
    Order(
        f"{SCHEDULER}._free_request",
        ("_connector_finished", "_free_blocks"),
        "a finished prefill is offered to the connector before its blocks are freed",
    ),
    Order(
        f"{SCHEDULER}._connector_finished",
        ("remove_skipped_blocks", "get_block_ids_for_computed_tokens", "request_finished_all_groups"),
        "the connector gets the blocks of all groups, those out of a window cut off",
    ),
    Order(f"{SCHEDULER}.add_request", ("on_new_request",), "the connector hears of every new request"),
    Order(
        "vllm.v1.engine.core:EngineCoreProc.process_input_sockets",
        ("preprocess_add_request", "_handle_mm_cache_miss", "_handle_request_preproc_error"),
        "whatever no request can be made of is refused by these two",
    ),
    Order(
        "vllm.v1.engine.core:EngineCoreProc.process_input_sockets",
        ("preprocess_add_request", "_handle_request_validation_error", "_handle_request_preproc_error"),
        "and by a third",
        (0, 33),
    ),
    Order(
        "vllm.v1.engine.core:EngineCore.add_request",
        ("add_request", "abort_requests"),
        "a request that is aborted at once comes to the scheduler, and ends there",
    ),
    Order(
        f"{SCHEDULER}.schedule",
        ("get_num_new_matched_tokens", "allocate_slots", "get_loaded_kv_cache_group_ids", "update_state_after_alloc"),
        "a request is asked for remote tokens, gets blocks, and is told to the connector, in this order",
    ),
    Order(
        f"{SCHEDULER}.schedule",
        ("allocate_slots", "has_pending_block_frees", "_preempt_request"),
        "a connector that gives blocks back is asked before a running request is preempted",
    ),
    Order(
        f"{SCHEDULER}._update_waiting_for_remote_kv",
        ("cache_blocks",),
        "received blocks enter the prefix cache when the request is scheduled again",
    ),
    Order(
        f"{MIXIN}._get_kv_connector_output",
        (
            "bind_connector_metadata",
            "start_load_kv",
            "wait_for_save",
            "get_transfer_results",
            "build_connector_worker_meta",
            "clear_connector_metadata",
        ),
        "the order of a step's calls on a worker (runner V1)",
    ),
    Order(
        f"{V2}.kv_connector:ActiveKVConnector.post_forward",
        ("wait_for_save", "get_transfer_results", "build_connector_worker_meta", "clear_connector_metadata"),
        "the order of a step's calls on a worker (runner V2)",
    ),
    Order(
        f"{V2}.kv_connector:ActiveKVConnector.finalize_step",
        ("wait_for_save", "clear_connector_metadata"),
        "a step of runner V2 that drafts has ended when its drafter's caches are written",
        (0, 33),
    ),
    Order(
        f"{V2}.model_runner:GPUModelRunner.sample_tokens",
        ("post_forward", "propose", "finalize_step"),
        "a step of runner V2 that drafts ends behind its drafter",
        (0, 33),
    ),
    Order(
        "vllm.model_executor.layers.attention.kv_transfer_utils:maybe_transfer_kv_layer",
        ("wait_for_layer_load", "func", "save_kv_layer"),
        "a layer is announced when what it writes was launched",
    ),
)

_ANNOUNCED = "layers announce their pages one by one, also between the parts of a CUDA graph"
DECORATED = tuple(
    Decorated(operator, ("eager_break_during_capture", "maybe_transfer_kv_layer"), _ANNOUNCED)
    for operator in (
        "vllm.model_executor.layers.attention.attention:unified_attention_with_output",
        "vllm.model_executor.layers.attention.mla_attention:unified_mla_attention_with_output",
    )
)

TAKES = (
    Takes("vllm.renderers.online_renderer:_reused_prompt_token_ids", ("request", "renderer", "messages")),
    Takes("vllm.v1.core.block_pool:BlockPool.touch", ("self", "blocks")),
    Takes("vllm.v1.core.block_pool:BlockPool.free_blocks", ("self", "ordered_blocks")),
    Takes(f"{SCHEDULER}.reset_prefix_cache", ("self", "reset_running_requests", "reset_connector")),
    Takes("vllm.v1.core.kv_cache_manager:KVCacheManager.allocate_slots", ("self", "request", "new_computed_blocks")),
    Takes("vllm.v1.engine.core:EngineCore.collective_rpc", ("self", "method")),
    Takes("vllm.v1.engine.core:EngineCore.set_weight_version", ("self", "weight_version")),
    Takes("vllm.v1.engine.core:EngineCore.add_lora", ("self", "lora_request")),
    Takes("vllm.v1.engine.core:EngineCore.remove_lora", ("self", "lora_id")),
    Takes("vllm.v1.engine.core:EngineCoreProc.pause_scheduler", ("self", "mode", "clear_cache")),
    Takes("vllm.v1.engine.core:EngineCore._finish_pause", ("self", "clear_cache")),
    Takes("vllm.v1.executor.abstract:Executor.sleep", ("self", "level")),
    Takes("vllm.v1.executor.abstract:Executor.discard", ("self", "tags")),
    Takes("vllm.v1.core.kv_cache_manager:KVCacheManager.get_block_ids", ("self", "request_id")),
    Takes(
        "vllm.distributed.kv_transfer.kv_connector.factory:KVConnectorFactory.register_connector",
        ("cls", "name", "module_path", "class_name"),
    ),
    Takes("vllm.platforms.interface:Platform.is_device_capability_family", ("cls", "capability")),
    Takes("vllm.v1.attention.backends.triton_attn:TritonAttentionImpl._ensure_scale_caches", ("self", "kv_cache")),
    Takes("vllm.utils.deep_gemm:mqa_logits_use_mx_scales", (), (0, 33)),
    Takes("vllm.v1.attention.backends.cpu_attn:_get_attn_isa", ("dtype", "block_size", "head_size")),
)

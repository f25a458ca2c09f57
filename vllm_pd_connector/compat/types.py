"""vLLM's types, for annotations only: import this module under TYPE_CHECKING."""

from __future__ import annotations

from vllm.config import VllmConfig
from vllm.forward_context import ForwardContext
from vllm.lora.request import LoRARequest
from vllm.v1.attention.backend import AttentionMetadata
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

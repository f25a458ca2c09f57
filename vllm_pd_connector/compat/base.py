"""vLLM's connector base classes and the values that cross its interface.

Source: vLLM 0.32, `vllm/distributed/kv_transfer/kv_connector/v1/base.py` and `v1/metrics.py`, `vllm/v1/outputs.py`.
"""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
    PromMetric,
    PromMetricT,
)
from vllm.logger import init_logger
from vllm.v1.metrics.cache_hit_source import CacheHitSource

FOLLOWS_SLEEP = hasattr(KVConnectorBase_V1, "unregister_kv_caches")
"""Whether this vLLM tells connectors when the caches' memory goes and comes back."""

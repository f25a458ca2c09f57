"""Pipeline stages on the CPU: the buffers that a later stage receives into, which vLLM forgets with --enforce-eager.

They are made by the first dummy run, and the CPU worker makes none when nothing is compiled
(docs/design/vllm-cpu-findings.md). Named by `--worker-cls`, so that it is imported only where workers run.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.parallel_state import get_pp_group
from vllm.v1.worker.cpu_worker import CPUWorker


class PipelineWorker(CPUWorker):
    """CPUWorker whose runner has its buffers as soon as it has its model."""

    def load_model(self, **arguments: Any) -> None:
        super().load_model(**arguments)
        runner = self.model_runner
        if not get_pp_group().is_first_rank:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

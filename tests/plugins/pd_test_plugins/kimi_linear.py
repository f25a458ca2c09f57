"""vLLM's KimiLinearForCausalLM with what needs a GPU replaced by plain torch.

The model class is vLLM's ROCm variant, whose MLA layer is the generic one; its KDA layer calls kernels by name, which
are put in place here. The allocator splits the MLA blocks into kernel blocks, which the CPU runner zeroes wrongly; that
is mended too. So importing this module is what makes the model run, and vLLM imports it when a process loads the model:
no earlier, see the package's docstring.
"""

from __future__ import annotations

import vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn as layer
import vllm.models.kimi_k3.nvidia.ops.third_party.kda as kernels
from vllm.models.kimi_k3.amd.linear import KimiLinearForCausalLM
from vllm.v1.worker.cpu_model_runner import CPUModelRunner

from pd_test_plugins import kda, zeroing

layer.gather_initial_states = kda.gather_initial_states
kernels.chunk_kda_with_fused_gate = kda.chunk_kda_with_fused_gate
kernels.fused_recurrent_kda_packed_decode = kda.fused_recurrent_kda_packed_decode
CPUModelRunner._zero_block_ids = zeroing.zero_block_ids

__all__ = ["KimiLinearForCausalLM"]

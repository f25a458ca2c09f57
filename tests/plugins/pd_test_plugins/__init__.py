"""vLLM plugins for tests on machines without a GPU. Each is active only when its environment variable is set to 1.

    PD_TEST_REFERENCE_ATTENTION   attention in plain torch with the pages of a GPU, in any layout and block size, also
                                  with decode context parallelism
    PD_TEST_KIMI                  KimiLinearForCausalLM on the CPU, with its KDA layers in plain torch, prefix caching
                                  and chunked prefill
    PD_TEST_POLITE                vLLM's processes sleep for 0.1 ms where they would poll a queue without pause; more of
                                  them than cores otherwise keep each other from running for tens of seconds
    PD_TEST_WINDOWED_HYBRID       Qwen3NextForCausalLM with a window in one of its attention layers
    PD_TEST_POISON                caches that hold NaN at the start, and the reference attention reads what it masks
    PD_TEST_AVX2                  vLLM finds a processor with AVX2 alone, and takes its kernels for that; torch takes
                                  its own with ATEN_CPU_CAPABILITY=avx2
    PD_TEST_CORRUPT               the connector's transfers exchange bytes, to prove that a test can see it
    PD_TEST_HOLD                  not 1 but a path: workers' writes and steps wait while files beside it say so (`hold`)

vLLM calls `register` in every process that it starts. Only names are registered here: importing a model or a backend
this early breaks vLLM's search for its CPU kernels when a worker starts.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path


def register() -> None:
    """Entry point of group `vllm.general_plugins`; may be called more than once in a process."""
    if _wanted("PD_TEST_POLITE"):
        # vLLM looks the function up at each call (distributed/utils.py, sched_yield).
        os.sched_yield = _nap
    if _wanted("PD_TEST_AVX2"):
        _hide_avx512()
    if _wanted("PD_TEST_REFERENCE_ATTENTION"):
        _register_reference_attention()
    if _wanted("PD_TEST_KIMI"):
        _register_kimi()
    if _wanted("PD_TEST_WINDOWED_HYBRID"):
        _register_windowed_hybrid()
    if _wanted("PD_TEST_POISON"):
        from pd_test_plugins.poison import have_new_blocks_zeroed

        have_new_blocks_zeroed()
    if _wanted("PD_TEST_CORRUPT"):
        from pd_test_plugins.corrupt import corrupt_transfers

        corrupt_transfers()
    if where := os.environ.get("PD_TEST_HOLD"):
        from pd_test_plugins.hold import hold_workers

        hold_workers(where)


def _hide_avx512() -> None:
    """vLLM has no setting for its kernels: it asks torch what the processor can do, when `vllm._custom_ops` is imported
    and wherever it chooses among kernels.

    The process of `vllm serve` itself has loaded them when it looks for plugins, and computes nothing; those that
    compute are started by it and begin anew.

    Raises:
        RuntimeError: the kernels were loaded before, in a process that computes.

    Source: vLLM 0.32, `CpuPlatform.import_kernels`.
    """
    import torch

    serves = Path(sys.argv[0]).name == "vllm" and multiprocessing.parent_process() is None
    loaded = "/vllm/_C" in Path("/proc/self/maps").read_text()
    if torch.cpu._is_avx512_supported() and loaded and not serves:
        raise RuntimeError("PD_TEST_AVX2: vLLM's kernels for AVX-512 are loaded already")
    for name in (
        "_is_avx512_supported",
        "_is_avx512_bf16_supported",
        "_is_amx_tile_supported",
        "_is_amx_fp16_supported",
    ):
        setattr(torch.cpu, name, _no)


def _no() -> bool:
    return False


def _nap() -> None:
    time.sleep(1e-4)


def _wanted(variable: str) -> bool:
    return os.environ.get(variable) == "1"


def _register_reference_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from vllm_pd_connector.compat.model.backends import register_plain_backend

    name, path = "CPU_ATTN_REFERENCE", "pd_test_plugins.reference_attention.ReferenceAttentionBackend"
    # An attention layer looks its backend up by `get_name()`, so the name has to be a member of its own; the platform
    # only ever asks for CPU_ATTN, so that has to lead to the same class.
    if name not in AttentionBackendEnum.__members__:
        AttentionBackendEnum.register(name, path)
    register_backend(AttentionBackendEnum.CPU_ATTN, path)
    register_plain_backend(name)

    from pd_test_plugins.slot_mapping import replace_slot_mapping

    replace_slot_mapping()


def _register_windowed_hybrid() -> None:
    from vllm.model_executor.models import ModelRegistry

    ModelRegistry.register_model("Qwen3NextForCausalLM", "pd_test_plugins.windowed_hybrid:WindowedQwen3NextForCausalLM")


def _register_kimi() -> None:
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from pd_test_plugins.cpu_platform import keep_prefix_caching

    ModelRegistry.register_model("KimiLinearForCausalLM", "pd_test_plugins.kimi_linear:KimiLinearForCausalLM")
    register_backend(AttentionBackendEnum.CPU_MLA, "pd_test_plugins.kimi_mla.HybridMLABackend")
    keep_prefix_caching()

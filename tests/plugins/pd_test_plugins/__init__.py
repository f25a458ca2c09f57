"""vLLM plugins for tests on machines without a GPU. Each is active only when its environment variable is 1.

    PD_TEST_REFERENCE_ATTENTION   attention in plain torch with the pages of a GPU, in any layout and block size
    PD_TEST_KIMI                  KimiLinearForCausalLM on the CPU, with its KDA layers in plain torch, prefix caching
                                  and chunked prefill
    PD_TEST_POLITE                vLLM's processes sleep for 0.1 ms where they would poll a queue without pause; more of
                                  them than cores otherwise keep each other from running for tens of seconds
    PD_TEST_CORRUPT               the connector's transfers exchange bytes, to prove that a test can see it

vLLM calls `register` in every process that it starts. Only names are registered here: importing a model or a backend
this early breaks vLLM's search for its CPU kernels when a worker starts.
"""

from __future__ import annotations

import os
import time


def register() -> None:
    """Entry point of group `vllm.general_plugins`; may be called more than once in a process."""
    if _wanted("PD_TEST_POLITE"):
        # vLLM looks the function up at each call (distributed/utils.py, sched_yield).
        os.sched_yield = _nap
    if _wanted("PD_TEST_REFERENCE_ATTENTION"):
        _register_reference_attention()
    if _wanted("PD_TEST_KIMI"):
        _register_kimi()
    if _wanted("PD_TEST_CORRUPT"):
        from pd_test_plugins.corrupt import corrupt_transfers

        corrupt_transfers()


def _nap() -> None:
    time.sleep(1e-4)


def _wanted(variable: str) -> bool:
    return os.environ.get(variable) == "1"


def _register_reference_attention() -> None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    name, path = "CPU_ATTN_REFERENCE", "pd_test_plugins.reference_attention.ReferenceAttentionBackend"
    # An attention layer looks its backend up by `get_name()`, so the name has to be a member of its own; the platform
    # only ever asks for CPU_ATTN, so that has to lead to the same class.
    if name not in AttentionBackendEnum.__members__:
        AttentionBackendEnum.register(name, path)
    register_backend(AttentionBackendEnum.CPU_ATTN, path)


def _register_kimi() -> None:
    from vllm.model_executor.models import ModelRegistry
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    from pd_test_plugins.cpu_platform import keep_prefix_caching

    ModelRegistry.register_model("KimiLinearForCausalLM", "pd_test_plugins.kimi_linear:KimiLinearForCausalLM")
    register_backend(AttentionBackendEnum.CPU_MLA, "pd_test_plugins.kimi_mla.HybridMLABackend")
    keep_prefix_caching()

"""Attention backends by the form of their pages; the list is the product's, tests and other packages add theirs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from vllm_pd_connector.compat.model import backends


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backends, "_plain", set(backends._plain))


def test_a_backend_is_plain_once_it_is_registered() -> None:
    assert not backends.is_plain("SOMEBODYS_ATTN")
    backends.register_plain_backend("SOMEBODYS_ATTN")
    backends.register_plain_backend("SOMEBODYS_ATTN")
    assert backends.is_plain("SOMEBODYS_ATTN")


def test_registering_one_imports_nothing_of_vllm_and_torch() -> None:
    """Plugins do it before vLLM has searched for its kernels."""
    program = (
        "import sys; from vllm_pd_connector.compat.model.backends import register_plain_backend; "
        "register_plain_backend('A'); assert not {'vllm', 'torch'} & set(sys.modules), set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_backend_of_the_tests_is_known_because_its_plugin_says_so() -> None:
    """In a process of its own: the plugin puts its backend into vLLM's place, for good."""
    program = (
        "from pd_test_plugins import register; from vllm_pd_connector.compat.model.backends import is_plain; "
        "assert not is_plain('CPU_ATTN_REFERENCE'); register(); assert is_plain('CPU_ATTN_REFERENCE')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, env=os.environ | {"PD_TEST_REFERENCE_ATTENTION": "1"})

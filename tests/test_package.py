"""What an installation of this project brings."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
import re

PACKAGE = "vllm-pd-connector"


def test_vllm_finds_the_plugin() -> None:
    [plugin] = importlib.metadata.entry_points(group="vllm.general_plugins", name="pd_connector")
    assert plugin.value == "vllm_pd_connector.plugin:register"
    assert callable(plugin.load())


def test_the_package_says_that_it_is_typed() -> None:
    assert importlib.resources.files("vllm_pd_connector").joinpath("py.typed").is_file()


def test_no_dependency_but_the_extras_names_vllm_or_a_transport() -> None:
    required = [line for line in importlib.metadata.requires(PACKAGE) or [] if "extra ==" not in line]
    assert not [line for line in required if line.startswith(("vllm", "torch", "nixl", "mooncake"))]


def test_vllm_is_bounded() -> None:
    [vllm] = [line for line in importlib.metadata.requires(PACKAGE) or [] if re.match(r"vllm\b(?!-)", line)]
    assert ">=0.32" in vllm
    assert "<0.34" in vllm

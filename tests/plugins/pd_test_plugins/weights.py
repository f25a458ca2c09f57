"""A worker extension that changes weights in place, as a trainer's does (`--worker-extension-cls`).

vLLM and connectors know nothing of its method: whoever calls it over `collective_rpc` names the weights afterwards.
"""

from __future__ import annotations

from typing import Any

import torch

from pd_test_plugins.memory import TidiesMemory


class ChangesWeights:
    """Part of vLLM's worker class; `model_runner` is the worker's."""

    model_runner: Any

    @torch.inference_mode()
    def scale_norms(self, factor: str) -> int:
        """Multiply the norms before attention by a factor, and with them keys and values; returns how many there were.

        The CPU backend computes with packed copies of the projections, which a change of the parameters does not reach.
        """
        found = [value for name, value in self.model_runner.get_model().named_parameters() if "input_layernorm" in name]
        for value in found:
            value.data.mul_(float(factor))
        return len(found)


class Operated(ChangesWeights, TidiesMemory):
    """Everything that is asked of the workers of an instance under attack."""
